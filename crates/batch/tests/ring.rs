//! A ring that the kernel no longer serves, under a batch: nothing is lost but the ring, and no buffer is reused that
//! storage may still write.
//!
//! The refusal is a seccomp filter on the shadow worker that created the ring. It stays with that thread, so these
//! tests have their own process.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use spinio_batch::{Batches, ReadOp};
use spinio_device::emulated::POISON;
use spinio_io::kernel::Syscalls;
use spinio_io::{Runtime, Settings};
use spinio_sys::Errno;
use spinio_sys::linux::Ring;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, file, mount_fixture, with_deadline};

const SIZE: usize = 16 << 20;

/// Which calls of `io_uring_enter` fail.
#[derive(Clone, Copy, Debug)]
enum DeniedCalls {
    All,
    /// Calls that only wait: reads are in flight then.
    WaitOnly,
    /// Calls that submit reads.
    Submitting,
}

#[derive(Debug)]
struct DenyingKernel {
    which: DeniedCalls,
    errno: Errno,
    rings: AtomicUsize,
}

impl Syscalls for DenyingKernel {
    fn new_io_uring(&self, entries: u32) -> Result<Ring, Errno> {
        self.rings.fetch_add(1, SeqCst);
        let ring = Ring::new(entries)?;
        install_filter(self.which, self.errno);
        Ok(ring)
    }
}

/// For this thread, from now on.
fn install_filter(which: DeniedCalls, errno: Errno) {
    const ENTER: u32 = 426;
    // Of `struct seccomp_data`: the call's number, and the lower half of its second argument.
    let (number, second) = (0, 24);
    let load = |at| libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: at };
    let equal = |value, jt, jf| libc::sock_filter { code: 0x15, jt, jf, k: value };
    let answer = |what| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: what };
    let (if_none, if_some) = match which {
        DeniedCalls::All => (1, 1),
        DeniedCalls::WaitOnly => (1, 0),
        DeniedCalls::Submitting => (0, 1),
    };
    let mut filter = [
        load(number),
        equal(ENTER, 0, 2),
        load(second),
        equal(0, if_none, if_some),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter live across the call; it concerns this thread alone.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(done, 0, "no seccomp filter: {}", std::io::Error::last_os_error());
}

#[test]
fn batch_completes_when_io_uring_is_denied_midway() {
    if let Err(e) = Ring::new(8) {
        return eprintln!("skipped: no io_uring: {e}");
    }
    let place = mount_fixture::create("tree").unwrap();
    let subject = file::create_filled(&place.file("subject"), SIZE as u64);
    subject.sync_all().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&subject);
    let device = emulated("size=64M");
    for (which, errno) in [
        (DeniedCalls::All, Errno::PERM),
        (DeniedCalls::WaitOnly, Errno::PERM),
        (DeniedCalls::Submitting, Errno::NOSYS),
        (DeniedCalls::Submitting, Errno::AGAIN),
    ] {
        let kernel: &'static DenyingKernel =
            Box::leak(Box::new(DenyingKernel { which, errno, rings: AtomicUsize::new(0) }));
        // As few buffers as possible: one that is lost is missed at once.
        let runtime = Runtime::with_kernel(
            Settings { bounce_limit: 4 << 20, kernel_cache_dir: None, ..Settings::default() },
            kernel,
        );
        let buffer = Buffer::new(device, 8 << 20);
        for round in 0..3 {
            file::evict(&subject);
            // Far apart, so that many reads are in flight.
            let piece = |i: u64| ReadOp {
                fd,
                offset: (i * 7 + round) * 65_536 % (SIZE as u64 - 5000),
                len: 5000,
                address: buffer.addr().0 + i * 6000,
                ..ReadOp::default()
            };
            let mut batch: Vec<_> = (0..600).map(piece).collect();
            let done = with_deadline("a batch without its ring", || runtime.batch(&mut batch)).unwrap();
            assert_eq!((done.failed, done.bytes), (0, 600 * 5000), "{which:?} {errno:?}");
            for (i, p) in batch.iter().enumerate() {
                let seen = buffer.range_bytes(i * 6000..(i + 1) * 6000);
                assert!(seen[..5000] == file::bytes(p.offset, 5000, 0), "{which:?} {errno:?}: operation {i}");
                assert!(seen[5000..].iter().all(|&b| b == POISON), "{which:?} {errno:?}: after operation {i}");
            }
        }
        let rings = kernel.rings.load(SeqCst);
        match (which, errno) {
            // No thread may have had to wait.
            (DeniedCalls::WaitOnly, _) => {}
            // That is temporary, so every batch tries again.
            (_, Errno::AGAIN) => assert!(rings >= 3, "{rings}"),
            _ => assert_eq!(rings, 1, "a ring that was refused is not created again"),
        }
    }
}
