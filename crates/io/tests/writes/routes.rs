//! The route of each kind of write. The bytes are in the file on every route.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;

use spinio_io::kernel::Syscalls;
use spinio_io::stats::{Direction, RouteRow};
use spinio_io::{Buffer as Explained, Part, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{
    Buffer, Call, Effect, FaultySyscalls, eventually, file, leak_check, mount_fixture, wait_exclusive, with_deadline,
};

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

fn write_lines(runtime: &Runtime) -> Vec<RouteRow> {
    runtime.stats().rows.into_iter().filter(|l| l.direction == Direction::Write && l.bytes > 0).collect()
}

#[test]
fn each_route_is_used_where_expected() {
    let device = emulated("size=64M,bar=16M,p2p=1,latency_us=300");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let buffered = Case {
        what: "buffered",
        flags: 0,
        mapped: false,
        offset: 0,
        len: SIZE,
        staging: 128 << 20,
        expected: (Route::Copy, Reason::IntoCache),
    };
    let cases = [
        Case { what: "buffered, mapped", mapped: true, ..buffered },
        Case { what: "in chunks", staging: 4 << 20, expected: (Route::Copy, Reason::Chunked), ..buffered },
        Case { what: "own O_DIRECT", flags: libc::O_DIRECT, expected: (Route::Direct, Reason::AppODirect), ..buffered },
        Case {
            what: "own O_DIRECT, mapped",
            flags: libc::O_DIRECT,
            mapped: true,
            offset: 4096,
            expected: (Route::P2p, Reason::AppODirect),
            ..buffered
        },
        // A buffered write is atomic with respect to other writers; a direct write is not.
        Case { what: "O_DSYNC", flags: libc::O_DSYNC, ..buffered },
        Case { what: "O_DSYNC, cut", flags: libc::O_DSYNC, offset: 5, ..buffered },
        Case { what: "O_DSYNC, appended", flags: libc::O_DSYNC | libc::O_APPEND, ..buffered },
        Case { what: "O_DSYNC, small", flags: libc::O_DSYNC, len: 4096, ..buffered },
        Case {
            what: "O_DSYNC, in chunks",
            flags: libc::O_DSYNC,
            offset: 5,
            staging: 4 << 20,
            expected: (Route::Direct, Reason::Synchronous),
            ..buffered
        },
        Case {
            what: "O_SYNC, mapped",
            flags: libc::O_SYNC,
            mapped: true,
            expected: (Route::P2p, Reason::CacheBypass),
            ..buffered
        },
        buffered,
    ];
    for case in &cases {
        let what = case.what;
        let subject = file::create_filled(&path, 2 * SIZE as u64);
        file::evict(&subject);
        let runtime = Runtime::new(Settings { bounce_limit: case.staging, ..Settings::default() });
        let opened = OpenOptions::new().read(true).write(true).custom_flags(case.flags).open(&path).unwrap();
        let buffer = if case.mapped { Buffer::host_mapped(device, SIZE) } else { Buffer::new(device, SIZE) };
        let bytes = file::bytes(77, case.len, 1);
        buffer.write_at(0, &bytes);
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
        assert!(std::fs::read(&path).unwrap() == expected, "{what}: wrong bytes");
        let most = write_lines(&runtime).into_iter().max_by_key(|l| l.bytes).map(|l| (l.route, l.reason));
        assert_eq!(most, Some(case.expected), "{what}");
        // The shadow descriptor of the write is closed after it: the kernel does not execute a file that is open for
        // writing.
        drop((opened, subject));
        assert_eq!(leak_check::writers_of(&path), 0, "{what}");
    }
}

/// Lengths that no call can have come from programs that use the library directly.
#[test]
fn explained_write_has_the_limits_of_pwrite() {
    let place = mount_fixture::create("tree").unwrap();
    let subject = file::create_filled(&place.file("file"), SIZE as u64);
    let buffer = Buffer::new(emulated("size=64M"), SIZE);
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
    let explain =
        |offset, len| runtime.explain_write(subject.as_raw_fd(), offset, len, Explained::of(&buffer.allocation()));
    let last = i64::MAX as u64;
    for (offset, len) in [(1, u64::MAX), (u64::MAX, 1), (0, u64::MAX), (last + 1, 0), (4096, last - 4095)] {
        let error = explain(offset, len).unwrap_err();
        assert_eq!(error.kind.errno(), Errno::INVAL, "{len} bytes at {offset}: {error}");
    }
    for (offset, len) in [(0, last), (4096, last - 4096), (5, last - 5), (last, 0)] {
        assert_eq!(explain(offset, len).unwrap().schedule.len(), len, "{len} bytes at {offset}");
    }
}

/// The first write detects corrupting peer-to-peer DMA, and its bytes are correct all the same.
#[test]
fn corrupting_p2p_is_not_trusted() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    drop(file::create_filled(&path, SIZE as u64));
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let buffer = Buffer::host_mapped(device, SIZE);
    for effect in [Effect::Corrupt, Effect::Short(512), Effect::Fail(spinio_sys::Errno::REMOTEIO)] {
        let kernel = FaultySyscalls::new();
        kernel.inject_always(Call::Pwritev(Route::P2p), effect);
        let runtime = Runtime::with_kernel(Settings::default(), kernel);
        for version in 1..4 {
            let bytes = file::bytes(0, SIZE, version);
            buffer.write_at(0, &bytes);
            assert_eq!(runtime.write(opened.as_raw_fd(), None, buffer.target(0), SIZE).unwrap(), SIZE);
            assert!(std::fs::read(&path).unwrap() == bytes, "{effect:?}: wrong bytes");
            assert_eq!(spinio_sys::linux::lseek(opened.as_raw_fd(), 0, libc::SEEK_CUR), Ok(SIZE as u64));
            spinio_sys::linux::lseek(opened.as_raw_fd(), 0, libc::SEEK_SET).unwrap();
        }
        assert!(write_lines(&runtime).iter().all(|l| l.route != Route::P2p), "{effect:?}: {:?}", write_lines(&runtime));
        // Corruption and errors decide P2P trust at the first write. A short write does not, so each write tries again.
        let tries = if matches!(effect, Effect::Short(_)) { 3 } else { 1 };
        assert_eq!(kernel.injected(), tries, "{effect:?}");
    }
}

