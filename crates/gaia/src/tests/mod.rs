//! Maps against a small server, on the emulated device.

#![expect(unsafe_code, reason = "copies to and from device memory")]

mod eviction;
mod server;

use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_pagecache::messages::Run;
use spinio_sys::Errno;

use self::server::{Fault, PAGE, PlainFile, Server};
use crate::{Access, Advice, Map};

const P: u64 = PAGE as u64;

struct Bench {
    device: &'static Emulated,
    server: Server,
    _dir: tempfile::TempDir,
}

fn bench(len: usize) -> Bench {
    bench_on("size=8M", len)
}

fn bench_on(device: &str, len: usize) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let device = Emulated::start(Config::parse(device).unwrap()).unwrap();
    Bench { device, server: Server::start(dir.path(), &contents(len)), _dir: dir }
}

fn contents(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 % 251) as u8).collect()
}

impl Bench {
    fn map(&self, offset: u64, len: u64, access: Access) -> crate::Result<Map> {
        let file = PlainFile(self.server.clone());
        Map::with_file(offset, len, access, self.device, None, move || Ok(Box::new(file)))
    }

    fn load(&self, map: &Map, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = DeviceAddr(map.address() + offset);
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, len) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes
    }

    fn store(&self, map: &Map, offset: u64, bytes: &[u8]) {
        let to = DeviceAddr(map.address() + offset);
        // SAFETY: as above.
        unsafe { self.device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }

    fn snapshot(&self, page: u64) -> Option<Vec<u8>> {
        self.server.state.lock().unwrap().snapshots.get(&page).cloned()
    }
}

fn errno<T: std::fmt::Debug>(result: crate::Result<T>) -> Errno {
    result.unwrap_err().errno
}

#[test]
fn acquire_fills_the_replica_from_the_file() {
    let bench = bench(3 * PAGE + 100);
    let map = bench.map(P, 4 * P, Access::Read).unwrap();
    assert_eq!(map.acquire(0, 4 * P, Access::Read).unwrap(), 2 * P + 100);
    let mut wanted = contents(3 * PAGE + 100)[PAGE..].to_vec();
    wanted.resize(4 * PAGE, 0);
    assert_eq!(bench.load(&map, 0, 4 * PAGE), wanted);
    assert_eq!(bench.server.state.lock().unwrap().flushed, [(P, 4 * P)]);
    assert_eq!(map.info().bytes_from_file, 4 * P);
    assert_eq!(map.acquire(10, 5, Access::Read).unwrap(), 5);
    assert_eq!(map.info().bytes_from_file, 4 * P);
}

#[test]
fn release_sends_only_changed_pages() {
    let bench = bench(6 * PAGE);
    let map = bench.map(0, 6 * P, Access::Write).unwrap();
    map.acquire(0, 6 * P, Access::Write).unwrap();
    bench.store(&map, P + 5, &[255]);
    bench.store(&map, 2 * P, &[254]);
    bench.store(&map, 5 * P - 1, &[253]);
    assert_eq!(map.release(0, 6 * P).unwrap(), 3 * P);
    let runs = [Run { first: 1, count: 2 }, Run { first: 4, count: 1 }];
    assert_eq!(bench.server.state.lock().unwrap().released, [runs.to_vec()]);
    let written_back = std::mem::take(&mut bench.server.state.lock().unwrap().flushes_started);
    assert_eq!(written_back, [(P, 2 * P), (4 * P, P)], "what CPU programs have stored to these pages, and no other");
    assert_eq!(bench.snapshot(1).unwrap()[5], 255);
    assert_eq!(bench.snapshot(4).unwrap()[PAGE - 1], 253);
    // Nothing is changed in the next epoch: a release without pages.
    map.acquire(0, 6 * P, Access::Write).unwrap();
    assert_eq!(map.release(0, 6 * P).unwrap(), 0);
    assert_eq!(bench.server.state.lock().unwrap().released[1], []);
    // Another map sees it.
    let other = bench.map(P, P, Access::Read).unwrap();
    other.acquire(0, P, Access::Read).unwrap();
    assert_eq!(bench.load(&other, 5, 1), [255]);
    assert_eq!(other.info().bytes_from_snapshots, P);
}

