//! SPIN has no visible effect on fork, exec, file locks and close.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use spinio_device::emulated::{Config, Emulated};
use spinio_device::registry;
use spinio_io::runtime;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, as_user, eventually, file, in_child, leak_check, mount_fixture, with_deadline};

const SIZE: usize = (2 << 20) + 333;

fn subject(path: &Path) -> File {
    let file = file::create_filled(path, SIZE as u64);
    file::evict(&file);
    file::load_pages(path, (0..SIZE as u64 / 4096).filter(|page| !(200..300).contains(page)));
    file
}

/// Whether a read of all of the file through the process's runtime is right.
fn reads_correctly(device: &'static Emulated, file: &File) -> bool {
    let buffer = Buffer::new(device, SIZE);
    let got = runtime().read(file.as_raw_fd(), Some(0), buffer.target(0), SIZE);
    got.is_ok_and(|got| got == SIZE) && buffer.bytes() == file::bytes(0, SIZE, 0)
}

#[test]
fn child_without_device_does_not_hang() {
    let fixture = mount_fixture::create("tree").unwrap();
    let file = &subject(&fixture.file("file"));
    let device = emulated("size=64M");
    let buffer = &Buffer::new(device, SIZE);
    // A child that keeps using the parent's pointer would pass this.
    let parent_slice = buffer.target(0);
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    let mut reads = 0;
                    while !stop.load(SeqCst) || reads == 0 {
                        assert!(with_deadline("a read concurrent with forks", || reads_correctly(device, file)));
                        reads += 1;
                    }
                })
            })
            .collect();
        let _stop = StopOnDrop(stop);
        for _ in 0..25 {
            in_child("use of the parent's device", || {
                let unknown = registry::find(buffer.addr().0 as *const u8, 1).is_none();
                spinio_io::on_close(file.as_raw_fd());
                spinio_io::on_close_range(0, u32::MAX);
                let refused = |len| runtime().read(file.as_raw_fd(), Some(0), parent_slice, len).is_err();
                i32::from(!(unknown && refused(100) && refused(SIZE)))
            });
            assert!(readers.iter().all(|r| !r.is_finished()));
        }
    });
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn child_creates_own_device_and_runtime() {
    let fixture = mount_fixture::create("tree").unwrap();
    let file = &subject(&fixture.file("file"));
    let device = emulated("size=16M");
    assert!(reads_correctly(device, file));
    for _ in 0..5 {
        in_child("a device of its own", || {
            let Ok(own) = Emulated::start(Config { size: 16 << 20, ..Config::default() }) else { return 1 };
            if !reads_correctly(own, file) {
                return 2;
            }
            // Closing all descriptors must not affect those that SPIN has open.
            // SAFETY: the child uses none of these descriptors except the one it keeps.
            unsafe { libc::dup2(file.as_raw_fd(), 3) };
            // SAFETY: as above.
            unsafe { libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0) };
            let buffer = Buffer::new(own, SIZE);
            let got = runtime().read(3, Some(0), buffer.target(0), SIZE);
            let right = got.is_ok_and(|got| got == SIZE) && buffer.bytes() == file::bytes(0, SIZE, 0);
            if !right {
                return 3;
            }
            let counted = runtime().stats();
            let mine = [0, std::process::id()].contains(&counted.process.pid) && counted.read.calls == 2;
            if mine { 0 } else { 4 }
        });
    }
    assert!(reads_correctly(device, file), "the parent's runtime after the forks");
}

#[test]
fn executed_program_inherits_no_descriptors() {
    let fixture = mount_fixture::create("tree").unwrap();
    let path = fixture.file("inherited");
    let file = subject(&path);
    let device = emulated("size=16M");
    // It is closed when it was not used for a second.
    eventually("there is a shadow descriptor", || {
        reads_correctly(device, &file) && leak_check::descriptors_of(&path) > 1
    });
    let output = Command::new("sh").args(["-c", "ls -l /proc/self/fd /proc/$$/fd"]).output().unwrap();
    let listing = String::from_utf8_lossy(&output.stdout);
    assert!(!listing.contains("inherited"), "{listing}");
    spinio_io::on_close(file.as_raw_fd());
    // A worker may still be finishing the request.
    eventually("neither shadow descriptors nor mappings stay after the close", || {
        leak_check::descriptors_of(&path) <= 1 && leak_check::mappings_of(&path) == 0
    });
}

/// Closing any descriptor of a file drops the locks that the owner of the fd table holds on it. SPIN's descriptors are
/// in the shadow fd table.
#[test]
fn app_file_locks_survive() {
    let fixture = mount_fixture::create("tree").unwrap();
    let path = fixture.file("locked");
    let file = subject(&path);
    let device = emulated("size=16M");
    let lock = |kind: i32, command: i32, file: &File| {
        let mut lock = libc::flock { l_type: kind as i16, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
        // SAFETY: `lock` lives across the call.
        let ret = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) };
        (ret, i32::from(lock.l_type))
    };
    assert_eq!(lock(libc::F_WRLCK, libc::F_SETLK, &file).0, 0);
    for _ in 0..3 {
        assert!(reads_correctly(device, &file));
        spinio_io::on_close(file.as_raw_fd());
        in_child("a lock of the parent", || {
            let Ok(other) = File::options().write(true).open(&path) else { return 1 };
            i32::from(lock(libc::F_WRLCK, libc::F_GETLK, &other) != (0, libc::F_WRLCK))
        });
    }
}

#[test]
fn again_as_ordinary_user() {
    as_user::rerun_as_nobody("again_as_ordinary_user");
}
