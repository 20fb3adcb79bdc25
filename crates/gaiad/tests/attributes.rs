//! Attributes that programs rely on: as on the file system below, also once the kernel has forgotten the file.

mod common;

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use common::both::{Block, direct};
use common::raw::Raw;
use common::{TestMount, is_linux, is_root};
use rustix::fs::{Gid, Mode, OFlags, SeekFrom, Uid};
use spinio_pagecache::messages::{Access, Run};

const USER: u32 = 65534;

#[test]
fn server_role() {
    common::server_role();
}

/// Makes a directory and the one above it usable for all.
fn allow_all(dir: &Path) {
    for dir in [dir.parent().unwrap(), dir] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o777)).unwrap();
    }
}

fn modified(path: &Path) -> (i64, i64) {
    let metadata = std::fs::metadata(path).unwrap();
    (metadata.mtime(), metadata.mtime_nsec())
}

/// A file is often created and written in one tick of the clock, and written back in another.
#[test]
fn modification_times_stay_after_unmount() {
    const FILES: usize = 30;
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let name = |i: usize| format!("file{i}");
    let mut open = Vec::new();
    for i in 0..FILES {
        let file = File::create(mount.dir.join(name(i))).unwrap();
        file.write_all_at(&vec![1; 100 << 10], 0).unwrap();
        open.push(file);
    }
    std::thread::sleep(Duration::from_millis(20));
    drop(open);
    let expected: Vec<_> = (0..FILES).map(|i| modified(&mount.dir.join(name(i)))).collect();
    let (below, _root) = mount.unmount();
    let got: Vec<_> = (0..FILES).map(|i| modified(&below.join(name(i)))).collect();
    assert_eq!(got, expected);
}

#[test]
fn every_kind_of_write_changes_the_modification_time() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let path = mount.dir.join("file");
    let cached = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    let past_cache = direct(&path).unwrap();
    let writes: [(&str, &dyn Fn()); 5] = [
        ("write", &|| cached.write_all_at(&[1; 5000], 0).unwrap()),
        ("direct write", &|| past_cache.write_all_at(&Block([2; 4096]).0, 4096).unwrap()),
        ("truncation", &|| cached.set_len(9000).unwrap()),
        ("allocation", &|| {
            rustix::fs::fallocate(&cached, rustix::fs::FallocateFlags::empty(), 0, 20000).unwrap();
        }),
        ("hole", &|| {
            let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&cached, flags, 0, 4096).unwrap();
        }),
    ];
    for (what, write) in writes {
        let before = modified(&path);
        std::thread::sleep(Duration::from_millis(20));
        write();
        assert!(modified(&path) > before, "{what}");
    }
    drop((cached, past_cache));
    let expected = modified(&path);
    let (below, _root) = mount.unmount();
    assert_eq!(modified(&below.join("file")), expected);
}

/// As of a client that is killed right after its release.
#[test]
fn release_whose_client_sets_no_time_changes_it() {
    if !is_linux((6, 16), "files of the mount cannot be mapped") {
        return;
    }
    let fill = |dir: &Path| {
        let file = File::create(dir.join("file")).unwrap();
        file.write_all_at(&[1; 8192], 0).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1000)).unwrap();
    };
    let Some(mount) = TestMount::new(fill) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let mut client = Raw::map(&file, Access::Write, 0, 2).unwrap();
    client.acquire(0, 2, Access::Write);
    client.stage(0, &[7; 4096]);
    let run = |count| Run { first: 0, count };
    assert_eq!(client.release(1, run(2), &[run(1)]), Ok(1));
    drop((client, file));
    let (below, _root) = mount.unmount();
    assert_eq!(std::fs::read(below.join("file")).unwrap()[4095..4097], [7, 1]);
    assert!(modified(&below.join("file")) > (1000, 0));
}

/// Runs a function with the rights of an ordinary user, who has `groups` besides its own.
fn as_user<T: Send>(groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let user = scope.spawn(|| {
            let groups: Vec<_> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
            rustix::thread::set_thread_groups(&groups).unwrap();
            rustix::thread::set_thread_gid(Gid::from_raw(USER)).unwrap();
            rustix::thread::set_thread_uid(Uid::from_raw(USER)).unwrap();
            run()
        });
        user.join().unwrap()
    })
}