#[test]
fn patch_keeps_stores_of_the_epoch() {
    let bench = bench(2 * PAGE);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.store(&map, 10, &[1, 2, 3]);
    let base = contents(PAGE);
    let mut head = base.clone();
    head[11] = 99;
    head[500] = 98;
    bench.server.state.lock().unwrap().patches.insert(0, (base.clone(), head.clone()));
    map.acquire(0, 2 * P, Access::Write).unwrap();
    // Byte 11 was stored by both in no order: the program keeps what it stored.
    assert_eq!(bench.load(&map, 10, 3), [1, 2, 3]);
    assert_eq!(bench.load(&map, 500, 1), [98]);
    assert_eq!(map.info().pages_patched, 1);
    // The scan compares with head, so the page counts as changed.
    map.release(0, 2 * P).unwrap();
    let mut wanted = head;
    wanted[10..13].copy_from_slice(&[1, 2, 3]);
    assert_eq!(bench.snapshot(0).unwrap(), wanted);
    assert_eq!(bench.snapshot(1), None);
}

#[test]
fn epoch_of_a_server_that_ended_is_stale() {
    let bench = bench(2 * PAGE);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.store(&map, 0, &[200]);
    bench.server.fail(Fault::CloseBeforeCommit);
    assert_eq!(errno(map.release(0, 2 * P)), Errno::STALE);
    assert_eq!(errno(map.release(0, 2 * P)), Errno::INVAL);
    map.acquire(0, 2 * P, Access::Write).unwrap();
    assert_eq!(bench.load(&map, 0, 1), contents(1), "the lost store is gone");
    bench.store(&map, 0, &[200]);
    assert_eq!(map.release(0, 2 * P).unwrap(), P);
    assert_eq!(bench.snapshot(0).unwrap()[0], 200);
    assert_eq!(map.info().reattached, 1);
}

#[test]
fn acquire_attaches_to_the_next_server() {
    let bench = bench(2 * PAGE);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    bench.server.fail(Fault::CloseOnAcquire);
    map.acquire(0, P, Access::Write).unwrap();
    assert_eq!(map.info().reattached, 1);
    // Inside an epoch it fails, and so does the release of every part of it.
    bench.server.fail(Fault::CloseOnAcquire);
    assert_eq!(errno(map.acquire(P, P, Access::Write)), Errno::STALE);
    assert_eq!(errno(map.release(0, P)), Errno::STALE);
    map.acquire(0, 2 * P, Access::Write).unwrap();
    assert_eq!(map.release(0, 2 * P).unwrap(), 0);
    assert_eq!(bench.server.state.lock().unwrap().hellos, 3);
}

#[test]
fn committed_release_whose_reply_was_lost_is_found() {
    let bench = bench(2 * PAGE);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.store(&map, 0, &[200]);
    bench.server.fail(Fault::CloseAfterCommit);
    assert_eq!(map.release(0, 2 * P).unwrap(), P);
    assert_eq!(map.info().releases_recovered, 1);
    assert_eq!(bench.server.state.lock().unwrap().released.len(), 1);
    assert_eq!(errno(map.release(0, 2 * P)), Errno::INVAL);
}

#[test]
fn refused_release_leaves_the_epoch_open() {
    let bench = bench(PAGE);
    let map = bench.map(0, P, Access::Write).unwrap();
    map.acquire(0, P, Access::Write).unwrap();
    bench.store(&map, 0, &[200]);
    bench.server.fail(Fault::RefuseRelease);
    assert_eq!(errno(map.release(0, P)), Errno::NOSPC);
    assert_eq!(map.release(0, P).unwrap(), P);
}