/// A file that cannot be reopened is written through the program's descriptor.
#[test]
fn without_shadow_fd_the_page_cache_is_used() {
    let device = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let kernel = FaultySyscalls::new();
    let runtime = Runtime::with_kernel(Settings { bounce_limit: 4 << 20, ..Settings::default() }, kernel);
    let opened = OpenOptions::new().write(true).create(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
    let buffer = Buffer::new(device, SIZE);
    buffer.write_at(0, &file::bytes(0, SIZE, 3));
    kernel.inject_always(Call::Reopen, Effect::Fail(spinio_sys::Errno::ACCESS));
    assert_eq!(runtime.write(opened.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(std::fs::read(&path).unwrap() == file::bytes(0, SIZE, 3));
    assert!(write_lines(&runtime).iter().all(|l| l.route == Route::Copy));
    assert!(kernel.injected() > 0);
    drop(File::open(&path).unwrap());
}

/// Records the flags with which a file is reopened for a write of SPIN.
#[derive(Default)]
struct OpenRecorder(Mutex<Vec<i32>>);

impl Syscalls for OpenRecorder {
    fn reopen(&self, tid: u32, fd: i32, flags: i32) -> Result<i32, Errno> {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            self.0.lock().unwrap().push(flags);
        }
        linux::open(&std::ffi::CString::new(format!("/proc/{tid}/fd/{fd}")).unwrap(), flags, 0)
    }
}

/// The shadow descriptor has the O_SYNC or O_DSYNC flag of the program's descriptor.
#[test]
fn shadow_fd_keeps_sync_flags() {
    let device = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let buffer = Buffer::new(device, SIZE);
    for flags in [libc::O_DSYNC, libc::O_SYNC] {
        drop(file::create_filled(&path, 0));
        let kernel = Box::leak(Box::new(OpenRecorder::default()));
        let runtime = Runtime::with_kernel(Settings { bounce_limit: 4 << 20, ..Settings::default() }, kernel);
        let opened = OpenOptions::new().write(true).custom_flags(flags).open(&path).unwrap();
        assert_eq!(runtime.write(opened.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        let shadow_flags = kernel.0.lock().unwrap();
        assert!(
            !shadow_flags.is_empty() && shadow_flags.iter().all(|shadow| shadow & libc::O_SYNC == flags),
            "{flags:o}: {shadow_flags:x?}"
        );
        assert!(write_lines(&runtime).iter().any(|l| l.route == Route::Direct));
    }
}

/// `RWF_*` flags are passed to the kernel in a call on the program's own descriptor.
#[test]
fn write_with_rwf_flags_uses_no_shadow_fd() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    for mapped in [false, true] {
        let buffer = if mapped { Buffer::host_mapped(device, SIZE) } else { Buffer::new(device, SIZE) };
        // RWF_DSYNC, RWF_SYNC, RWF_APPEND
        for flags in [2, 4, 16] {
            drop(file::create_filled(&path, 0));
            let kernel = Box::leak(Box::new(OpenRecorder::default()));
            let runtime = Runtime::with_kernel(Settings { bounce_limit: 4 << 20, ..Settings::default() }, kernel);
            let opened = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
            let parts = [Part::Device(buffer.target(0), SIZE)];
            assert_eq!(runtime.write_parts(opened.as_raw_fd(), Some(0), flags, &parts).unwrap(), SIZE);
            assert_eq!(*kernel.0.lock().unwrap(), [], "flags {flags}, mapped: {mapped}");
            assert!(write_lines(&runtime).iter().all(|l| l.route == Route::Copy), "{:?}", write_lines(&runtime));
        }
    }
}

/// The kernel notifies a lease holder when another process opens the file. SPIN's own writes and reads must not trigger
/// that.
#[test]
fn app_lease_is_not_broken_by_own_write_or_read() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    for mapped in [false, true] {
        drop(file::create_filled(&path, 0));
        wait_exclusive(&path).unwrap();
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
        let fd = opened.as_raw_fd();
        // The notification is a signal whose default action is to be ignored.
        const F_SETSIG: i32 = 10;
        // SAFETY: the descriptor is this test's own.
        let leased = unsafe {
            libc::fcntl(fd, F_SETSIG, libc::SIGURG) == 0 && libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0
        };
        assert!(leased, "no lease: {}", std::io::Error::last_os_error());
        let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
        let buffer = if mapped { Buffer::host_mapped(device, SIZE) } else { Buffer::new(device, SIZE) };
        buffer.write_at(0, &file::bytes(0, SIZE, 4));
        assert_eq!(runtime.write(fd, Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        let read = with_deadline("a read of a leased file", || runtime.read(fd, Some(0), buffer.target(0), SIZE));
        assert_eq!(read.unwrap(), SIZE);
        // SAFETY: as above.
        let lease = unsafe { libc::fcntl(fd, libc::F_GETLEASE) };
        assert_eq!(lease, libc::F_WRLCK, "the lease is being broken, mapped: {mapped}");
        assert!(write_lines(&runtime).iter().all(|l| l.route == Route::Copy), "{:?}", write_lines(&runtime));
        drop(opened);
        assert!(std::fs::read(&path).unwrap() == file::bytes(0, SIZE, 4));
    }
}

/// The inotify events of a file so far.
struct InotifyWatch(File);

impl InotifyWatch {
    fn new(path: &std::path::Path) -> InotifyWatch {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: both take only numbers and a NUL-terminated name; no other object owns the descriptor.
        unsafe {
            let inotify = File::from_raw_fd(libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC));
            let events = libc::IN_OPEN | libc::IN_CLOSE_WRITE;
            assert!(libc::inotify_add_watch(inotify.as_raw_fd(), name.as_ptr(), events) > 0);
            InotifyWatch(inotify)
        }
    }

    fn events(&mut self) -> u32 {
        let (mut all, mut bytes) = (0, [0; 4096]);
        while let Ok(got) = self.0.read(&mut bytes) {
            // Events of the file itself have no name after them.
            let events = bytes[..got].chunks_exact(size_of::<libc::inotify_event>());
            all |= events.map(|e| u32::from_ne_bytes(e[4..8].try_into().unwrap())).fold(0, |a, b| a | b);
        }
        all
    }
}

/// docs/semantics.md says so of writes that bypass the page cache. Other writes use the program's own descriptor.
#[test]
fn inotify_reports_only_cache_bypassing_writes() {
    let device = emulated("size=64M,bar=16M,p2p=1");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let buffer = Buffer::host_mapped(device, SIZE);
    for (flags, bypass) in [(libc::O_SYNC, true), (0, false)] {
        file::evict(&file::create_filled(&path, SIZE as u64));
        let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
        let mut watch = InotifyWatch::new(&path);
        let runtime = Runtime::new(Settings::default());
        assert_eq!(runtime.write(opened.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        let lines = write_lines(&runtime);
        assert_eq!(lines.iter().any(|l| l.reason == Reason::CacheBypass), bypass, "{lines:?}");
        // The call waits for the shadow descriptor to be closed, but on a busy machine not for long enough.
        let both = libc::IN_OPEN | libc::IN_CLOSE_WRITE;
        let mut seen = watch.events();
        if bypass {
            eventually("both events", || {
                seen |= watch.events();
                seen & both == both
            });
            assert_eq!(seen, both);
        } else {
            assert_eq!(seen & libc::IN_CLOSE_WRITE, 0);
        }
    }
}
