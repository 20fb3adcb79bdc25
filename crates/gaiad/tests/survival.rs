//! What must survive a server that is killed: stores in flight, files without a name, open files that are replaced; and
//! a bounded number of descriptors for any number of files.

#![expect(unsafe_code, reason = "mappings of files")]

mod common;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{TestMount, audit, is_root};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use spinio_testkit::eventually;

#[test]
fn server_role() {
    common::server_role();
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Whether a test has not lasted for three seconds yet, or few servers have died.
fn is_too_short(mount: &TestMount, begin: Instant) -> bool {
    let is_long = begin.elapsed() > Duration::from_secs(3);
    !is_long || mount.servers() <= 10 && begin.elapsed() < Duration::from_secs(300)
}

/// Each thread writes every fourth byte of the same pages; even threads by stores to a mapping, odd ones by pwrite.
#[test]
fn concurrent_stores_and_writes_survive_killed_servers() {
    const THREADS: usize = 4;
    const BYTES: usize = 64 * 4096;
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let path = mount.dir.join("shared");
    open(&path).set_len(BYTES as u64).unwrap();
    let killer = mount.killer(7, 5..60);
    let begin = Instant::now();
    let go_on = |begin| is_too_short(&mount, begin);
    let barrier = Barrier::new(THREADS);
    let rounds: Vec<u8> = std::thread::scope(|scope| {
        let writers = (0..THREADS).map(|number| {
            let (path, barrier, go_on) = (&path, &barrier, &go_on);
            scope.spawn(move || {
                let file = open(path);
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                // SAFETY: a new mapping at an address that the kernel chooses.
                let at = unsafe { mmap(std::ptr::null_mut(), BYTES, prot, MapFlags::SHARED, file.as_fd(), 0) }.unwrap();
                let memory = at.cast::<u8>();
                barrier.wait();
                let mut round = 0u8;
                while go_on(begin) || round == 0 {
                    round = round.wrapping_add(1).max(1);
                    for i in (number..BYTES).step_by(THREADS * 61) {
                        if number % 2 == 0 {
                            // SAFETY: within the mapping; this byte is of this thread only.
                            unsafe { memory.add(i).write_volatile(round) };
                        } else {
                            assert_eq!(file.write_at(&[round], i as u64).unwrap(), 1);
                        }
                        // SAFETY: as above.
                        assert_eq!(unsafe { memory.add(i).read_volatile() }, round, "byte {i}");
                    }
                    match round % 8 {
                        // SAFETY: of the mapping.
                        0 => unsafe { msync(at, BYTES, MsyncFlags::SYNC) }.unwrap(),
                        4 => file.sync_data().unwrap(),
                        _ => {}
                    }
                }
                // SAFETY: not used any more.
                unsafe { munmap(at, BYTES) }.unwrap();
                round
            })
        });
        writers.collect::<Vec<_>>().into_iter().map(|w| w.join().unwrap()).collect()
    });
    drop(killer);
    assert!(mount.servers() > 10, "only {} servers", mount.servers());
    let check = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        for (number, round) in rounds.iter().enumerate() {
            for i in (number..BYTES).step_by(THREADS * 61) {
                assert_eq!(bytes[i], *round, "byte {i} of thread {number} in {}", path.display());
            }
        }
    };
    check(&path);
    audit::nothing_is_left(&mount, 0);
    let (below, _root) = audit::unmount_and_look(mount);
    check(&below.join("shared"));
}

