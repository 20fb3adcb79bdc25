//! The block stack under a file, on file systems that this machine can create.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_plan::geometry::{BlockStack, Kind, P2pHint};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture;
use spinio_testkit::{Buffer, Call, Effect, FaultySyscalls, as_user, file};

fn stack_of(path: &Path) -> Arc<BlockStack> {
    let file = File::open(path).unwrap();
    Runtime::new(Settings::default()).storage(file.as_raw_fd()).unwrap()
}

fn written(fixture: &mount_fixture::MountFixture) -> PathBuf {
    let path = fixture.file("f");
    fs::write(&path, vec![7; 300_000]).unwrap();
    path
}

#[test]
fn file_systems_are_named() {
    mount_fixture::for_each_kind(|fixture| {
        let stack = stack_of(&written(fixture));
        println!("{}: {stack}", fixture.kind);
        match fixture.kind {
            "tmpfs" => assert_eq!((stack.file_system.as_str(), &stack.top), ("tmpfs", &None)),
            "fuse" => assert_eq!((stack.file_system.as_str(), &stack.top), ("fuse", &None)),
            "btrfs" | "xfs" | "data=journal" => {
                let name = if fixture.kind == "data=journal" { "ext4" } else { fixture.kind };
                assert_eq!(stack.file_system, name);
                let top = stack.top.as_ref().expect("a loop device");
                assert!(matches!(&top.kind, Kind::Loop { file } if file.ends_with("/image")), "{top:?}");
                assert!(!P2pHint::from_stack(&stack).worth_probing());
            }
            "overlay" => {
                let lower = stack_of(fixture.path().parent().unwrap());
                assert_eq!(stack.file_system, format!("overlay on {}", lower.file_system));
                assert_eq!(stack.top, lower.top, "the file is on the block device of the upper directory");
            }
            _ => {}
        }
        if fixture.kind != "overlay" {
            // A directory reports the same; one of an overlay may be merged from several.
            assert_eq!(stack_of(fixture.path()).top.is_some(), stack.top.is_some());
        }
    });
}

#[test]
fn btrfs_over_two_devices() {
    if !as_user::is_root() {
        return println!("skipped: mounting needs root");
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("mount");
    fs::create_dir(&mount).unwrap();
    let mut array = LoopArray { mount, loops: Vec::new() };
    for i in 0..2 {
        array.loops.extend(loop_device(&dir.path().join(format!("disk{i}"))));
    }
    let (loops, mount) = (&array.loops, &array.mount);
    let made = loops.len() == 2
        && run(Command::new("mkfs.btrfs").args(["-q", "-f", "-d", "raid0", "-m", "raid0"]).args(loops))
        && run(Command::new("btrfs").args(["device", "scan"]).args(loops))
        && run(Command::new("mount").arg(&loops[0]).arg(mount));
    // The kernel detaches them at umount, also if this process is killed.
    for device in loops {
        run(Command::new("losetup").args(["-d", device]));
    }
    if !made {
        return println!("skipped: cannot create btrfs over two loop devices");
    }
    let path = mount.join("f");
    let size = (10 << 20) + 77;
    file::evict(&file::create_filled(&path, size));
    let stack = stack_of(&path);
    let top = stack.top.as_ref().expect("layers");
    assert_eq!(top.kind, Kind::Btrfs { profile: "raid0".to_owned() }, "{stack}");
    assert_eq!(top.members.len(), 2);
    assert_eq!(stack.stripe().map(|s| s.width()), Some(128 << 10));
    println!("{} bytes bypassed the page cache", read_all(&path, size as usize));
}

/// Unmounted when dropped.
struct LoopArray {
    mount: PathBuf,
    loops: Vec<String>,
}

impl Drop for LoopArray {
    fn drop(&mut self) {
        run(Command::new("umount").arg("-l").arg(&self.mount));
    }
}

/// Reads the file in requests of several lengths; the bytes that bypassed the page cache.
fn read_all(path: &Path, size: usize) -> u64 {
    let (runtime, file) = (Runtime::new(Settings::default()), File::open(path).unwrap());
    // A byte more: a read past the end of the buffer is refused, one past the end of the file is not.
    let buffer = Buffer::new(emulated("size=64M"), size + 1);
    let mut at = 0;
    for len in [size / 2, 3 << 20, 1_000_001, 300_000].into_iter().cycle() {
        let got = runtime.read(file.as_raw_fd(), Some(at as u64), buffer.target(at), len).unwrap();
        at += got;
        if got == 0 {
            break;
        }
    }
    assert_eq!(at, size);
    assert!(buffer.bytes()[..size] == file::bytes(0, size, 0), "wrong bytes");
    runtime.stats().rows.iter().filter(|line| line.route == Route::Direct).map(|line| line.bytes).sum()
}

fn loop_device(image: &Path) -> Option<String> {
    File::create(image).and_then(|f| f.set_len(256 << 20)).ok()?;
    let out = Command::new("losetup").args(["-f", "--show"]).arg(image).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

fn run(command: &mut Command) -> bool {
    command.output().is_ok_and(|out| out.status.success())
}

#[test]
fn missing_sysfs_is_tolerated() {
    let kernel = FaultySyscalls::new();
    kernel.inject_always(Call::Sysfs, Effect::Fail(Errno::NOENT));
    let runtime = Runtime::with_kernel(Settings::default(), kernel);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, vec![7; 300_000]).unwrap();
    let file = File::open(&path).unwrap();
    let stack = runtime.storage(file.as_raw_fd()).unwrap();
    assert_eq!(stack.top, None);
    assert!(!stack.is_fast() && stack.stripe().is_none() && stack.read_ahead() == 0);
}

#[test]
fn invalid_fds_are_reported() {
    let runtime = Runtime::new(Settings::default());
    assert_eq!(runtime.storage(-1).unwrap_err().kind.errno(), Errno::BADF);
    let (end, _other) = std::io::pipe().unwrap();
    assert_eq!(runtime.storage(end.as_raw_fd()).unwrap().top, None);
}