#[test]
fn release_before_which_cpu_pages_cannot_be_flushed_leaves_all_epochs_open() {
    let bench = bench(2 * PAGE);
    let map = bench.map(0, 4 * P, Access::Write).unwrap();
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.store(&map, 0, &[200]);
    bench.store(&map, P, &[201]);
    let fails = |errno| bench.server.state.lock().unwrap().flush_fails = errno;
    bench.server.state.lock().unwrap().unflushed = P;
    fails(Some(Errno::NOSPC));
    for _ in 0..2 {
        assert_eq!(errno(map.release(0, P)), Errno::NOSPC);
    }
    fails(None);
    assert_eq!(map.release(0, P).unwrap(), P);
    assert_eq!(map.release(P, P).unwrap(), P, "an epoch that the failed release did not name");
    assert_eq!((bench.snapshot(0).unwrap()[0], bench.snapshot(1).unwrap()[0]), (200, 201));
    assert_eq!(map.info().reattached, 0);
}

#[test]
fn discarded_stores_are_gone() {
    let bench = bench(3 * PAGE);
    let map = bench.map(0, 3 * P, Access::Write).unwrap();
    map.acquire(0, P, Access::Read).unwrap();
    map.acquire(P, 2 * P, Access::Write).unwrap();
    bench.store(&map, P, &[200]);
    bench.store(&map, 2 * P, &[201]);
    map.discard(0, P + 1).unwrap();
    assert_eq!(errno(map.release(P, P)), Errno::INVAL);
    assert_eq!(map.release(2 * P, P).unwrap(), P, "another page of the epoch keeps its stores");
    map.acquire(0, 3 * P, Access::Write).unwrap();
    assert_eq!(bench.load(&map, P, 1), contents(PAGE + 1)[PAGE..]);
    assert_eq!(map.info().bytes_from_file, 4 * P, "only the discarded page is fetched again");
    assert_eq!(map.release(0, 3 * P).unwrap(), 0);
    assert_eq!((bench.snapshot(1), bench.snapshot(2).unwrap()[0]), (None, 201));
    // Nothing is open: nothing to do.
    map.discard(0, 3 * P).unwrap();
    assert_eq!(errno(map.discard(0, 3 * P + 1)), Errno::INVAL);
}

#[test]
fn discard_succeeds_when_the_server_has_ended() {
    let bench = bench(2 * PAGE);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.store(&map, 0, &[200]);
    bench.server.fail(Fault::CloseOnDrop);
    map.discard(0, P).unwrap();
    // The rest of the epoch is lost, and says so.
    assert_eq!(errno(map.release(P, P)), Errno::STALE);
    map.acquire(0, 2 * P, Access::Write).unwrap();
    assert_eq!(bench.load(&map, 0, 1), contents(1));
    assert_eq!(map.release(0, 2 * P).unwrap(), 0);
    // A lost epoch is discarded as any other.
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.server.fail(Fault::CloseOnAcquire);
    assert_eq!(errno(map.acquire(0, P, Access::Write)), Errno::STALE);
    map.discard(0, 2 * P).unwrap();
    assert_eq!(errno(map.release(0, 2 * P)), Errno::INVAL);
}

#[test]
fn pages_that_are_not_needed_are_fetched_again_and_epochs_stay() {
    let bench = bench(3 * PAGE);
    let map = bench.map(0, 3 * P, Access::Write).unwrap();
    map.acquire(0, 3 * P, Access::Read).unwrap();
    map.acquire(P, P, Access::Write).unwrap();
    bench.store(&map, P, &[200]);
    map.advise(0, 2 * P, Advice::DontNeed).unwrap();
    map.acquire(0, 3 * P, Access::Read).unwrap();
    assert_eq!(map.info().bytes_from_file, 4 * P);
    assert_eq!(map.release(P, P).unwrap(), P);
    assert_eq!(bench.snapshot(1).unwrap()[0], 200);
    // A server that has ended has no pages of this map.
    map.acquire(P, P, Access::Write).unwrap();
    bench.server.fail(Fault::CloseOnDrop);
    map.advise(0, P, Advice::DontNeed).unwrap();
    map.advise(0, P, Advice::DontNeed).unwrap();
    assert_eq!(errno(map.release(P, P)), Errno::STALE);
    for advice in [Advice::WillNeed, Advice::Sequential, Advice::Random] {
        map.advise(0, 3 * P, advice).unwrap();
        assert_eq!(errno(map.advise(1, 3 * P, advice)), Errno::INVAL);
    }
    map.sync(0, 3 * P).unwrap();
    assert_eq!(errno(map.sync(0, 3 * P + 1)), Errno::INVAL);
    assert_eq!(bench.server.state.lock().unwrap().syncs, 1);
}

