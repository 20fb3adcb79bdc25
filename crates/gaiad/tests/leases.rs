//! Leases that clients take on the descriptors that they get of files below the mount.

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Duration;

use spinio_pagecache::messages::Access;
use spinio_sys::linux::{gettid, spawn_signals_blocked, take_read_lease};
use spinio_testkit::eventually;

use crate::common::TestMount;
use crate::common::gpu::{PAGE, open};
use crate::common::raw::Raw;

#[test]
fn server_role() {
    common::server_role();
}

/// A thread that has the signals of leases blocked; it ends with the process.
fn owner_of_leases() -> u32 {
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        sender.send(gettid()).unwrap();
        std::thread::sleep(Duration::MAX);
    };
    spawn_signals_blocked("leases", 64 << 10, body).unwrap();
    receiver.recv().unwrap()
}

#[test]
fn writes_that_wait_for_leases_do_not_keep_other_files_waiting() {
    // The Linux kernel ends leases after 45 s, and a busy machine may take so long for the other file.
    assert!((0..3).any(|_| is_another_file_used_while_leases_hold()));
}

/// True too where there can be no mount.
fn is_another_file_used_while_leases_hold() -> bool {
    // More than the server has workers.
    let count = 4 * std::thread::available_parallelism().unwrap().get() + 8;
    let fill = |dir: &std::path::Path| {
        (0..count).for_each(|i| std::fs::write(dir.join(i.to_string()), [1; PAGE]).unwrap());
    };
    let Some(mount) = TestMount::new(fill) else { return true };
    let files: Vec<_> = (0..count).map(|i| open(&mount.dir.join(i.to_string()))).collect();
    files.iter().for_each(|file| file.write_all_at(&[2; PAGE], 0).unwrap());
    // The next one has none of them open for writing.
    mount.kill_server();
    let maps: Vec<_> = files.iter().map(|file| Raw::map(file, Access::Read, 0, 1).unwrap()).collect();
    let owner = owner_of_leases();
    maps.iter().for_each(|map| take_read_lease(map.backing.as_raw_fd(), owner).unwrap());
    let hold = std::thread::scope(|scope| {
        let syncs: Vec<_> = files.iter().map(|file| scope.spawn(|| file.sync_all())).collect();
        std::thread::sleep(Duration::from_millis(300));
        let other = mount.dir.join("other");
        let used = scope.spawn(move || {
            std::fs::write(&other, "text").unwrap();
            open(&other).sync_all().unwrap();
            assert_eq!(std::fs::read(&other).unwrap(), b"text");
        });
        eventually("another file is used", || used.is_finished());
        let hold = !syncs.iter().any(std::thread::ScopedJoinHandle::is_finished);
        drop(maps);
        syncs.into_iter().for_each(|sync| sync.join().unwrap().unwrap());
        hold
    });
    drop(files);
    assert_eq!(mount.servers(), 2);
    let (below, _root) = mount.unmount();
    (0..count).for_each(|i| assert!(std::fs::read(below.join(i.to_string())).unwrap() == [2; PAGE], "{i}"));
    hold
}