#[test]
fn files_without_name_survive_killed_server() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let mut files: Vec<File> = (0..40)
        .map(|i| {
            let path = mount.dir.join(format!("gone{i}"));
            let file = open(&path);
            file.write_all_at(format!("before {i}").as_bytes(), 0).unwrap();
            // Some pages are written back, some not.
            if i % 2 == 0 {
                file.sync_all().unwrap();
            }
            std::fs::remove_file(&path).unwrap();
            file
        })
        .collect();
    let directory = mount.dir.join("directory");
    std::fs::create_dir(&directory).unwrap();
    let removed = File::open(&directory).unwrap();
    std::fs::remove_dir(&directory).unwrap();
    let unnamed = rustix::fs::open(&mount.dir, OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o600)).unwrap();
    let mut unnamed = File::from(unnamed);
    unnamed.write_all(b"unnamed").unwrap();
    for _ in 0..3 {
        mount.kill_server();
        for (i, file) in files.iter_mut().enumerate() {
            // So that reading needs the server, where all is written back.
            rustix::fs::fadvise(&*file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            let mut text = String::new();
            file.seek(SeekFrom::Start(0)).unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("before {i}"));
            file.set_len(text.len() as u64).unwrap();
            assert_eq!(file.metadata().unwrap().nlink(), 0);
        }
        assert_eq!(removed.metadata().unwrap().nlink(), 0);
    }
    let named = mount.dir.join("named");
    rustix::fs::linkat(&unnamed, c"", CWD, &named, AtFlags::EMPTY_PATH).unwrap();
    drop(unnamed);
    mount.kill_server();
    assert_eq!(std::fs::read(&named).unwrap(), b"unnamed");
    drop((files, removed));
    assert_eq!(std::fs::read_dir(&mount.dir).unwrap().count(), 1);
    audit::nothing_is_left(&mount, mount.servers() as usize);
    let (below, _root) = audit::unmount_and_look(mount);
    assert_eq!(std::fs::read_dir(&below).unwrap().count(), 1);
}

#[test]
fn too_many_files_without_name_leave_descriptors_to_others() {
    if !is_root() {
        // Without handles files with a name need a descriptor too: tests/user.rs.
        return;
    }
    let Some(mount) = TestMount::new(|_| ()) else { return };
    mount.limit_descriptors(400);
    let path = mount.dir.join("gone");
    let mut files = Vec::new();
    let refused = loop {
        let file = open(&path);
        file.write_all_at(&[files.len() as u8], 0).unwrap();
        match std::fs::remove_file(&path) {
            Ok(()) => files.push(file),
            Err(error) => break error,
        }
        assert!(files.len() < 400);
    };
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::NFILE.raw_os_error()));
    for i in 0..300 {
        let other = mount.dir.join(format!("other{i}"));
        std::fs::write(&other, "text").unwrap();
        assert_eq!(std::fs::read(&other).unwrap(), b"text");
    }
    mount.kill_server();
    for (i, file) in files.iter().enumerate() {
        let mut byte = [0];
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        file.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [i as u8]);
    }
    drop(files);
    // The kernel says later that it has forgotten them.
    eventually("descriptors for files without name", || std::fs::remove_file(&path).is_ok());
}

#[test]
fn replaced_open_file_keeps_its_content() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let (old, new) = (mount.dir.join("old"), mount.dir.join("new"));
    for round in 0..30 {
        std::fs::write(&old, format!("old {round}")).unwrap();
        std::fs::write(&new, format!("new {round}")).unwrap();
        let file = File::open(&old).unwrap();
        if round % 3 == 0 {
            mount.kill_server();
        }
        std::fs::rename(&new, &old).unwrap();
        if round % 3 == 1 {
            mount.kill_server();
        }
        let mut text = [0; 16];
        let len = file.read_at(&mut text, 0).unwrap();
        assert_eq!(&text[..len], format!("old {round}").as_bytes());
        assert_eq!(std::fs::read_to_string(&old).unwrap(), format!("new {round}"));
        assert_eq!(std::fs::metadata(&new).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
}

/// A program that creates files, and each thread in its own directory: every name exists exactly once at the end.
#[test]
fn names_survive_killed_servers() {
    const THREADS: usize = 4;
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let killer = mount.killer(3, 3..30);
    let begin = Instant::now();
    let go_on = |begin| is_too_short(&mount, begin);
    let counts: Vec<usize> = std::thread::scope(|scope| {
        let threads = (0..THREADS).map(|number| {
            let (dir, go_on) = (mount.dir.join(format!("{number}")), &go_on);
            scope.spawn(move || {
                std::fs::create_dir(&dir).unwrap();
                let mut count = 0;
                while go_on(begin) {
                    let (temporary, name) = (dir.join("temporary"), dir.join(format!("f{count}")));
                    let options = OpenOptions::new().write(true).create_new(true).open(&temporary);
                    options.unwrap().write_all(format!("{count}").as_bytes()).unwrap();
                    std::fs::hard_link(&temporary, dir.join("link")).unwrap();
                    std::fs::rename(&temporary, &name).unwrap();
                    std::fs::remove_file(dir.join("link")).unwrap();
                    std::fs::create_dir(dir.join("sub")).unwrap();
                    std::os::unix::fs::symlink("x", dir.join("sub/link")).unwrap();
                    rustix::fs::renameat_with(CWD, dir.join("sub"), CWD, &name, rustix::fs::RenameFlags::EXCHANGE)
                        .unwrap();
                    std::fs::remove_file(name.join("link")).unwrap();
                    std::fs::remove_dir(&name).unwrap();
                    std::fs::rename(dir.join("sub"), &name).unwrap();
                    count += 1;
                }
                count
            })
        });
        threads.collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect()
    });
    drop(killer);
    assert!(mount.servers() > 10, "only {} servers", mount.servers());
    let (below, _root) = audit::unmount_and_look(mount);
    for (number, count) in counts.into_iter().enumerate() {
        let dir = below.join(format!("{number}"));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), count);
        for i in 0..count {
            assert_eq!(std::fs::read_to_string(dir.join(format!("f{i}"))).unwrap(), format!("{i}"));
        }
    }
}