#[test]
fn misuse_is_refused() {
    let bench = bench(2 * PAGE);
    assert_eq!(errno(bench.map(1, P, Access::Read)), Errno::INVAL);
    assert_eq!(errno(bench.map(0, 0, Access::Read)), Errno::INVAL);
    assert_eq!(errno(bench.map(u64::MAX - P + 1, 2 * P, Access::Read)), Errno::INVAL);
    let map = bench.map(0, 2 * P, Access::Read).unwrap();
    assert_eq!(errno(map.acquire(0, P, Access::Write)), Errno::ACCESS);
    assert_eq!(errno(map.acquire(P, P + 1, Access::Read)), Errno::INVAL);
    assert_eq!(errno(map.acquire(0, 0, Access::Read)), Errno::INVAL);
    assert_eq!(errno(map.release(0, P)), Errno::INVAL);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    map.acquire(0, P, Access::Write).unwrap();
    assert_eq!(errno(map.release(0, 2 * P)), Errno::INVAL);
    assert_eq!(map.release(0, P).unwrap(), 0);
    // A real descriptor, of a file that is not below a mount.
    use std::os::fd::AsRawFd;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&bench.server.path).unwrap();
    assert_eq!(errno(Map::new(file.as_raw_fd(), 0, P, Access::Write, bench.device)), Errno::NOTSUP);
    let file = std::fs::File::open(&bench.server.path).unwrap();
    assert_eq!(errno(Map::new(file.as_raw_fd(), 0, P, Access::Write, bench.device)), Errno::ACCESS);
    assert_eq!(errno(Map::new(-1, 0, P, Access::Read, bench.device)), Errno::BADF);
}

#[test]
fn replies_of_a_wrong_server_are_errors() {
    let bench = bench(2 * PAGE);
    bench.server.fail(Fault::SmallWindow);
    assert_eq!(errno(bench.map(0, 2 * P, Access::Write)), Errno::PROTO);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    bench.server.fail(Fault::PagesOutside);
    assert_eq!(errno(map.acquire(0, P, Access::Write)), Errno::PROTO);
    map.acquire(0, P, Access::Write).unwrap();
    bench.server.fail(Fault::UnknownTicket);
    let _other = bench.map(0, P, Access::Read).unwrap();
}

#[test]
fn size_that_the_server_does_not_know_is_flushed() {
    let bench = bench(PAGE);
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    bench.server.state.lock().unwrap().unflushed = 100;
    assert_eq!(map.acquire(0, 2 * P, Access::Write).unwrap(), P + 100);
    assert_eq!(bench.server.state.lock().unwrap().flushed, [(0, 2 * P), (0, 0)]);
}

#[test]
fn maps_leave_no_descriptor_and_no_device_memory() {
    let bench = bench(2 * PAGE);
    let before = bench.device.resources_in_use();
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    map.acquire(0, 2 * P, Access::Write).unwrap();
    // Only the server of this test, which is in the same process, has its end in this table.
    let windows = || {
        let entries = std::fs::read_dir("/proc/self/fd").unwrap();
        let targets = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        targets.filter(|target| target.to_string_lossy().contains(&bench.server.window_name())).count()
    };
    assert_eq!(windows(), 1);
    assert_eq!(map.stats().unwrap().commits, 7);
    drop(map);
    assert_eq!(bench.device.resources_in_use(), before);
}
