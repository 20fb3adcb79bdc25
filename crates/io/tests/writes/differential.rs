//! Compares a write out of device memory with the same write out of host memory.
//!
//! Two files of one file system get the same operations: writes at given offsets, at the descriptor's own offset, at
//! the end (O_APPEND) and far past the end, and truncation and holes between them. One file is written from a device.
//! After each step the count, the errno, the file offset and every byte of the files are the same.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use spinio_device::emulated::Emulated;
use spinio_io::{Part, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Rng, file, mount_fixture, with_deadline};

/// Longest write. The smallest bounce buffer pool is smaller.
const MAX_LEN: u64 = 6 << 20;

/// Runtimes with different settings.
fn runtimes() -> Vec<Runtime> {
    let all = vec![
        Settings::default(),
        Settings { bounce_limit: 4 << 20, ..Settings::default() },
        Settings { routes: vec![Route::Copy, Route::Store], bounce_limit: 6 << 20, ..Settings::default() },
    ];
    all.into_iter().map(Runtime::new).collect()
}

/// The result of a call, and the descriptor's offset afterwards.
type CallResult = (Result<usize, Errno>, Option<u64>);

fn seek(fd: Fd, to: u64) {
    let _ = linux::lseek(fd, to as i64, libc::SEEK_SET);
}

fn file_offset(fd: Fd) -> Option<u64> {
    linux::lseek(fd, 0, libc::SEEK_CUR).ok()
}

/// Host memory with the alignment of device memory.
struct Host {
    memory: Vec<u8>,
    start: usize,
}

impl Host {
    fn new(bytes: &[u8], skew: usize) -> Host {
        let mut memory = vec![0; bytes.len() + skew + 2 * linux::PAGE];
        let start = memory.as_mut_ptr().align_offset(linux::PAGE) + skew % linux::PAGE;
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        Host { memory, start }
    }

    fn ptr(&self) -> *const u8 {
        self.memory[self.start..].as_ptr()
    }
}

/// One write. `own_offset`: at the descriptor's own offset, which is set to `from` first.
#[derive(Clone, Copy, Debug)]
struct Call {
    from: u64,
    own_offset: bool,
    len: usize,
    flags: u32,
}

/// Writes to both files; fails unless the results are the same.
fn compare(
    device: &'static Emulated,
    runtime: &Runtime,
    (ours, theirs): (Fd, Fd),
    call: Call,
    rng: &mut Rng,
    what: &str,
) {
    let Call { from, own_offset: own, len, flags } = call;
    let direct = linux::status_flags(ours).unwrap_or(0) & libc::O_DIRECT != 0;
    // The memory a device write goes through is always aligned enough for O_DIRECT.
    let skew = if direct || rng.chance(50) { 0 } else { rng.below(5000) as usize };
    let size = (skew + len).max(1);
    let buffer = if rng.chance(20) { Buffer::host_mapped(device, size) } else { Buffer::new(device, size) };
    let bytes: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
    buffer.write_at(skew, &bytes);
    let host = Host::new(&bytes, skew);
    let at = (!own).then_some(from);

    seek(ours, if own { from } else { 7 });
    let wrote = if rng.chance(30) {
        // In parts, some of them in host memory.
        let (mut parts, mut done) = (Vec::new(), 0);
        while done < len {
            let n = (1 + rng.near_page_edge(len as u64 / 2 + 1) as usize).min(len - done);
            // The kernel refuses misaligned vectors with O_DIRECT.
            let n = if direct { n.next_multiple_of(4096).min(len - done) } else { n };
            parts.push(match rng.chance(40) {
                true => Part::Host(host.ptr().wrapping_add(done), n),
                false => Part::Device(buffer.target(skew + done), n),
            });
            done += n;
        }
        runtime.write_parts(ours, at, flags, &parts)
    } else if flags != 0 {
        runtime.write_parts(ours, at, flags, &[Part::Device(buffer.target(skew), len)])
    } else {
        runtime.write(ours, at, buffer.target(skew), len)
    };
    let result: CallResult = (wrote.map_err(|e| e.kind.errno()), file_offset(ours));

    seek(theirs, if own { from } else { 7 });
    // SAFETY: `host` has `len` bytes.
    let wrote = unsafe {
        match (at, flags) {
            (Some(at), 0) => linux::pwrite(theirs, host.ptr(), len, at),
            (None, 0) => linux::write(theirs, host.ptr(), len),
            (at, flags) => linux::pwritev(theirs, &[[host.ptr() as usize, len]], at.map_or(-1, |at| at as i64), flags),
        }
    };
    assert_eq!(result, (wrote, file_offset(theirs)), "{what}: {call:?}, skew {skew}");
}