/// A hundred thousand files; SPINIO_GAIA_FILES makes it another number, of thousands.
#[test]
fn hundred_thousand_nodes_need_few_descriptors() {
    const FILES: usize = 1000;
    let all = std::env::var("SPINIO_GAIA_FILES").map_or(100_000, |files| files.parse().unwrap());
    let directories = usize::max(1, all / FILES);
    let fill = |dir: &Path| {
        for d in 0..directories {
            let sub = dir.join(format!("{d}"));
            std::fs::create_dir(&sub).unwrap();
            for f in 0..FILES {
                File::create(sub.join(format!("{f}"))).unwrap();
            }
        }
    };
    let Some(mount) = TestMount::new(fill) else { return };
    let fds = |process: u32| std::fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count);
    let begun = Instant::now();
    let mut seen = 0;
    let mut most = [0; 2];
    for d in 0..directories {
        for entry in std::fs::read_dir(mount.dir.join(format!("{d}"))).unwrap() {
            let entry = entry.unwrap();
            entry.metadata().unwrap();
            if seen % 10 == 0 {
                assert_eq!(std::fs::read(entry.path()).unwrap(), b"");
            }
            seen += 1;
        }
        most = [(most[0], mount.server()), (most[1], mount.supervisor())].map(|(most, of)| fds(of).max(most));
    }
    assert_eq!(seen, directories * FILES);
    let [server, supervisor] = most;
    let took = begun.elapsed().as_secs_f64();
    println!("{seen} files in {took:.1} s; descriptors of the server {server}, of the supervisor {supervisor}");
    // In a user's own mount each node has one: half of them, and somewhat more until the kernel has forgotten others.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(1 << 20) as usize;
    let is_root = rustix::process::geteuid().is_root();
    let [allowed, kept] = if is_root { [4300, 100] } else { [limit / 4 * 3; 2] };
    assert!((100..allowed).contains(&server), "{server} descriptors");
    assert!((1..kept).contains(&supervisor), "{supervisor} descriptors of the supervisor");
    mount.kill_server();
    for d in 0..directories {
        let path = mount.dir.join(format!("{d}/{}", d * 7 % FILES));
        std::fs::write(&path, "later").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"later");
    }
}

/// As a server leaves it that is killed while it takes the requests of an earlier one: without the next one's care its
/// threads would ask again and again, and take all processors.
#[test]
fn threads_wait_for_requests_also_after_a_server_that_left_a_connection_without_waiting() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let table = std::fs::read_dir(format!("/proc/{}/fd", mount.supervisor())).unwrap().flatten();
    let is_device = |entry: &std::fs::DirEntry| std::fs::read_link(entry.path()).is_ok_and(|to| to == *"/dev/fuse");
    let number = table.filter(is_device).find_map(|entry| entry.file_name().to_str()?.parse().ok()).unwrap();
    let supervisor = pidfd_open(Pid::from_raw(mount.supervisor() as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let device = match pidfd_getfd(&supervisor, number, PidfdGetfdFlags::empty()) {
        Err(Errno::PERM) => return eprintln!("skipped: a process may not get another one's descriptor here"),
        device => device.unwrap(),
    };
    fcntl_setfl(&device, fcntl_getfl(&device).unwrap() | OFlags::NONBLOCK).unwrap();
    mount.kill_server();
    eventually("the next server waits", || !fcntl_getfl(&device).unwrap().contains(OFlags::NONBLOCK));
    drop(device);
    mount.unmount();
}
