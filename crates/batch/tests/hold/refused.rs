//! What is held without a lease, and what is not held at all.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Barrier;

use spinio_device::ErrorKind;
use spinio_io::{NotHeld, Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::place;
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultyKernel, Operation, file, user};

use crate::{SIZE, Subject, await_no_pins, await_no_writer, bytes_by, settings};

#[test]
fn files_that_are_held_at_once_share_what_may_be_held() {
    let (one, two) = (Subject::new(), Subject::new());
    let device = emulated("size=64M");
    let most = SIZE as u64 * 3 / 2;
    for _ in 0..20 {
        let runtime = Runtime::new(Settings { hold: most, ..settings() });
        let barrier = Barrier::new(2);
        let hold = |subject: &Subject| {
            barrier.wait();
            runtime.hold(subject.fd(), Some(device))
        };
        let held = std::thread::scope(|scope| {
            let other = scope.spawn(|| hold(&two));
            [hold(&one), other.join().unwrap()]
        });
        if held.contains(&Err(NotHeld::NoLeases)) {
            println!("skipped: no leases here");
            return;
        }
        assert!(runtime.held_bytes() <= most, "{} bytes, {held:?}", runtime.held_bytes());
        assert!(held.iter().all(|held| matches!(held, Ok(()) | Err(NotHeld::TooLarge))), "{held:?}");
        assert!(held.contains(&Ok(())), "{held:?}");
        drop(runtime);
        await_no_pins(device);
    }
}

#[test]
fn it_is_refused_for_a_reason() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let why = |fd: i32| runtime.hold(fd, Some(device)).unwrap_err();
    assert_eq!(why(-1), NotHeld::Descriptor(Errno::BADF));
    let folder = File::open(subject.path.parent().unwrap()).unwrap();
    assert_eq!(why(folder.as_raw_fd()), NotHeld::NotAFile);
    let empty = subject.place.file("empty");
    drop(file::create(&empty));
    assert_eq!(why(File::open(&empty).unwrap().as_raw_fd()), NotHeld::NotAFile);
    let own = OpenOptions::new().read(true).write(true).open(&subject.path).unwrap();
    assert_eq!(why(own.as_raw_fd()), NotHeld::OpenForWriting);
    assert_eq!(why(subject.fd()), NotHeld::OpenForWriting, "by whichever descriptor");
    drop(own);
    if let Ok(place) = place::on("overlay") {
        drop(file::written(&place.file("over"), 10_000));
        let over = File::open(place.file("over")).unwrap();
        assert_eq!(why(over.as_raw_fd()), NotHeld::NotMappable);
    }
    let small = Runtime::new(Settings { hold: 1 << 20, ..settings() });
    assert_eq!(small.hold(subject.fd(), Some(device)), Err(NotHeld::TooLarge));
    let kernel = FaultyKernel::new();
    kernel.always(Call::Private, Effect::Fail(Errno::PERM));
    let alone = Runtime::with_kernel(settings(), kernel);
    assert_eq!(alone.hold(subject.fd(), Some(device)), Err(NotHeld::NoHelpers));
    for (errno, reason) in
        [(Errno::ACCESS, NotHeld::NotOwner), (Errno::INVAL, NotHeld::NoLeases), (Errno::AGAIN, NotHeld::OpenForWriting)]
    {
        let kernel = FaultyKernel::new();
        kernel.always(Call::TakeLease, Effect::Fail(errno));
        let runtime = Runtime::with_kernel(settings(), kernel);
        assert_eq!(runtime.hold(subject.fd(), Some(device)), Err(reason));
    }
    let faulty = FaultyDevice::before(device);
    faulty.fail(Operation::Pin, 2, u64::MAX, ErrorKind::PinRefused);
    let runtime = Runtime::new(settings());
    assert_eq!(runtime.hold(subject.fd(), Some(faulty)), Err(NotHeld::PinRefused));
    await_no_pins(device);
    assert!(!runtime.is_held(subject.fd()));
    drop(runtime);
    assert_eq!(device.outstanding().pins, 0);
}

