//! Which way a write goes, and that its bytes are there whichever it takes.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;

use spinio_io::kernel::Kernel;
use spinio_io::stats::{Direction, Line};
use spinio_io::{Buffer as Explained, Part, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Call, Effect, FaultyKernel, file, leaks, place};

const SIZE: usize = 8 << 20;

struct Case {
    what: &'static str,
    flags: i32,
    mapped: bool,
    offset: u64,
    len: usize,
    staging: u64,
    expected: (Route, Reason),
}

fn written(runtime: &Runtime) -> Vec<Line> {
    runtime.stats().lines.into_iter().filter(|l| l.direction == Direction::Write && l.bytes > 0).collect()
}

#[test]
fn each_way_is_taken_where_it_should_be() {
    let device = emulated("size=64M,bar=16M,p2p=1,latency_us=300");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    let plain = Case {
        what: "plain",
        flags: 0,
        mapped: false,
        offset: 0,
        len: SIZE,
        staging: 128 << 20,
        expected: (Route::Copy, Reason::IntoCache),
    };
    let cases = [
        Case { what: "plain, mapped", mapped: true, ..plain },
        Case { what: "in parts", staging: 4 << 20, expected: (Route::Copy, Reason::InParts), ..plain },
        Case { what: "own O_DIRECT", flags: libc::O_DIRECT, expected: (Route::Direct, Reason::OwnDirect), ..plain },
        Case {
            what: "own O_DIRECT, mapped",
            flags: libc::O_DIRECT,
            mapped: true,
            offset: 4096,
            expected: (Route::P2p, Reason::OwnDirect),
            ..plain
        },
        // One step for others, which a direct write is not.
        Case { what: "O_DSYNC", flags: libc::O_DSYNC, ..plain },
        Case { what: "O_DSYNC, cut", flags: libc::O_DSYNC, offset: 5, ..plain },
        Case { what: "O_DSYNC, appended", flags: libc::O_DSYNC | libc::O_APPEND, ..plain },
        Case { what: "O_DSYNC, small", flags: libc::O_DSYNC, len: 4096, ..plain },
        Case {
            what: "O_DSYNC, in parts",
            flags: libc::O_DSYNC,
            offset: 5,
            staging: 4 << 20,
            expected: (Route::Direct, Reason::Synchronous),
            ..plain
        },
        Case {
            what: "O_SYNC, mapped",
            flags: libc::O_SYNC,
            mapped: true,
            expected: (Route::P2p, Reason::Around),
            ..plain
        },
        plain,
    ];
    for case in &cases {
        let what = case.what;
        let subject = file::written(&path, 2 * SIZE as u64);
        file::evict(&subject);
        let runtime = Runtime::new(Settings { staging: case.staging, ..Settings::default() });
        let opened = OpenOptions::new().read(true).write(true).custom_flags(case.flags).open(&path).unwrap();
        let buffer = if case.mapped { Buffer::host_mapped(device, SIZE) } else { Buffer::new(device, SIZE) };
        let bytes = file::bytes(77, case.len, 1);
        buffer.put(0, &bytes);
        let explained = runtime
            .explain_write(opened.as_raw_fd(), case.offset, case.len as u64, Explained::of(&buffer.allocation()))
            .unwrap();
        let longest = explained.schedule.segments.iter().max_by_key(|s| s.len).map(|s| (s.route, s.reason));
        assert_eq!(longest, Some(case.expected), "{what}: explained");
        assert_eq!(explained.schedule.len(), case.len as u64, "{what}: explained");
        let wrote = runtime.write(opened.as_raw_fd(), Some(case.offset), buffer.target(0), case.len).unwrap();
        assert_eq!(wrote, case.len, "{what}");
        let at = if case.flags & libc::O_APPEND != 0 { 2 * SIZE } else { case.offset as usize };
        let mut expected = file::bytes(0, 2 * SIZE, 0);
        expected.resize(expected.len().max(at + case.len), 0);
        expected[at..at + case.len].copy_from_slice(&bytes);
        assert!(std::fs::read(&path).unwrap() == expected, "{what}: other bytes");
        let most = written(&runtime).into_iter().max_by_key(|l| l.bytes).map(|l| (l.route, l.reason));
        assert_eq!(most, Some(case.expected), "{what}");
        // What was opened for the write was closed behind it: the kernel executes no file that is open for writing.
        drop((opened, subject));
        assert_eq!(leaks::writers_of(&path), 0, "{what}");
    }
}

