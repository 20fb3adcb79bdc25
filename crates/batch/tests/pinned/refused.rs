//! Files that are pinned without a lease, and files that cannot be pinned.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Barrier;

use spinio_device::ErrorKind;
use spinio_io::{PinError, Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture;
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, as_user, file};

use crate::{SIZE, Subject, bytes_by, settings, wait_no_pins, wait_no_writer};

#[test]
fn concurrent_pins_share_the_limit() {
    let (one, two) = (Subject::new(), Subject::new());
    let device = emulated("size=64M");
    let limit = SIZE as u64 * 3 / 2;
    for _ in 0..20 {
        let runtime = Runtime::new(Settings { pin_limit: limit, ..settings() });
        let barrier = Barrier::new(2);
        let pin = |subject: &Subject| {
            barrier.wait();
            runtime.pin_file(subject.fd(), Some(device))
        };
        let results = std::thread::scope(|scope| {
            let other = scope.spawn(|| pin(&two));
            [pin(&one), other.join().unwrap()]
        });
        if results.contains(&Err(PinError::NoLeases)) {
            println!("skipped: no leases here");
            return;
        }
        assert!(runtime.pinned_bytes() <= limit, "{} bytes, {results:?}", runtime.pinned_bytes());
        assert!(results.iter().all(|held| matches!(held, Ok(_) | Err(PinError::LimitExceeded))), "{results:?}");
        assert!(results.iter().any(Result::is_ok), "{results:?}");
        drop(runtime);
        wait_no_pins(device);
    }
}

#[test]
fn pin_errors() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let pin_error = |fd: i32| runtime.pin_file(fd, Some(device)).unwrap_err();
    assert_eq!(pin_error(-1), PinError::BadFd(Errno::BADF));
    let folder = File::open(subject.path.parent().unwrap()).unwrap();
    assert_eq!(pin_error(folder.as_raw_fd()), PinError::NotRegularFile);
    let empty = subject.fixture.file("empty");
    drop(file::create(&empty));
    assert_eq!(pin_error(File::open(&empty).unwrap().as_raw_fd()), PinError::NotRegularFile);
    let own = OpenOptions::new().read(true).write(true).open(&subject.path).unwrap();
    assert_eq!(pin_error(own.as_raw_fd()), PinError::OpenForWriting);
    assert_eq!(pin_error(subject.fd()), PinError::OpenForWriting, "by any descriptor");
    drop(own);
    if let Ok(fixture) = mount_fixture::create("overlay") {
        drop(file::create_filled(&fixture.file("over"), 10_000));
        let over = File::open(fixture.file("over")).unwrap();
        assert_eq!(pin_error(over.as_raw_fd()), PinError::NotMappable);
    }
    wait_no_writer(&subject.file);
    let small = Runtime::new(Settings { pin_limit: 1 << 20, ..settings() });
    assert_eq!(small.pin_file(subject.fd(), Some(device)), Err(PinError::LimitExceeded));
    let kernel = FaultySyscalls::new();
    kernel.inject_always(Call::NewShadowTable, Effect::Fail(Errno::PERM));
    let alone = Runtime::with_kernel(settings(), kernel);
    assert_eq!(alone.pin_file(subject.fd(), Some(device)), Err(PinError::NoWorkers));
    for (errno, reason) in [
        (Errno::ACCESS, PinError::NotOwner),
        (Errno::INVAL, PinError::NoLeases),
        (Errno::AGAIN, PinError::OpenForWriting),
    ] {
        let kernel = FaultySyscalls::new();
        kernel.inject_always(Call::TakeLease, Effect::Fail(errno));
        let runtime = Runtime::with_kernel(settings(), kernel);
        assert_eq!(runtime.pin_file(subject.fd(), Some(device)), Err(reason));
    }
    let faulty = FaultyDevice::wrap(device);
    faulty.inject(Operation::Pin, 2, u64::MAX, ErrorKind::PinRefused);
    let runtime = Runtime::new(settings());
    assert_eq!(runtime.pin_file(subject.fd(), Some(faulty)), Err(PinError::PinRefused));
    wait_no_pins(device);
    assert!(!runtime.is_pinned(subject.fd()));
    drop(runtime);
    assert_eq!(device.resources_in_use().pins, 0);
}