#[test]
fn set_group_id_bit_needs_a_group_of_the_caller() {
    const GROUP: u32 = 4321;
    if !is_root() || !is_linux((6, 3), "FUSE does not tell the supplementary groups of a caller") {
        return;
    }
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let mut seen = Vec::new();
    for dir in [&mount.dir, &mount.reference] {
        allow_all(dir);
        let shared = dir.join("shared");
        std::fs::create_dir(&shared).unwrap();
        rustix::fs::chown(&shared, None, Some(Gid::from_raw(GROUP))).unwrap();
        std::fs::set_permissions(&shared, Permissions::from_mode(0o2777)).unwrap();
        for (name, groups) in [("member", &[77, GROUP][..]), ("other", &[77])] {
            as_user(groups, || {
                let mode = Mode::from_raw_mode(0o2755);
                let flags = OFlags::CREATE | OFlags::WRONLY;
                rustix::fs::open(shared.join(name), flags, mode).unwrap();
                std::fs::create_dir(shared.join(format!("{name} directory"))).unwrap();
            });
        }
        seen.push(common::both::tree(&shared));
    }
    assert_eq!(seen[0], seen[1]);
    assert!(std::fs::metadata(mount.dir.join("shared/member")).unwrap().mode() & 0o2000 != 0);
}

#[test]
fn extended_attributes_are_those_below() {
    if !is_root() {
        return;
    }
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let mut seen = Vec::new();
    for dir in [&mount.dir, &mount.reference] {
        allow_all(dir);
        let (file, link) = (dir.join("file"), dir.join("link"));
        std::fs::write(&file, "").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        let none = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(&link, "trusted.link", b"of the link", none).unwrap();
        rustix::fs::setxattr(&file, "trusted.file", b"hidden", none).unwrap();
        rustix::fs::setxattr(&file, "user.file", b"of the file", none).unwrap();
        let list = |path: &Path| {
            let mut names = vec![0; 1000];
            let size = rustix::fs::llistxattr_query(path).unwrap();
            let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
            assert_eq!(size, len);
            String::from_utf8(names[..len].to_vec()).unwrap()
        };
        let mut value = [0; 100];
        let len = rustix::fs::lgetxattr(&link, "trusted.link", &mut value[..]).unwrap();
        assert_eq!(rustix::fs::lgetxattr_query(&link, "trusted.link").unwrap(), len);
        seen.push((value[..len].to_vec(), list(&link), list(&file), as_user(&[], || list(&file))));
        rustix::fs::lremovexattr(&link, "trusted.link").unwrap();
        assert_eq!(list(&link), "");
    }
    assert_eq!(seen[0], seen[1]);
}

/// Where a file has data, by the calls that programs use for it.
fn data_of(file: &File) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    let mut at = 0;
    while let Ok(start) = rustix::fs::seek(file, SeekFrom::Data(at)) {
        at = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap();
        all.push((start, at));
    }
    assert_eq!(rustix::fs::seek(file, SeekFrom::Data(at)), Err(rustix::io::Errno::NXIO));
    all
}

#[test]
fn holes_are_those_below_with_dirty_pages_too() {
    const MIB: u64 = 1 << 20;
    if !is_linux((6, 16), "the mount answers no question for holes") {
        return;
    }
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let sides = [&mount.dir, &mount.reference].map(|dir| {
        let open = |truncate| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(truncate).open(dir.join("sparse")).unwrap()
        };
        let file = open(true);
        file.set_len(10 * MIB).unwrap();
        file.write_all_at(b"written back", MIB).unwrap();
        file.sync_all().unwrap();
        file.write_all_at(b"dirty", 3 * MIB).unwrap();
        file.write_all_at(b"dirty, and past the end", 20 * MIB).unwrap();
        let dirty = data_of(&file);
        drop(file);
        let closed = data_of(&File::open(dir.join("sparse")).unwrap());
        mount.kill_server();
        let (file, reader) = (open(false), File::open(dir.join("sparse")).unwrap());
        file.write_all_at(b"dirty", 5 * MIB).unwrap();
        (dirty, closed, data_of(&reader))
    });
    assert_eq!(sides[0], sides[1]);
}