/// Peer-to-peer that lies is found out by the first write, which arrives all the same.
#[test]
fn a_lying_peer_is_trusted_no_more() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    drop(file::written(&path, SIZE as u64));
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let buffer = Buffer::host_mapped(device, SIZE);
    for effect in [Effect::Lie, Effect::Short(512), Effect::Fail(spinio_sys::Errno::REMOTEIO)] {
        let kernel = FaultyKernel::new();
        kernel.always(Call::Pwritev(Route::P2p), effect);
        let runtime = Runtime::with_kernel(Settings::default(), kernel);
        for version in 1..4 {
            let bytes = file::bytes(0, SIZE, version);
            buffer.put(0, &bytes);
            assert_eq!(runtime.write(opened.as_raw_fd(), None, buffer.target(0), SIZE).unwrap(), SIZE);
            assert!(std::fs::read(&path).unwrap() == bytes, "{effect:?}: other bytes");
            assert_eq!(spinio_sys::linux::lseek(opened.as_raw_fd(), 0, libc::SEEK_CUR), Ok(SIZE as u64));
            spinio_sys::linux::lseek(opened.as_raw_fd(), 0, libc::SEEK_SET).unwrap();
        }
        assert!(written(&runtime).iter().all(|l| l.route != Route::P2p), "{effect:?}: {:?}", written(&runtime));
        // A verdict was found, but a write that was short says nothing of the next.
        let tries = if matches!(effect, Effect::Short(_)) { 3 } else { 1 };
        assert_eq!(kernel.hits(), tries, "{effect:?}");
    }
}