#[test]
fn unwritable_files_need_no_lease() {
    let device = emulated("size=64M");
    let no_lease = || {
        let kernel = FaultySyscalls::new();
        kernel.inject_always(Call::TakeLease, Effect::Fail(Errno::ACCESS));
        Runtime::with_kernel(settings(), kernel)
    };
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(c"held".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: made in the line above, for this alone.
    let memory = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    memory.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
    let runtime = no_lease();
    assert_eq!(runtime.pin_file(fd, Some(device)), Err(PinError::NoLeases));
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK) }, 0);
    runtime.pin_file(fd, Some(device)).unwrap();
    let buffer = Buffer::new(device, 4 << 20);
    assert_eq!(runtime.read(fd, Some(0), buffer.target(0), 4 << 20).unwrap(), SIZE);
    assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 0));
    assert_eq!(bytes_by(&runtime, Route::Dma), SIZE as u64);
    drop(runtime);
    wait_no_pins(device);

    let subject = Subject::new();
    let chattr =
        |how: &str| Command::new("chattr").arg(how).arg(&subject.path).output().is_ok_and(|o| o.status.success());
    wait_no_writer(&subject.file);
    if !chattr("+i") {
        return eprintln!("skipped: no immutable attribute here");
    }
    let runtime = no_lease();
    let pinned = runtime.pin_file(subject.fd(), Some(device));
    let read = || runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap();
    let got = read();
    let by_dma = bytes_by(&runtime, Route::Dma);
    assert!(chattr("-i"));
    pinned.unwrap();
    assert_eq!((got, by_dma), (SIZE, SIZE as u64));
    // The next use detects that the attribute was cleared.
    OpenOptions::new().write(true).open(&subject.path).unwrap().write_all_at(b"new", 0).unwrap();
    read();
    assert_eq!(buffer.range_bytes(0..3), b"new");
    wait_no_pins(device);
    // An attribute that was cleared for a while, and is set again, excludes no writers, also if no change is reported.
    for reported in [true, false] {
        wait_no_writer(&subject.file);
        assert!(chattr("+i"));
        let kernel = FaultySyscalls::new();
        kernel.inject_always(Call::TakeLease, Effect::Fail(Errno::ACCESS));
        if !reported {
            kernel.inject_always(Call::Inotify, Effect::Fail(Errno::MFILE));
        }
        let runtime = Runtime::with_kernel(settings(), kernel);
        let pinned = runtime.pin_file(subject.fd(), Some(device));
        assert!(chattr("-i"));
        pinned.unwrap();
        let version = 7 + u8::from(reported);
        std::fs::write(&subject.path, file::bytes(0, SIZE, version)).unwrap();
        assert!(chattr("+i"));
        let got = runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE);
        let still = runtime.is_pinned(subject.fd());
        assert!(chattr("-i"));
        assert_eq!((got.unwrap(), still), (SIZE, false), "changes are reported: {reported}");
        assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, version), "changes are reported: {reported}");
        wait_no_pins(device);
    }
    // Nor does one that was set when a process could already write.
    let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
    assert!(chattr("+i"));
    let held = Runtime::new(settings()).pin_file(subject.fd(), Some(device));
    assert!(chattr("-i"));
    drop(writer);
    assert_eq!(held, Err(PinError::OpenForWriting));
}

#[test]
fn writable_memfd_is_not_pinned() {
    // The kernel grants a lease on it nevertheless.
    let device = emulated("size=64M");
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(c"written".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: made in the line above, for this alone.
    let memory = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    memory.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
    let runtime = Runtime::new(settings());
    assert_eq!(runtime.pin_file(fd, Some(device)), Err(PinError::NoLeases));
    let buffer = Buffer::new(device, 4 << 20);
    assert_eq!(runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    memory.set_len(0).unwrap();
    memory.write_all_at(&file::bytes(0, SIZE, 1), 0).unwrap();
    assert_eq!(runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 1));
}

#[test]
fn read_only_mount_must_cover_file_system() {
    let fixture = match mount_fixture::create("xfs") {
        Ok(place) => place,
        Err(e) => return eprintln!("skipped: {e}"),
    };
    let device = emulated("size=64M");
    let path = fixture.file("subject");
    drop(file::create_filled(&path, SIZE as u64));
    let subject = File::open(&path).unwrap();
    wait_no_writer(&subject);
    let fd = subject.as_raw_fd();
    let remount = |how: &str| {
        let done = Command::new("mount").args(["-o", how]).arg(fixture.path()).output().unwrap();
        assert!(done.status.success(), "{how}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let kernel = FaultySyscalls::new();
    kernel.inject_always(Call::TakeLease, Effect::Fail(Errno::ACCESS));
    let runtime = Runtime::with_kernel(settings(), kernel);
    remount("remount,bind,ro");
    assert_eq!(runtime.pin_file(fd, Some(device)), Err(PinError::NotOwner), "only this mount of it");
    remount("remount,ro");
    match runtime.pin_file(fd, Some(device)) {
        Err(PinError::NotOwner) => return eprintln!("skipped: not known before Linux 6.8"),
        held => drop(held.unwrap()),
    }
    let buffer = Buffer::new(device, SIZE);
    let read = || runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap();
    assert_eq!((read(), bytes_by(&runtime, Route::Dma)), (SIZE, SIZE as u64));
    remount("remount,rw");
    std::fs::write(&path, file::bytes(0, SIZE, 7)).unwrap();
    wait_no_writer(&File::open(&path).unwrap());
    remount("remount,ro");
    assert_eq!((read(), runtime.is_pinned(fd)), (SIZE, false));
    assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 7));
    wait_no_pins(device);
}

#[test]
fn file_of_other_user_is_not_pinned() {
    if as_user::is_root() {
        return eprintln!("skipped: root may lease any file; the same test runs once more as another user");
    }
    let device = emulated("size=64M");
    let file = File::open("/bin/sh").unwrap();
    let refused = Runtime::new(settings()).pin_file(file.as_raw_fd(), Some(device)).unwrap_err();
    assert!(matches!(refused, PinError::NotOwner | PinError::NotMappable | PinError::NotReopened), "{refused}");
}