fn assert_same_files(ours: &Path, theirs: &Path, what: &str) {
    let (a, b) = (std::fs::read(ours).expect("readable"), std::fs::read(theirs).expect("readable"));
    assert_eq!(a.len(), b.len(), "{what}: the length");
    assert_eq!(a.iter().zip(&b).position(|(a, b)| a != b), None, "{what}: the first byte that differs");
}

fn length(rng: &mut Rng) -> usize {
    match rng.below(8) {
        0 => rng.below(3) as usize,
        1 => rng.near_page_edge(64 << 10) as usize,
        2 => MAX_LEN as usize,
        3 => (rng.below(8) << 19) as usize,
        _ => rng.near_page_edge(2 << 20) as usize,
    }
}

fn open(path: &Path, flags: i32) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).expect("open")
}

/// Random operations on a pair of files.
fn random_writes(place: &mount_fixture::MountFixture, rounds: u64, rng: &mut Rng) {
    // Slow, so that a copy that is not waited for is not complete by chance.
    let device = emulated("size=64M,bar=32M,p2p=1,latency_us=300");
    let runtimes = runtimes();
    let (ours, theirs) = (place.file("ours"), place.file("theirs"));
    for round in 0..rounds {
        let size = rng.near_page_edge(1 << 20);
        for path in [&ours, &theirs] {
            file::create_filled(path, size);
        }
        let kind = [0, libc::O_APPEND, libc::O_DSYNC, libc::O_SYNC, libc::O_DIRECT, libc::O_DIRECT | libc::O_DSYNC];
        let flags = *rng.choose(&kind);
        let Ok(_) = OpenOptions::new().read(true).custom_flags(flags).open(&ours) else { continue };
        let files = (open(&ours, flags), open(&theirs, flags));
        let fds = (files.0.as_raw_fd(), files.1.as_raw_fd());
        for step in 0..8 {
            let which = rng.below(runtimes.len() as u64) as usize;
            let what = format!("{} round {round} step {step}, flags {flags:o}, runtime {which}", place.kind);
            let size = files.0.metadata().expect("metadata").len();
            let mut call = Call {
                from: match rng.below(6) {
                    0 => size + rng.below(3 << 20),
                    1 => 0,
                    2 => size,
                    _ => rng.near_page_edge(size + 1),
                },
                own_offset: rng.chance(40),
                len: length(rng),
                // RWF_DSYNC, RWF_SYNC, RWF_APPEND
                flags: if rng.chance(15) { *rng.choose(&[2, 4, 16]) } else { 0 },
            };
            if flags & libc::O_DIRECT != 0 && rng.chance(80) {
                call.from = call.from / 4096 * 4096;
                call.len = call.len / 4096 * 4096;
            }
            with_deadline(&what, || compare(device, &runtimes[which], fds, call, rng, &what));
            if rng.chance(30) {
                let to = rng.near_page_edge(MAX_LEN);
                let at = rng.near_page_edge(size + 1);
                let punches = rng.chance(50);
                for file in [&files.0, &files.1] {
                    match punches {
                        true => drop(file::punch_hole(file, at, 100_000)),
                        false => file.set_len(to).expect("truncate"),
                    }
                }
            }
            assert_same_files(&ours, &theirs, &what);
        }
    }
}

#[test]
fn device_writes_equal_host_writes() {
    mount_fixture::for_each_kind(|place| random_writes(place, 6, &mut Rng::from_env(place.kind.len() as u64 * 77)));
}

#[test]
fn write_ends_at_end_of_allocation() {
    let device = emulated("size=16M");
    let runtime = Runtime::new(Settings::default());
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("file"), 0);
    let buffer = Buffer::new(device, 200_000);
    let _neighbour = Buffer::new(device, 300_000);
    for (skew, len) in [(0, 1 << 20), (199_999, 10), (100_000, 100_001)] {
        assert_eq!(runtime.write(file.as_raw_fd(), Some(5), buffer.target(skew), len).unwrap(), 200_000 - skew);
    }
    let none = runtime.write(file.as_raw_fd(), Some(5), buffer.target(200_000), 1);
    assert_eq!(none.map_err(|e| e.kind.errno()), Err(Errno::FAULT));
    assert_eq!(file.metadata().unwrap().len(), 200_005);
    // Parts after the one that leaves its allocation are not written.
    let host = [7u8; 100];
    for next in [Part::Host(host.as_ptr(), host.len()), Part::Device(buffer.target(0), 100)] {
        let parts = [Part::Host(host.as_ptr(), 50), Part::Device(buffer.target(199_000), 2000), next];
        assert_eq!(runtime.write_parts(file.as_raw_fd(), Some(300_000), 0, &parts).unwrap(), 1050);
        assert_eq!(file.metadata().unwrap().len(), 301_050);
    }
}

