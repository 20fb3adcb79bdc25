//! A user's own mount: what differs from root's. The other tests of this crate run as an ordinary user too.

#![expect(unsafe_code, reason = "a mapping")]

mod common;

use std::fs::{File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use common::TestMount;
use common::gpu::{Gpu, PAGE};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use spinio_testkit::eventually;

#[test]
fn server_role() {
    common::server_role();
}

/// Root's test program is started again as another user.
#[test]
fn tests_of_this_file_pass_as_an_ordinary_user() {
    if let Some(why) = common::unavailable() {
        return eprintln!("skipped: {why}");
    }
    if rustix::process::geteuid().is_root() && !Path::new("/usr/bin/fusermount3").exists() {
        return eprintln!("skipped: no fusermount3");
    }
    spinio_testkit::as_user::rerun_as_nobody("tests_of_this_file_pass_as_an_ordinary_user");
}

/// A mount of a user who is not root; says why there is none.
fn mount(fill: impl FnOnce(&Path)) -> Option<TestMount> {
    if rustix::process::geteuid().is_root() {
        eprintln!("skipped: root, whose mounts are for all users");
        return None;
    }
    TestMount::new(fill)
}

fn create(path: &Path, mode: u32) -> File {
    OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(path).unwrap()
}

/// Reads from the server, not from the page cache of the kernel.
fn read_again(file: &File, len: usize) -> Vec<u8> {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn open_file_is_used_on_when_its_mode_forbids_to_open_it() {
    let Some(mount) = mount(|_| ()) else { return };
    let path = |name: &str| mount.dir.join(name);
    let created = create(&path("created"), 0o444);
    let changed = create(&path("changed"), 0o644);
    let hidden = create(&path("hidden"), 0o600);
    hidden.write_all_at(b"hidden", 0).unwrap();
    let reader = File::open(path("hidden")).unwrap();
    std::fs::set_permissions(path("changed"), Permissions::from_mode(0o400)).unwrap();
    std::fs::set_permissions(path("hidden"), Permissions::from_mode(0o0)).unwrap();
    drop(hidden);
    for round in 0..4u8 {
        // The first of a new server, which has opened none of them.
        mount.kill_server();
        created.write_all_at(&[round; 100], 0).unwrap();
        changed.write_all_at(&[round + 1; 100], 0).unwrap();
        assert_eq!(read_again(&created, 100), [round; 100]);
        assert_eq!(read_again(&changed, 100), [round + 1; 100]);
        assert_eq!(read_again(&reader, 6), b"hidden");
        assert_eq!(File::open(path("hidden")).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    drop((created, changed, reader));
    let (below, _root) = mount.unmount();
    let mode = |name: &str| std::fs::metadata(below.join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("created"), mode("changed"), mode("hidden")), (0o444, 0o400, 0));
    assert_eq!(std::fs::read(below.join("created")).unwrap(), [3; 100]);
}

/// As git and package managers make them.
#[test]
fn many_read_only_files_leave_no_descriptor_of_their_content() {
    let Some(mount) = mount(|_| ()) else { return };
    for i in 0..300 {
        create(&mount.dir.join(format!("{i}")), 0o444).write_all_at(b"object", 0).unwrap();
    }
    // O_PATH, as descriptors of inodes are, is 010000000.
    let held = |is_path: bool| {
        let supervisor = format!("/proc/{}", mount.supervisor());
        let all = std::fs::read_dir(format!("{supervisor}/fd")).unwrap().flatten().filter(|fd| {
            let flags = std::fs::read_to_string(format!("{supervisor}/fdinfo/{}", fd.file_name().display())).ok();
            let flags = flags.and_then(|text| {
                let octal = text.lines().find_map(|line| line.strip_prefix("flags:"))?.trim().to_owned();
                u32::from_str_radix(&octal, 8).ok()
            });
            let is_inside = std::fs::read_link(fd.path()).is_ok_and(|to| to.parent() == Some(&mount.dir));
            is_inside && flags.is_some_and(|flags| (flags & 0o10_000_000 != 0) == is_path)
        });
        all.count()
    };
    // The supervisor gets them, and RELEASE comes, a little later.
    eventually("300 inodes, and no content", || (held(true), held(false)) == (300, 0));
}

#[test]
fn mapped_file_keeps_its_content_through_renames_removal_and_killed_servers() {
    let Some(mount) = mount(|dir| std::fs::create_dir(dir.join("a")).unwrap()) else { return };
    let path = mount.dir.join("a/file");
    let file = create(&path, 0o600);
    file.write_all_at(&[1; 2 * PAGE], 0).unwrap();
    let gpu = Gpu::new(&file, 2);
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let at = unsafe { mmap(std::ptr::null_mut(), 2 * PAGE, prot, MapFlags::SHARED, file.as_fd(), 0) }.unwrap();
    let memory = at.cast::<u8>();
    let epoch = |byte: u8| {
        // SAFETY: within the mapping.
        unsafe { memory.add(PAGE + 1).write_volatile(byte) };
        loop {
            gpu.acquire();
            // Before a server has died, this is what it has; the next one takes it from the file.
            assert_eq!(gpu.load(PAGE + 1), byte);
            gpu.store(0, &[byte]);
            match gpu.1.release(0, 2 * PAGE as u64) {
                Err(error) if error.errno == Errno::STALE => {}
                released => break assert!(released.unwrap() > 0),
            }
        }
        // SAFETY: as above.
        assert_eq!(unsafe { memory.read_volatile() }, byte);
    };
    epoch(2);
    std::fs::rename(&path, mount.dir.join("a/renamed")).unwrap();
    mount.kill_server();
    epoch(3);
    std::fs::rename(mount.dir.join("a"), mount.dir.join("b")).unwrap();
    // A path to it leads through this directory, but the descriptor does not.
    std::fs::set_permissions(mount.dir.join("b"), Permissions::from_mode(0o0)).unwrap();
    mount.kill_server();
    epoch(4);
    std::fs::set_permissions(mount.dir.join("b"), Permissions::from_mode(0o755)).unwrap();
    assert_eq!(std::fs::read(mount.dir.join("b/renamed")).unwrap()[..2], [4, 1]);
    std::fs::hard_link(mount.dir.join("b/renamed"), mount.dir.join("second")).unwrap();
    std::fs::remove_file(mount.dir.join("b/renamed")).unwrap();
    mount.kill_server();
    epoch(5);
    assert_eq!(std::fs::read(mount.dir.join("second")).unwrap()[PAGE + 1], 5);
    std::fs::remove_file(mount.dir.join("second")).unwrap();
    mount.kill_server();
    epoch(6);
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    // SAFETY: not used any more.
    unsafe { munmap(at, 2 * PAGE) }.unwrap();
}

#[test]
fn files_in_use_beyond_the_limit_of_descriptors_are_refused() {
    let Some(mount) = mount(|_| ()) else { return };
    mount.limit_descriptors(1000);
    let mut files = Vec::new();
    let refused = loop {
        let path = mount.dir.join(format!("{}", files.len()));
        match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
            Ok(file) => files.push(file),
            Err(error) => break error,
        }
        files.last().unwrap().write_all_at(&(files.len() as u32).to_le_bytes(), 0).unwrap();
        assert!(files.len() < 1000);
    };
    assert_eq!(refused.raw_os_error(), Some(Errno::NFILE.raw_os_error()));
    assert!(files.len() > 100, "only {} files", files.len());
    mount.kill_server();
    for (i, file) in files.iter().enumerate() {
        assert_eq!(read_again(file, 4), (i as u32 + 1).to_le_bytes());
    }
    // What is not used does not count.
    files.clear();
    for i in 0..600 {
        let path = mount.dir.join(format!("later{i}"));
        // The Linux kernel says later what it has forgotten.
        eventually("room for another file", || std::fs::write(&path, "text").is_ok());
        assert_eq!(std::fs::read(&path).unwrap(), b"text");
    }
}

#[test]
fn refused_calls_have_the_errors_of_the_file_system_below() {
    let Some(mount) = mount(|_| ()) else { return };
    let errors = |dir: &Path| {
        let path = dir.join("file");
        std::fs::write(&path, "text").unwrap();
        let of = |result: std::io::Result<()>| result.map_err(|e| e.raw_os_error());
        let xattr = |name: &str| {
            let set = rustix::fs::setxattr(&path, name, b"value", rustix::fs::XattrFlags::empty());
            set.map_err(|e| Some(e.raw_os_error()))
        };
        [
            of(std::os::unix::fs::chown(&path, Some(0), None)),
            of(std::os::unix::fs::chown(&path, None, Some(0))),
            of(std::os::unix::fs::chown(&path, None, Some(rustix::process::getegid().as_raw()))),
            xattr("trusted.name"),
            xattr("user.name"),
        ]
    };
    assert_eq!(errors(&mount.dir), errors(&mount.reference));
}

#[test]
fn socket_and_its_directory_are_for_the_user_alone_and_go_with_the_mount() {
    let Some(mount) = mount(|_| ()) else { return };
    let (socket, user) = (mount.socket.clone(), rustix::process::geteuid().as_raw());
    let directory = socket.parent().unwrap();
    let metadata = std::fs::metadata(directory).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o777), (user, 0o700), "{}", directory.display());
    assert!(spinio_gaiad::status(&mount.dir).is_ok(), "this process finds it");
    let lock = socket.with_extension("lock");
    assert!(lock.exists());
    let inode = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.ino(), found.ctime_nsec()));
    let before = (inode(&socket), inode(&lock));
    mount.unmount();
    // Another mount may have the number by now.
    assert!(inode(&socket) != before.0 && inode(&lock) != before.1);
}

#[test]
fn unmodified_programs_work_while_servers_are_killed() {
    let Some(mount) = mount(|_| ()) else { return };
    let script = "set -eu; command -v git sqlite3 >/dev/null || { echo skipped; exit 0; }
        mkdir one; cd one; git init -q .; seq 1000 >file; mkdir -p d/e; ln -s ../file d/link; chmod 400 file; git add .
        git -c user.name=n -c user.email=e commit -qm first; git fsck --strict; cd ..; cp -a one two; git -C two status -s
        sqlite3 db 'PRAGMA journal_mode=WAL; CREATE TABLE t(a); INSERT INTO t VALUES(1),(2); PRAGMA integrity_check;'
        diff -r -x index one two; sqlite3 db 'SELECT sum(a) FROM t;'";
    let run = |dir: &Path| {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir).env("HOME", "/nonexistent").env("GIT_CONFIG_NOSYSTEM", "1");
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    let killer = mount.killer(3, 5..60);
    let through = run(&mount.dir);
    drop(killer);
    if through.contains("skipped") {
        eprintln!("skipped: no git or no sqlite3");
    }
    assert_eq!(through, run(&mount.reference));
}