/// The bytes of an access control list: tag, permissions and identity of each entry.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn access_control_lists_are_enforced_and_inherited() {
    const NONE: u32 = u32::MAX;
    let (owner, user, group, mask, other) = (1, 2, 4, 16, 32);
    let list = acl(&[(owner, 7, NONE), (user, 6, USER), (group, 4, NONE), (mask, 6, NONE), (other, 0, NONE)]);
    let (access, default) = ("system.posix_acl_access", "system.posix_acl_default");
    let none = rustix::fs::XattrFlags::empty();
    if !is_root() {
        return;
    }
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let mut seen = Vec::new();
    for dir in [&mount.dir, &mount.reference] {
        allow_all(dir);
        let read = |name: &str, what| {
            let mut value = [0; 200];
            let len = rustix::fs::getxattr(dir.join(name), what, &mut value[..])?;
            Ok::<_, rustix::io::Errno>(value[..len].to_vec())
        };
        let try_as_user = |name: &str| {
            let path = dir.join(name);
            as_user(&[], || OpenOptions::new().write(true).open(path).map(drop).map_err(|e| e.raw_os_error()))
        };
        let mut past = Vec::new();
        std::fs::write(dir.join("file"), "x").unwrap();
        std::fs::set_permissions(dir.join("file"), Permissions::from_mode(0o2600)).unwrap();
        past.push(format!("{:?} {:?}", try_as_user("file"), read("file", access)));
        rustix::fs::setxattr(dir.join("file"), access, &list, none).unwrap();
        past.push(format!("{:?} {:?}", try_as_user("file"), read("file", access)));
        // The group's bits are the mask.
        std::fs::set_permissions(dir.join("file"), Permissions::from_mode(0o640)).unwrap();
        past.push(format!("{:?} {:?}", try_as_user("file"), read("file", access)));
        rustix::fs::removexattr(dir.join("file"), access).unwrap();
        past.push(format!("{:?} {:?}", try_as_user("file"), read("file", access)));
        // A bit that the owner may not keep, since it is of another group.
        std::fs::write(dir.join("own"), "x").unwrap();
        rustix::fs::chown(dir.join("own"), Some(Uid::from_raw(USER)), Some(Gid::from_raw(77))).unwrap();
        std::fs::set_permissions(dir.join("own"), Permissions::from_mode(0o2750)).unwrap();
        let own = dir.join("own");
        as_user(&[], || rustix::fs::setxattr(own, access, &list, none)).unwrap();
        // New files get the default list of their directory, and the umask does not count.
        for name in ["plain", "shared"] {
            let sub = dir.join(name);
            std::fs::create_dir(&sub).unwrap();
            std::fs::set_permissions(&sub, Permissions::from_mode(0o777)).unwrap();
            if name == "shared" {
                rustix::fs::setxattr(&sub, default, &list, none).unwrap();
            }
            let script = "umask 027; cd \"$0\"; echo x >file; mkdir sub; mkfifo pipe; echo y >sub/file";
            let made = std::process::Command::new("sh").args(["-c", script]).arg(&sub).uid(USER).gid(USER).status();
            assert!(made.unwrap().success());
            for file in ["file", "sub", "pipe", "sub/file"] {
                let file = format!("{name}/{file}");
                past.push(format!("{file} {:?} {:?}", read(&file, access), read(&file, default)));
            }
        }
        past.extend(common::both::tree(dir));
        seen.push(past);
    }
    assert_eq!(seen[0], seen[1]);
    assert!(seen[0][1].starts_with("Ok"), "{:?}", seen[0]);
}

/// The birth time is that of the file below, and the other attributes that come with it are those of GETATTR.
#[test]
fn birth_time_is_that_of_the_file_below() {
    let statx = |path: &Path| {
        let flags = rustix::fs::StatxFlags::BASIC_STATS | rustix::fs::StatxFlags::BTIME;
        let stat = rustix::fs::statx(rustix::fs::CWD, path, rustix::fs::AtFlags::SYMLINK_NOFOLLOW, flags).unwrap();
        let birth = (stat.stx_mask & rustix::fs::StatxFlags::BTIME.bits() != 0)
            .then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec));
        (birth, stat.stx_size, (stat.stx_mtime.tv_sec, i64::from(stat.stx_mtime.tv_nsec)), stat.stx_mode)
    };
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("old"), "content").unwrap()) else { return };
    let (old, new, sub) = (mount.dir.join("old"), mount.dir.join("new"), mount.dir.join("sub"));
    let file = File::create(&new).unwrap();
    file.write_all_at(&[1; 5000], 0).unwrap();
    std::fs::create_dir(&sub).unwrap();
    if statx(&new).0.is_none() {
        eprintln!(
            "skipped: FUSE of this Linux kernel has no birth times (before 6.6), or the file system below has none"
        );
        return;
    }
    // Dirty, so that the file below has another size.
    assert_eq!((statx(&new).1, statx(&new).2), (5000, modified(&new)));
    std::thread::sleep(Duration::from_millis(20));
    file.write_all_at(&[2; 6000], 0).unwrap();
    mount.kill_server();
    assert_eq!((statx(&new).1, statx(&new).2), (6000, modified(&new)));
    std::fs::rename(&old, mount.dir.join("renamed")).unwrap();
    drop(file);
    let names = ["new", "renamed", "sub"];
    let seen = names.map(|name| statx(&mount.dir.join(name)));
    let (below, _root) = mount.unmount();
    assert_eq!(names.map(|name| statx(&below.join(name))), seen);
}