/// A file that may not be opened again is written all the same.
#[test]
fn without_a_twin_the_page_cache_serves() {
    let device = emulated("size=64M");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    let kernel = FaultyKernel::new();
    let runtime = Runtime::with_kernel(Settings { staging: 4 << 20, ..Settings::default() }, kernel);
    let opened = OpenOptions::new().write(true).create(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
    let buffer = Buffer::new(device, SIZE);
    buffer.put(0, &file::bytes(0, SIZE, 3));
    kernel.always(Call::OpenAgain, Effect::Fail(spinio_sys::Errno::ACCESS));
    assert_eq!(runtime.write(opened.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(std::fs::read(&path).unwrap() == file::bytes(0, SIZE, 3));
    assert!(written(&runtime).iter().all(|l| l.route == Route::Copy));
    assert!(kernel.hits() > 0);
    drop(File::open(&path).unwrap());
}

/// Notes how a file is opened for a write of ours.
#[derive(Default)]
struct Openings(Mutex<Vec<i32>>);

impl Kernel for Openings {
    fn open_again(&self, tid: u32, fd: i32, flags: i32) -> Result<i32, Errno> {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            self.0.lock().unwrap().push(flags);
        }
        linux::open(&std::ffi::CString::new(format!("/proc/{tid}/fd/{fd}")).unwrap(), flags, 0)
    }
}

/// What a program has asked for with O_SYNC holds for the descriptor that takes its place.
#[test]
fn a_twin_waits_for_storage_as_the_programs_own_descriptor_does() {
    let device = emulated("size=64M");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    let buffer = Buffer::new(device, SIZE);
    for flags in [libc::O_DSYNC, libc::O_SYNC] {
        drop(file::written(&path, 0));
        let kernel = Box::leak(Box::new(Openings::default()));
        let runtime = Runtime::with_kernel(Settings { staging: 4 << 20, ..Settings::default() }, kernel);
        let opened = OpenOptions::new().write(true).custom_flags(flags).open(&path).unwrap();
        assert_eq!(runtime.write(opened.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        let twins = kernel.0.lock().unwrap();
        assert!(!twins.is_empty() && twins.iter().all(|twin| twin & libc::O_SYNC == flags), "{flags:o}: {twins:x?}");
        assert!(written(&runtime).iter().any(|l| l.route == Route::Direct));
    }
}

/// Flags of one call are the kernel's to obey, on the program's own descriptor.
#[test]
fn a_write_with_flags_of_its_own_takes_no_twin() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    for mapped in [false, true] {
        let buffer = if mapped { Buffer::host_mapped(device, SIZE) } else { Buffer::new(device, SIZE) };
        // RWF_DSYNC, RWF_SYNC, RWF_APPEND
        for flags in [2, 4, 16] {
            drop(file::written(&path, 0));
            let kernel = Box::leak(Box::new(Openings::default()));
            let runtime = Runtime::with_kernel(Settings { staging: 4 << 20, ..Settings::default() }, kernel);
            let opened = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
            let parts = [Part::Device(buffer.target(0), SIZE)];
            assert_eq!(runtime.write_parts(opened.as_raw_fd(), Some(0), flags, &parts).unwrap(), SIZE);
            assert_eq!(*kernel.0.lock().unwrap(), [], "flags {flags}, mapped: {mapped}");
            assert!(written(&runtime).iter().all(|l| l.route == Route::Copy), "{:?}", written(&runtime));
        }
    }
}

/// A program that has a lease on its file is told when somebody else opens it, and SPIN is nobody else.
#[test]
fn a_lease_of_the_programs_is_not_broken_by_its_own_write() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    for mapped in [false, true] {
        drop(file::written(&path, 0));
        let opened = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
        let fd = opened.as_raw_fd();
        // Told by a signal that is ignored unless somebody handles it.
        const F_SETSIG: i32 = 10;
        // SAFETY: the descriptor is this test's own.
        let leased = unsafe {
            libc::fcntl(fd, F_SETSIG, libc::SIGURG) == 0 && libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0
        };
        assert!(leased, "no lease: {}", std::io::Error::last_os_error());
        let runtime = Runtime::new(Settings { staging: 4 << 20, ..Settings::default() });
        let buffer = if mapped { Buffer::host_mapped(device, SIZE) } else { Buffer::new(device, SIZE) };
        buffer.put(0, &file::bytes(0, SIZE, 4));
        assert_eq!(runtime.write(fd, Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETLEASE) }, libc::F_WRLCK, "it is being broken, mapped: {mapped}");
        assert!(written(&runtime).iter().all(|l| l.route == Route::Copy), "{:?}", written(&runtime));
        drop(opened);
        assert!(std::fs::read(&path).unwrap() == file::bytes(0, SIZE, 4));
    }
}

/// What inotify tells of a file, all of it so far.
struct Told(File);

impl Told {
    fn of(path: &std::path::Path) -> Told {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: both only take numbers and a name that ends with a zero; the descriptor is nobody else's.
        unsafe {
            let told = File::from_raw_fd(libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC));
            let events = libc::IN_OPEN | libc::IN_CLOSE_WRITE;
            assert!(libc::inotify_add_watch(told.as_raw_fd(), name.as_ptr(), events) > 0);
            Told(told)
        }
    }

    fn events(&mut self) -> u32 {
        let (mut all, mut bytes) = (0, [0; 4096]);
        while let Ok(got) = self.0.read(&mut bytes) {
            // Of a file itself: without a name behind.
            let events = bytes[..got].chunks_exact(size_of::<libc::inotify_event>());
            all |= events.map(|e| u32::from_ne_bytes(e[4..8].try_into().unwrap())).fold(0, |a, b| a | b);
        }
        all
    }
}

/// docs/semantics.md says so of writes around the page cache; others are made through the program's own descriptor.
#[test]
fn inotify_tells_of_a_write_around_the_page_cache_and_of_no_other() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = place::on("tree").unwrap();
    let path = place.file("file");
    let buffer = Buffer::host_mapped(device, SIZE);
    for (flags, around) in [(libc::O_SYNC, true), (0, false)] {
        file::evict(&file::written(&path, SIZE as u64));
        let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
        let mut told = Told::of(&path);
        let runtime = Runtime::new(Settings::default());
        assert_eq!(runtime.write(opened.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        let lines = written(&runtime);
        assert_eq!(lines.iter().any(|l| l.reason == Reason::Around), around, "{lines:?}");
        // Closed before the call returns, so it is there now.
        let both = libc::IN_OPEN | libc::IN_CLOSE_WRITE;
        match around {
            true => assert_eq!(told.events(), both),
            false => assert_eq!(told.events() & libc::IN_CLOSE_WRITE, 0),
        }
    }
}