#[test]
fn what_nobody_can_write_needs_no_lease() {
    let device = emulated("size=64M");
    let no_lease = || {
        let kernel = FaultyKernel::new();
        kernel.always(Call::TakeLease, Effect::Fail(Errno::ACCESS));
        Runtime::with_kernel(settings(), kernel)
    };
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(c"held".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: made in the line above, for this alone.
    let memory = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    memory.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
    let runtime = no_lease();
    assert_eq!(runtime.hold(fd, Some(device)), Err(NotHeld::NoLeases));
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK) }, 0);
    runtime.hold(fd, Some(device)).unwrap();
    let buffer = Buffer::new(device, 4 << 20);
    assert_eq!(runtime.read(fd, Some(0), buffer.target(0), 4 << 20).unwrap(), SIZE);
    assert!(buffer.part(0..SIZE) == file::bytes(0, SIZE, 0));
    assert_eq!(bytes_by(&runtime, Route::Dma), SIZE as u64);
    drop(runtime);
    await_no_pins(device);

    let subject = Subject::new();
    let chattr =
        |how: &str| Command::new("chattr").arg(how).arg(&subject.path).output().is_ok_and(|o| o.status.success());
    if !chattr("+i") {
        return eprintln!("skipped: no immutable attribute here");
    }
    let runtime = no_lease();
    let held = runtime.hold(subject.fd(), Some(device));
    let read = || runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap();
    let got = read();
    let by_dma = bytes_by(&runtime, Route::Dma);
    assert!(chattr("-i"));
    held.unwrap();
    assert_eq!((got, by_dma), (SIZE, SIZE as u64));
    // The next use finds that the attribute is gone.
    OpenOptions::new().write(true).open(&subject.path).unwrap().write_all_at(b"new", 0).unwrap();
    read();
    assert_eq!(buffer.part(0..3), b"new");
    await_no_pins(device);
    // One that was gone for a while, and is there again, vouches for nothing, also where nobody tells of changes.
    for told in [true, false] {
        assert!(chattr("+i"));
        let kernel = FaultyKernel::new();
        kernel.always(Call::TakeLease, Effect::Fail(Errno::ACCESS));
        if !told {
            kernel.always(Call::Notify, Effect::Fail(Errno::MFILE));
        }
        let runtime = Runtime::with_kernel(settings(), kernel);
        let held = runtime.hold(subject.fd(), Some(device));
        assert!(chattr("-i"));
        held.unwrap();
        let version = 7 + u8::from(told);
        std::fs::write(&subject.path, file::bytes(0, SIZE, version)).unwrap();
        assert!(chattr("+i"));
        let got = runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE);
        let still = runtime.is_held(subject.fd());
        assert!(chattr("-i"));
        assert_eq!((got.unwrap(), still), (SIZE, false), "changes are told: {told}");
        assert!(buffer.part(0..SIZE) == file::bytes(0, SIZE, version), "changes are told: {told}");
        await_no_pins(device);
    }
    // Nor does one that came when somebody could write already.
    let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
    assert!(chattr("+i"));
    let held = Runtime::new(settings()).hold(subject.fd(), Some(device));
    assert!(chattr("-i"));
    drop(writer);
    assert_eq!(held, Err(NotHeld::OpenForWriting));
}

#[test]
fn a_memory_file_that_can_be_written_is_not_held() {
    // The kernel gives a lease on it all the same.
    let device = emulated("size=64M");
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(c"written".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: made in the line above, for this alone.
    let memory = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    memory.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
    let runtime = Runtime::new(settings());
    assert_eq!(runtime.hold(fd, Some(device)), Err(NotHeld::NoLeases));
    let buffer = Buffer::new(device, 4 << 20);
    assert_eq!(runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    memory.set_len(0).unwrap();
    memory.write_all_at(&file::bytes(0, SIZE, 1), 0).unwrap();
    assert_eq!(runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(buffer.part(0..SIZE) == file::bytes(0, SIZE, 1));
}

#[test]
fn a_read_only_file_system_counts_only_if_all_of_it_is_and_has_been() {
    let place = match place::on("xfs") {
        Ok(place) => place,
        Err(e) => return eprintln!("skipped: {e}"),
    };
    let device = emulated("size=64M");
    let path = place.file("subject");
    drop(file::written(&path, SIZE as u64));
    let subject = File::open(&path).unwrap();
    await_no_writer(&subject);
    let fd = subject.as_raw_fd();
    let remount = |how: &str| {
        let done = Command::new("mount").args(["-o", how]).arg(place.path()).output().unwrap();
        assert!(done.status.success(), "{how}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let kernel = FaultyKernel::new();
    kernel.always(Call::TakeLease, Effect::Fail(Errno::ACCESS));
    let runtime = Runtime::with_kernel(settings(), kernel);
    remount("remount,bind,ro");
    assert_eq!(runtime.hold(fd, Some(device)), Err(NotHeld::NotOwner), "only this mount of it");
    remount("remount,ro");
    match runtime.hold(fd, Some(device)) {
        Err(NotHeld::NotOwner) => return eprintln!("skipped: before Linux 6.8 nobody can tell"),
        held => held.unwrap(),
    }
    let buffer = Buffer::new(device, SIZE);
    let read = || runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap();
    assert_eq!((read(), bytes_by(&runtime, Route::Dma)), (SIZE, SIZE as u64));
    remount("remount,rw");
    std::fs::write(&path, file::bytes(0, SIZE, 7)).unwrap();
    await_no_writer(&File::open(&path).unwrap());
    remount("remount,ro");
    assert_eq!((read(), runtime.is_held(fd)), (SIZE, false));
    assert!(buffer.part(0..SIZE) == file::bytes(0, SIZE, 7));
    await_no_pins(device);
}

#[test]
fn a_file_of_another_user_is_not_held() {
    if user::is_root() {
        return eprintln!("skipped: root may lease any file; the same test runs once more as somebody else");
    }
    let device = emulated("size=64M");
    let file = File::open("/bin/sh").unwrap();
    let refused = Runtime::new(settings()).hold(file.as_raw_fd(), Some(device)).unwrap_err();
    assert!(matches!(refused, NotHeld::NotOwner | NotHeld::NotMappable | NotHeld::NotReopened), "{refused}");
}