/// The kernel takes 1024 vectors. A device part that crosses the end of a bounce buffer becomes two vectors.
#[test]
fn vector_of_more_than_1024_entries_is_short() {
    const PART: usize = 9000;
    let device = emulated("size=16M");
    let runtime = Runtime::new(Settings::default());
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let file = file::create_filled(&path, 0);
    let bytes = file::bytes(0, 1024 * PART, 1);
    let buffer = Buffer::new(device, bytes.len());
    buffer.write_at(0, &bytes);
    let parts: Vec<Part> = (0..1024)
        .map(|i| match i % 2 {
            0 => Part::Host(bytes[i * PART..].as_ptr(), PART),
            _ => Part::Device(buffer.target(i * PART), PART),
        })
        .collect();
    let wrote = runtime.write_parts(file.as_raw_fd(), Some(0), 0, &parts).unwrap();
    // 4.6 MB of device memory, in bounce buffers of 2 MiB: two parts are cut, or one where the buffers lie one after the
    // other, so that many of the last vectors are left out.
    assert!(wrote == 1022 * PART || wrote == 1023 * PART, "{wrote}");
    assert!(std::fs::read(&path).unwrap() == bytes[..wrote]);
}

#[test]
fn invalid_offsets_and_descriptors() {
    let device = emulated("size=16M,bar=8M");
    let runtime = Runtime::new(Settings::default());
    let mut rng = Rng::new(6);
    let place = mount_fixture::create("tree").unwrap();
    let (ours, theirs) = (place.file("ours"), place.file("theirs"));
    let files = (file::create_filled(&ours, 300_000), file::create_filled(&theirs, 300_000));
    let huge = i64::MAX as u64;
    for from in [huge, huge - 1, huge - 70_000, huge + 1, u64::MAX, u64::MAX - 4095] {
        for len in [0, 1, 4096, 200_000] {
            let fds = (files.0.as_raw_fd(), files.1.as_raw_fd());
            compare(
                device,
                &runtime,
                fds,
                Call { from, own_offset: false, len, flags: 0 },
                &mut rng,
                "offset out of range",
            );
        }
    }
    let read_only = File::open(&ours).unwrap();
    let path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&ours).unwrap();
    let directory = File::open(place.path()).unwrap();
    for (what, fd) in [
        ("read only", read_only.as_raw_fd()),
        ("O_PATH", path.as_raw_fd()),
        ("directory", directory.as_raw_fd()),
        ("no descriptor", 9999),
        ("negative descriptor", -1),
    ] {
        for own in [false, true] {
            for len in [0, 100, 200_000] {
                compare(device, &runtime, (fd, fd), Call { from: 0, own_offset: own, len, flags: 0 }, &mut rng, what);
            }
        }
    }
    assert_same_files(&ours, &theirs, "after errors");
}

/// Larger than the bounce buffer pool. A file system that refuses the whole write must not get a part of it, and the
/// bytes must not be gathered in other memory.
#[test]
fn misaligned_long_write_is_accepted_or_refused_as_a_whole() {
    const STAGING: usize = 4 << 20;
    let buffer = Buffer::new(emulated("size=64M"), 12 << 20);
    let bytes = file::bytes(0, 12 << 20, 1);
    buffer.write_at(0, &bytes);
    let host = Host::new(&bytes, 0);
    mount_fixture::for_each_kind(|place| {
        let runtime = Runtime::new(Settings { bounce_limit: STAGING as u64, ..Settings::default() });
        for (offset, len) in [(0, (9 << 20) + 100), (100, 9 << 20), (100, (9 << 20) - 100), (512, (8 << 20) + 512)] {
            let results = [false, true].map(|ours| {
                let path = place.file(if ours { "ours" } else { "theirs" });
                drop(file::create_filled(&path, 1 << 20));
                let flags = libc::O_DIRECT;
                let Ok(file) = OpenOptions::new().write(true).custom_flags(flags).open(&path) else { return None };
                let wrote = match ours {
                    true => {
                        let wrote = runtime.write(file.as_raw_fd(), Some(offset), buffer.target(0), len);
                        wrote.map_err(|e| e.kind.errno())
                    }
                    // SAFETY: `host` has at least `len` bytes.
                    false => unsafe { linux::pwrite(file.as_raw_fd(), host.ptr(), len, offset) },
                };
                Some((wrote, std::fs::read(&path).unwrap()))
            });
            let [theirs, ours] = results.each_ref().map(|result| result.as_ref().map(|(wrote, _)| *wrote));
            assert_eq!(ours, theirs, "{}: {len} bytes at {offset}", place.kind);
            assert!(results[0] == results[1], "{}: {len} bytes at {offset}: the files differ", place.kind);
        }
        let lines = runtime.stats().rows;
        assert!(
            lines.iter().all(|l| l.reason != Reason::NoPinnedMemory),
            "{}: more memory than the bounce buffer pool: {lines:?}",
            place.kind
        );
    });
}
