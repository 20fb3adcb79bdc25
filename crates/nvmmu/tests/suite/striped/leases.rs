//! Leases that are lost while a session writes.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::cell::Cell;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use super::{WIDTH, assert_same_bytes, contiguous_file, folder};
use spinio_io::Settings;
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_nvmmu::Direction::Download;
use spinio_nvmmu::{ErrorKind, OutputMode, Session};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::wait_exclusive;

use crate::common::{Buffer, bytes, leak_runtime};

/// Reports a lease only a number of times, and verifies that it is checked before each direct write.
#[derive(Default)]
struct LeaseCheckingSyscalls {
    /// How many more times the lease is reported, once this is set.
    calls_left: Mutex<Option<u32>>,
    /// A lost lease leaves no time to release it.
    force_broken: bool,
    direct: AtomicUsize,
    unchecked_writes: AtomicUsize,
}

thread_local! {
    static LEASE_CHECKED: Cell<bool> = const { Cell::new(false) };
}

impl Syscalls for LeaseCheckingSyscalls {
    fn has_write_lease(&self, fd: i32) -> bool {
        let mut left = self.calls_left.lock().unwrap();
        let there = LinuxSyscalls.has_write_lease(fd) && *left != Some(0);
        *left = left.map(|n| n.saturating_sub(1));
        LEASE_CHECKED.set(there);
        there
    }

    fn lease_break_time(&self) -> Option<u64> {
        if self.force_broken { Some(0) } else { LinuxSyscalls.lease_break_time() }
    }

    unsafe fn pwritev(
        &self,
        route: Route,
        fd: i32,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize, Errno> {
        if route == Route::Direct {
            self.direct.fetch_add(1, Relaxed);
            self.unchecked_writes.fetch_add(usize::from(!LEASE_CHECKED.replace(false)), Relaxed);
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) }
    }
}

#[test]
fn lost_lease_stops_filler_writes() {
    let Some(folder) = folder() else { return };
    const STRIPES: u64 = 8;
    for times in [0, 1, 4, 100] {
        let Some(path) = contiguous_file(folder.path(), (STRIPES + 2) as usize * WIDTH as usize) else { return };
        wait_exclusive(&path).unwrap();
        let kernel: &LeaseCheckingSyscalls = Box::leak(Box::default());
        let device = Buffer::with_bytes(&bytes(9000, 6));
        let mut session =
            Session::begin_with_stripes(leak_runtime(Settings::default(), kernel), &path, WIDTH, 8192).unwrap();
        let mut expected = bytes((STRIPES + 2) as usize * WIDTH as usize, 1);
        for stripe in 1..=STRIPES {
            session.hint_range(stripe * WIDTH + 5, 9000);
        }
        for stripe in 1..=STRIPES {
            let at = stripe * WIDTH + 5;
            session.move_range(&path, device.at(0), at, 9000, Download).unwrap();
            expected[at as usize..at as usize + 9000].copy_from_slice(&bytes(9000, 6));
        }
        let gathered = session.report();
        *kernel.calls_left.lock().unwrap() = Some(times);
        let report = session.end().unwrap();
        assert_same_bytes(&path, &expected, "at the end");
        let direct = kernel.direct.load(Relaxed) as u64;
        assert_eq!(kernel.unchecked_writes.load(Relaxed), 0, "a request without a check of the lease");
        let kept = direct > 0 && direct == (report.full_stripe / WIDTH);
        assert!(direct == 0 || kept, "{report:?}");
        if times < 100 {
            // Once when the lease is taken; the watcher may have checked meanwhile.
            assert!(direct <= u64::from(times.saturating_sub(1)), "{direct} of {times}");
            assert!(matches!(report.mode, OutputMode::Aligned(_)), "{}", report.mode);
            assert!(report.unaligned >= 9000, "{report:?}");
        } else {
            assert_eq!(
                (report.mode.clone(), report.unaligned - gathered.unaligned),
                (OutputMode::Preread, 0),
                "{report:?}"
            );
        }
        // Bytes of a download in stripes of two extents of the file were written unaligned at once.
        assert_eq!(report.unaligned + report.full_stripe - report.filler, STRIPES * 9000, "{report:?}");
    }
}

#[test]
fn file_is_not_truncated_after_lost_lease() {
    let Some(folder) = folder() else { return };
    // Narrow stripes, so that any extent of the file contains full ones.
    let (end, width) = (9000, 8192);
    let mut refused = 0;
    // For some value of `times` the lease is lost when all is written, and before the file is truncated. If the process
    // that breaks the lease is still waiting, the file is truncated nevertheless.
    for (times, by_force) in (1..9).flat_map(|times| [(times, true), (times, false)]) {
        let path = folder.path().join(format!("out{times}-{by_force}"));
        let kernel: &LeaseCheckingSyscalls =
            Box::leak(Box::new(LeaseCheckingSyscalls { force_broken: by_force, ..LeaseCheckingSyscalls::default() }));
        let device = Buffer::with_bytes(&bytes(9000, 6));
        let mut session =
            Session::begin_with_stripes(leak_runtime(Settings::default(), kernel), &path, width, 0).unwrap();
        session.hint_range(0, end as u64);
        session.move_range(&path, device.at(0), 0, end as u64, Download).unwrap();
        session.report();
        *kernel.calls_left.lock().unwrap() = Some(times);
        let ended = session.end();
        let got = fs::read(&path).unwrap();
        assert!(got[..end] == bytes(9000, 6));
        assert!(got[end..].iter().all(|b| *b == 0));
        match ended {
            Ok(report) => assert_eq!(got.len(), end, "{report:?}"),
            Err(error) => {
                assert!(by_force && got.len() > end, "{error}");
                assert_eq!(error.kind, ErrorKind::Failed(Errno::BUSY));
                assert!(error.to_string().contains(&format!("past byte {end} it has zeros")), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "no stripe was written that reaches beyond the end");
}
