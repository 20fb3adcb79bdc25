//! Releases that hand device memory over: the bytes arrive later, whatever dies meanwhile.
//!
//! Maps are on the first emulated device, which the device process has too. Where a test needs time between release and
//! arrival, that of the device process is slow.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom, memfd_create};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use spinio_device::emulated::{self, Emulated};
use spinio_device::{Device, DeviceAddr, SharedMemory, StreamId, WaitMode};
use spinio_gaia::{Access, Map};
use spinio_pagecache::messages::{self, HandOver, Reply, Run};
use spinio_testkit::deadline::with_deadline;
use spinio_testkit::eventually;

use crate::common::gpu::{PAGE, open};
#[cfg(debug_assertions)]
use crate::common::hold::Hold;
use crate::common::raw::Raw;
use crate::common::{TestMount, device_process};

const CHUNK: usize = 2 << 20;
/// Four chunks, and a part of a page in a fifth.
const LEN: usize = 4 * CHUNK + 5000;
/// Set in the environment of a client process, to its file.
const CLIENT: &str = "SPINIO_GAIAD_TEST_HANDOFF";
/// It takes 0.4 s, and 2 s.
const SLOW: &str = "gbps=0.02";
const SLOWER: &str = "gbps=0.004";
/// It takes 4 s.
const SLOWEST: &str = "gbps=0.002";
/// Releases that the state memory has records of.
const RECORDS: usize = 4096;

#[test]
fn server_role() {
    common::server_role();
}

/// A process that ends right after its release.
#[test]
fn client_role() {
    if let Some(path) = std::env::var_os(CLIENT) {
        let client = Client::new(&open(Path::new(&path)));
        assert!(client.release(7), "{:?}", client.map.info());
        std::process::abort();
    }
}

fn device() -> &'static Emulated {
    emulated::configure("size=512M").unwrap();
    emulated::device(0).unwrap()
}

struct Client {
    map: Map,
}

impl Client {
    fn new(file: &File) -> Client {
        Client { map: Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device()).unwrap() }
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        let to = DeviceAddr(self.map.address() + at as u64);
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device().copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
        device().synchronize(StreamId(0), WaitMode::Block).unwrap();
    }

    fn load(&self) -> Vec<u8> {
        self.map.acquire(0, LEN as u64, Access::Read).unwrap();
        let mut bytes = vec![0; LEN];
        // SAFETY: as above.
        unsafe { device().copy_out(StreamId(0), bytes.as_mut_ptr(), DeviceAddr(self.map.address()), LEN) }.unwrap();
        device().synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes
    }

    /// One epoch that overwrites all; whether chunks were handed over.
    fn release(&self, seed: u8) -> bool {
        let before = self.map.info().releases_handed_over;
        self.map.overwrite(0, LEN as u64).unwrap();
        self.store(0, &content(seed));
        assert_eq!(self.map.release_handing_over(0, LEN as u64).unwrap(), LEN as u64);
        self.map.info().releases_handed_over > before
    }
}

fn content(seed: u8) -> Vec<u8> {
    (0..LEN).map(|at| (at / PAGE) as u8 ^ (at % 253) as u8 ^ seed).collect()
}

fn mounted(speed: Option<&str>, memory: Option<usize>) -> Option<(TestMount, File)> {
    mounted_with(speed, memory, |_| ())
}

fn mounted_with(
    speed: Option<&str>,
    memory: Option<usize>,
    change: impl FnOnce(&mut Command),
) -> Option<(TestMount, File)> {
    let mount = TestMount::with_supervisor(
        |dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap(),
        |command| {
            command.env(common::MEMORY, memory.unwrap_or(4 * LEN).to_string());
            speed.map(|speed| command.env("SPINIO_EMULATED", speed));
            change(command);
        },
    )?;
    let file = open(&mount.dir.join("file"));
    Some((mount, file))
}

fn read(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Sends a signal to the device process, unless it has ended: after 10 s without work, so nothing is on its way.
fn signal_device_process(mount: &TestMount, signal: Signal) -> Option<Pid> {
    device_process(mount.server()).filter(|process| kill_process(*process, signal).is_ok())
}

/// Lets a device process go on that was stopped, unless the server has given up on it meanwhile (after 30 s).
fn go_on(device_process: impl Into<Option<Pid>>) {
    let sent = device_process.into().map_or(Ok(()), |process| kill_process(process, Signal::CONT));
    assert!(matches!(sent, Ok(()) | Err(Errno::SRCH)));
}

/// Repeats what a slow machine may not do before bytes have arrived, or before the server gives up on a device process that is
/// stopped. Where it waits for that process, it never does.
fn in_time(what: &str, body: impl FnMut(u8) -> bool) {
    assert!((0..8).any(body), "never in time: {what}");
}

#[test]
fn every_byte_arrives_through_the_mount_in_another_map_and_on_storage() {
    let Some((mount, file)) = mounted(None, None) else { return };
    let client = Client::new(&file);
    // The kernel has its pages, which is no reason to copy them.
    assert!(read(&file) == vec![1; LEN]);
    for seed in [2, 3] {
        assert!(client.release(seed), "{:?}", client.map.info());
        assert_eq!(client.map.info().device_bytes, 0, "unmapped");
        if seed == 2 {
            assert!(read(&file) == content(seed), "through the mount");
        }
        assert!(Client::new(&file).load() == content(seed), "in another map");
        assert!(client.load() == content(seed), "in its own");
    }
    // A part: two whole chunks.
    client.map.acquire(0, LEN as u64, Access::Write).unwrap();
    client.store(CHUNK, &vec![9; 2 * CHUNK]);
    let published = client.map.release_handing_over(CHUNK as u64, 2 * CHUNK as u64).unwrap();
    assert_eq!((published, client.map.info().releases_handed_over), (2 * CHUNK as u64, 3));
    client.map.release(0, CHUNK as u64).unwrap();
    client.map.release(3 * CHUNK as u64, (LEN - 3 * CHUNK) as u64).unwrap();
    let mut expected = content(3);
    expected[CHUNK..3 * CHUNK].fill(9);
    assert!(client.load() == expected);
    file.sync_all().unwrap();
    drop(client);
    assert!(read(&file) == expected);
    drop(file);
    let (below, _root) = mount.unmount();
    assert!(std::fs::read(below.join("file")).unwrap() == expected, "on storage");
}

#[test]
fn release_that_cannot_hand_over_copies_its_pages() {
    let Some((_mount, file)) = mounted(None, None) else { return };
    let client = Client::new(&file);
    // Another program has changed other bytes of a page.
    let mut expected = content(5);
    expected[..200].fill(1);
    client.map.acquire(0, LEN as u64, Access::Write).unwrap();
    client.store(0, &expected);
    file.write_all_at(b"cpu", 100).unwrap();
    file.sync_all().unwrap();
    expected[100..103].copy_from_slice(b"cpu");
    client.map.release_handing_over(0, LEN as u64).unwrap();
    assert_eq!((client.map.info().releases_handed_over, client.map.info().pages_merged), (0, 1));
    assert!(read(&file) == expected);
    // A part of a chunk.
    client.map.acquire(0, LEN as u64, Access::Write).unwrap();
    client.store(0, &[8; PAGE]);
    client.map.release_handing_over(0, CHUNK as u64 - 1 - PAGE as u64).unwrap();
    assert_eq!(client.map.info().releases_handed_over, 0);
    assert!(read(&file)[..PAGE] == [8; PAGE]);
}

#[test]
fn bytes_arrive_after_the_server_was_killed() {
    let Some((mount, file)) = mounted(Some(SLOW), None) else { return };
    let client = Client::new(&file);
    for seed in 10..13 {
        let servers = mount.servers();
        assert!(client.release(seed), "{:?}", client.map.info());
        mount.kill_server();
        assert_eq!(mount.servers(), servers + 1);
        if seed == 11 {
            std::thread::sleep(Duration::from_millis(100));
            mount.kill_server();
        }
        assert!(read(&file) == content(seed), "{seed}");
        assert!(client.load() == content(seed), "{seed}");
    }
}

/// The record of the release is another one's by then.
#[test]
fn bytes_arrive_after_many_releases_of_another_file_and_the_death_of_the_server() {
    let Some((mount, file)) = mounted(Some(SLOWEST), None) else { return };
    std::fs::write(mount.dir.join("second"), [1; PAGE]).unwrap();
    let (client, second) = (Client::new(&file), open(&mount.dir.join("second")));
    let small = Map::new(second.as_raw_fd(), 0, PAGE as u64, Access::Write, device()).unwrap();
    assert!(client.release(14), "{:?}", client.map.info());
    for byte in (0..=RECORDS).map(|at| at as u8) {
        small.overwrite(0, PAGE as u64).unwrap();
        // SAFETY: the byte lives until the device was synchronized.
        unsafe { device().copy_in(StreamId(0), DeviceAddr(small.address()), &byte, 1) }.unwrap();
        device().synchronize(StreamId(0), WaitMode::Block).unwrap();
        small.release(0, PAGE as u64).unwrap();
    }
    mount.kill_server();
    assert!(read(&file) == content(14));
    file.sync_all().unwrap();
}

#[test]
fn bytes_arrive_after_the_client_was_killed() {
    let Some((mount, file)) = mounted(Some(SLOW), None) else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "client_role", "--nocapture", "-q"]).env(CLIENT, mount.dir.join("file"));
    let status = command.status().unwrap();
    assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()));
    assert!(read(&file) == content(7));
}

#[test]
fn bytes_arrive_after_the_device_process_was_killed() {
    let Some((mount, file)) = mounted(Some(SLOW), None) else { return };
    let client = Client::new(&file);
    assert!(client.release(20), "{:?}", client.map.info());
    std::thread::sleep(Duration::from_millis(50));
    signal_device_process(&mount, Signal::KILL);
    assert!(read(&file) == content(20));
    assert_eq!(mount.servers(), 1);
}

/// The server has no descriptors for a while, and so cannot start another one.
#[test]
fn bytes_arrive_once_a_device_process_can_be_started() {
    let Some((mount, file)) = mounted(Some(SLOWER), None) else { return };
    let client = Client::new(&file);
    assert!(client.release(21), "{:?}", client.map.info());
    let server = Pid::from_raw(mount.server() as i32);
    let none = Rlimit { current: Some(3), ..getrlimit(Resource::Nofile) };
    let before = prlimit(server, Resource::Nofile, none).unwrap();
    signal_device_process(&mount, Signal::KILL);
    std::thread::sleep(Duration::from_millis(500));
    prlimit(server, Resource::Nofile, before).unwrap();
    assert!(read(&file) == content(21));
    file.sync_all().unwrap();
    assert_eq!(mount.servers(), 1);
}

/// The server has no numbers for the descriptors that come with the message, for a while: what it does without them may wait too.
#[test]
fn release_whose_chunks_the_server_cannot_receive_keeps_its_epoch() {
    let Some((mount, file)) = mounted(None, None) else { return };
    let client = Client::new(&file);
    assert!(client.release(22), "{:?}", client.map.info());
    assert!(read(&file) == content(22));
    client.map.overwrite(0, LEN as u64).unwrap();
    client.store(0, &content(23));
    let server = Pid::from_raw(mount.server() as i32);
    let names = std::fs::read_dir(format!("/proc/{}/fd", mount.server())).unwrap();
    let used: Vec<u64> = names.filter_map(|name| name.unwrap().file_name().to_str()?.parse().ok()).collect();
    // Fewer than there are chunks.
    let left = (0..).filter(|number| !used.contains(number)).nth(2);
    let before = prlimit(server, Resource::Nofile, Rlimit { current: left, ..getrlimit(Resource::Nofile) }).unwrap();
    std::thread::scope(|threads| {
        let released = threads.spawn(|| client.map.release_handing_over(0, LEN as u64));
        std::thread::sleep(Duration::from_millis(500));
        prlimit(server, Resource::Nofile, before).unwrap();
        assert_eq!(released.join().unwrap().unwrap(), LEN as u64);
    });
    assert_eq!((client.map.info().reattached, mount.servers()), (0, 1), "{:?}", client.map.info());
    assert!(read(&file) == content(23));
}

/// With nothing of two chunks on its way, since the device process is stopped.
#[test]
fn pages_that_were_not_handed_over_do_not_wait() {
    let Some((mount, file)) = mounted(Some(SLOWER), None) else { return };
    let (client, other) = (Client::new(&file), Client::new(&file));
    assert!(client.release(50), "{:?}", client.map.info());
    assert!(read(&file) == content(50));
    client.map.acquire(0, LEN as u64, Access::Write).unwrap();
    client.store(CHUNK, &vec![9; 2 * CHUNK]);
    client.map.release_handing_over(CHUNK as u64, 2 * CHUNK as u64).unwrap();
    assert_eq!(client.map.info().releases_handed_over, 2);
    let device_process = signal_device_process(&mount, Signal::STOP);
    let mut expected = content(50);
    std::thread::scope(|threads| {
        let waits = threads.spawn(|| read(&file));
        let mut page = [0; PAGE];
        file.read_exact_at(&mut page, 3 * CHUNK as u64).unwrap();
        assert!(page == expected[3 * CHUNK..][..PAGE]);
        // The epoch of the first chunk goes on, and its release is an ordinary one.
        client.store(0, &[7; PAGE]);
        client.map.release(0, CHUNK as u64).unwrap();
        other.map.acquire(0, CHUNK as u64, Access::Write).unwrap();
        other.store(PAGE, &[6; PAGE]);
        other.map.release(0, CHUNK as u64).unwrap();
        expected[..PAGE].fill(7);
        expected[PAGE..2 * PAGE].fill(6);
        file.read_exact_at(&mut page, PAGE as u64).unwrap();
        assert!(page == [6; PAGE]);
        if waits.is_finished() {
            eprintln!("nothing was on its way any more");
        }
        go_on(device_process);
        drop(waits.join().unwrap());
    });
    expected[CHUNK..3 * CHUNK].fill(9);
    assert!(read(&file) == expected);
    client.map.release(3 * CHUNK as u64, (LEN - 3 * CHUNK) as u64).unwrap();
    file.sync_all().unwrap();
}

/// More requests than the server has threads wait for bytes on their way, since the device process is stopped.
#[test]
fn requests_of_bytes_on_their_way_stop_no_other_file() {
    let Some((mount, file)) = mounted(Some(SLOWER), None) else { return };
    let other = mount.dir.join("other");
    std::fs::write(&other, [5; PAGE]).unwrap();
    let client = Client::new(&file);
    let of_server = || device_process(mount.server());
    let workers = std::thread::available_parallelism().map_or(4, |n| n.get() * 2).clamp(4, 64);
    in_time("requests of another file", |seed| {
        assert!(client.release(seed), "{:?}", client.map.info());
        let Some(device_process) = signal_device_process(&mount, Signal::STOP) else { return false };
        let (shared, expected) = (&file, content(seed));
        std::thread::scope(|threads| {
            let readers: Vec<_> = (0..2 * workers)
                .map(|n| {
                    threads.spawn(move || {
                        let (at, mut page) = (n * (LEN / PAGE / (2 * workers)) * PAGE, [0; PAGE]);
                        shared.read_exact_at(&mut page, at as u64).unwrap();
                        (at, page)
                    })
                })
                .collect();
            let others: [Box<dyn Fn() + Send>; 4] = [
                Box::new(|| shared.sync_all().unwrap()),
                Box::new(|| assert_eq!(rustix::fs::seek(shared, SeekFrom::Hole(0)), Ok(LEN as u64))),
                Box::new(|| {
                    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(shared, punch, LEN as u64, PAGE as u64).unwrap();
                }),
                Box::new(|| shared.set_len(LEN as u64).unwrap()),
            ];
            let others = others.map(|call| threads.spawn(call));
            std::thread::sleep(Duration::from_millis(500));
            with_deadline("requests of another file", || {
                for round in 0..5 {
                    let other = open(&other);
                    other.write_all_at(&[round], 1).unwrap();
                    other.sync_all().unwrap();
                    let mut byte = [0];
                    rustix::io::pread(&other, &mut byte, 1).unwrap();
                    assert_eq!(byte, [round]);
                    std::fs::remove_file(mount.dir.join("made")).err();
                    std::fs::write(mount.dir.join("made"), [round]).unwrap();
                }
            });
            let still_wait = !readers.iter().all(std::thread::ScopedJoinHandle::is_finished);
            let is_in_time = of_server() == Some(device_process) && still_wait;
            go_on(device_process);
            for reader in readers {
                let (at, page) = reader.join().unwrap();
                assert!(page == expected[at..at + PAGE], "{at}");
            }
            others.into_iter().for_each(|other| other.join().unwrap());
            is_in_time
        })
    });
    // Written by a program while they are on their way: later than the release.
    assert!(client.release(71), "{:?}", client.map.info());
    let mut expected = content(71);
    file.write_all_at(&[9; 10], CHUNK as u64).unwrap();
    expected[CHUNK..CHUNK + 10].fill(9);
    file.sync_all().unwrap();
    assert!(read(&file) == expected);
    assert_eq!(std::fs::read(&other).unwrap()[1], 4);
    assert_eq!(mount.servers(), 1);
    drop((client, file));
    mount.unmount();
}

/// The kernel forgets the node while bytes of it are on their way, and does not say so to the next server.
#[test]
fn file_without_a_name_is_gone_once_its_bytes_have_arrived_also_with_the_next_server() {
    for server_dies in [false, true] {
        let Some((mount, file)) = mounted(Some(SLOWER), None) else { return };
        let client = Client::new(&file);
        assert!(client.release(72), "{:?}", client.map.info());
        let stopped = signal_device_process(&mount, Signal::STOP);
        std::fs::remove_file(mount.dir.join("file")).unwrap();
        let has_it = || {
            let fds = std::fs::read_dir(format!("/proc/{}/fd", mount.supervisor())).unwrap();
            let files = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
            files.into_iter().any(|path| path.ends_with("file (deleted)"))
        };
        // It is told, and not waited for.
        eventually("the supervisor keeps it", &has_it);
        drop((client, file));
        // For the FORGET to be there; if it is not, the next server gets it.
        std::thread::sleep(Duration::from_millis(500));
        if server_dies {
            mount.kill_server();
        }
        go_on(stopped);
        eventually("the file is gone", || !has_it());
        assert_eq!(mount.servers(), 1 + u32::from(server_dies));
        mount.unmount();
    }
}

/// Memory for a release comes from another file, although that of a third one is not there yet.
#[test]
fn release_that_lacks_memory_does_not_wait_for_bytes_of_another_file() {
    // One user gets seven eighths: enough for two of the three releases.
    let Some((mount, file)) = mounted(Some(SLOWER), Some(LEN / 4 * 9)) else { return };
    let first = Client::new(&file);
    let of_server = || device_process(mount.server());
    in_time("releases of other files", |round| {
        assert!(first.release(80 + round), "{:?}", first.map.info());
        let Some(device_process) = signal_device_process(&mount, Signal::STOP) else { return false };
        let others = ["second", "third"].map(|name| {
            let path = mount.dir.join(format!("{name}-{round}"));
            std::fs::write(&path, vec![1; LEN]).unwrap();
            let file = open(&path);
            (Client::new(&file), file)
        });
        with_deadline("releases of other files", || {
            for (seed, (client, _)) in (90..).zip(&others) {
                client.map.overwrite(0, LEN as u64).unwrap();
                client.store(0, &content(seed));
                let most = 3 * CHUNK as u64;
                assert_eq!(client.map.release(0, most).unwrap(), most);
            }
        });
        let is_in_time = of_server() == Some(device_process);
        go_on(device_process);
        for (seed, (_, file)) in (90..).zip(&others) {
            assert!(read(file)[..3 * CHUNK] == content(seed)[..3 * CHUNK]);
        }
        assert!(read(&file) == content(80 + round));
        is_in_time
    });
}

/// Once some have arrived, with the device process stopped.
#[test]
fn bytes_that_have_arrived_do_not_wait_for_the_others() {
    let Some((mount, file)) = mounted(Some(SLOWER), None) else { return };
    let client = Client::new(&file);
    assert!(client.release(60), "{:?}", client.map.info());
    let expected = content(60);
    std::thread::scope(|threads| {
        let read_page = |chunk: usize| {
            let (file, expected) = (&file, &expected);
            move || {
                let mut page = [0; PAGE];
                file.read_exact_at(&mut page, (chunk * CHUNK) as u64).unwrap();
                assert!(page == expected[chunk * CHUNK..][..PAGE], "{chunk}");
            }
        };
        let readers: Vec<_> = (0..4).map(|chunk| threads.spawn(read_page(chunk))).collect();
        let arrived = loop {
            if let Some(arrived) = readers.iter().position(std::thread::ScopedJoinHandle::is_finished) {
                break arrived;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let device_process = signal_device_process(&mount, Signal::STOP);
        if readers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            eprintln!("nothing was on its way any more");
        }
        // Not from the page cache: another map, which reads the slots.
        let other = Client::new(&file);
        other.map.acquire((arrived * CHUNK) as u64, CHUNK as u64, Access::Write).unwrap();
        other.map.release((arrived * CHUNK) as u64, CHUNK as u64).unwrap();
        go_on(device_process);
    });
    assert!(read(&file) == expected);
    file.sync_all().unwrap();
    drop(client);
    drop(file);
    let (below, _root) = mount.unmount();
    assert!(std::fs::read(below.join("file")).unwrap() == expected, "on storage");
}

#[test]
fn bytes_arrive_although_one_device_process_after_the_other_dies() {
    const DEATHS: usize = 20;
    let Some((mount, file)) = mounted(Some(SLOWER), None) else { return };
    let client = Client::new(&file);
    assert!(client.release(30), "{:?}", client.map.info());
    std::thread::scope(|threads| {
        let waits = threads.spawn(|| read(&file));
        let mut deaths = 0;
        while deaths < DEATHS && !waits.is_finished() {
            let process = device_process(mount.server());
            deaths += usize::from(process.is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok()));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(waits.join().unwrap() == content(30));
    });
    file.sync_all().unwrap();
    assert_eq!(mount.servers(), 1);
}

#[test]
fn bytes_that_the_device_cannot_give_are_an_error_of_one_fsync() {
    // Its process may write nothing for a while.
    let Some((mount, file)) = mounted_with(Some(SLOWER), None, common::survive_file_limit) else { return };
    let client = Client::new(&file);
    in_time("a limit of the device process", |round| {
        assert!(client.release(30 + round), "{:?}", client.map.info());
        let Some(process) = device_process(mount.server()) else { return false };
        let none = Rlimit { current: Some(0), ..getrlimit(Resource::Fsize) };
        let Ok(before) = prlimit(Some(process), Resource::Fsize, none) else { return false };
        let lost = read(&file);
        let _ = prlimit(Some(process), Resource::Fsize, before);
        // No page has bytes that were in its slot before.
        let expected = content(30 + round);
        assert!((0..LEN).all(|at| lost[at] == 0 || lost[at] == expected[at]));
        lost != expected
    });
    // A server that has lost none reports it too.
    mount.kill_server();
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
    file.sync_all().unwrap();
    assert_eq!(mount.servers(), 2);
    // The next one works.
    assert!(client.release(41), "{:?}", client.map.info());
    assert!(read(&file) == content(41));
}

#[test]
fn release_larger_than_the_memory_for_released_pages_fails_and_the_epoch_goes_on() {
    let Some((_mount, file)) = mounted(None, Some(LEN / 2)) else { return };
    let client = Client::new(&file);
    client.map.overwrite(0, LEN as u64).unwrap();
    client.store(0, &content(40));
    let refused = client.map.release_handing_over(0, LEN as u64).unwrap_err();
    assert_eq!(refused.errno, Errno::NOSPC);
    assert_eq!(client.map.info().releases_handed_over, 0);
    for at in [0, CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK] {
        client.map.release_handing_over(at as u64, CHUNK.min(LEN - at) as u64).unwrap();
    }
    assert_eq!(client.map.info().releases_handed_over, 5);
    assert!(read(&file) == content(40));
}

/// What was promised to it is taken by releases of one message, whose bytes cannot be written for a while.
#[cfg(debug_assertions)]
#[test]
fn release_whose_memory_others_have_taken_waits_until_their_bytes_are_written() {
    let hold = Hold::new();
    let (variable, path) = hold.environment();
    let mounted = mounted_with(None, Some(LEN + LEN / 2), |command| {
        command.env(variable, path);
        common::survive_file_limit(command);
    });
    let Some((mount, file)) = mounted else { return };
    let (page, pages, each) = (PAGE as u64, LEN.div_ceil(PAGE) as u64, 128);
    let other = mount.dir.join("other");
    File::create(&other).unwrap().set_len(2 * pages * page).unwrap();
    let (client, other) = (Client::new(&file), open(&other));
    let mut small = Raw::map(&other, messages::Access::Write, pages, pages).unwrap();
    small.acquire(0, pages, messages::Access::Write);
    small.stage(0, &vec![7; (each * page) as usize]);
    // The device process is there before it could have the limit too.
    assert!(client.release(50), "{:?}", client.map.info());
    file.sync_all().unwrap();
    client.map.overwrite(0, LEN as u64).unwrap();
    client.store(0, &content(51));
    let server = Pid::from_raw(mount.server() as i32);
    let limited = Rlimit { current: Some(pages * page), maximum: None };
    let unlimited = prlimit(server, Resource::Fsize, limited).unwrap();
    std::thread::scope(|threads| {
        hold.arm("server: chunks promised memory");
        let released = threads.spawn(|| client.map.release_handing_over(0, LEN as u64));
        eventually("the server has promised memory", || hold.is_held() || released.is_finished());
        assert!(hold.is_held(), "{:?}", client.map.info());
        let has_room = || {
            let status = spinio_gaiad::status(&mount.dir).unwrap().server;
            status.slots - status.used >= pages
        };
        for (id, first) in (0..pages).step_by(each as usize).enumerate() {
            if has_room() {
                let run = Run { first, count: each.min(pages - first) as u32 };
                assert_eq!(small.release(id as u64 + 1, run, &[run]), Ok(run.count.into()));
            }
        }
        assert!(!has_room(), "it finds too few slots now");
        prlimit(server, Resource::Fsize, unlimited).unwrap();
        hold.let_go();
        assert_eq!(released.join().unwrap().unwrap(), LEN as u64);
    });
    assert_eq!((client.map.info().releases_handed_over, mount.servers()), (2, 1), "{:?}", client.map.info());
    assert!(read(&file) == content(51));
}

/// What a program without the library may send.
#[test]
fn messages_that_name_what_is_not_there_are_refused() {
    let Some((mount, file)) = mounted(None, None) else { return };
    let pages = LEN.div_ceil(PAGE) as u64;
    let mut client = Raw::map(&file, Access::Write, 0, pages).unwrap();
    client.acquire(0, 1024, Access::Write);
    let memfd = |seal: bool| {
        let file = memfd_create("chunk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, CHUNK as u64).unwrap();
        if seal {
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        }
        file
    };
    let (chunk, not_a_chunk) = (memfd(true), memfd(false));
    let good = HandOver {
        id: 1,
        first: 0,
        pages: 1024,
        device: device().uuid().unwrap(),
        chunk: 0,
        chunks: 1,
        chunk_pages: 512,
        last_pages: 512,
    };
    let run = |first, count| Run { first, count };
    let mut send = |part: HandOver, runs: &[Run], fds: &[rustix::fd::BorrowedFd<'_>]| {
        let mut out = Vec::new();
        messages::hand_over(&mut out, part, runs);
        assert!(client.send_with(&out, fds));
        match client.receive() {
            Some(Reply::Committed { pages, .. }) => Ok(pages),
            Some(Reply::Failed { errno }) => Err(Errno::from_raw_os_error(errno as i32)),
            other => panic!("{other:?}"),
        }
    };
    let (invalid, first) = (Err(Errno::INVAL), run(0, 1));
    assert_eq!(send(good, &[first], &[]), invalid, "no descriptor");
    assert_eq!(send(good, &[first], &[chunk.as_fd(), chunk.as_fd()]), invalid, "too many");
    assert_eq!(send(good, &[run(512, 1)], &[chunk.as_fd()]), invalid, "outside of the chunk");
    assert_eq!(send(good, &[run(511, 2)], &[chunk.as_fd()]), invalid, "past its end");
    assert_eq!(send(HandOver { pages: 1, ..good }, &[run(1, 1)], &[chunk.as_fd()]), invalid, "outside of the range");
    assert_eq!(send(HandOver { first: pages, ..good }, &[], &[chunk.as_fd()]), invalid, "outside of the map");
    assert_eq!(send(HandOver { chunk: 1 << 33, ..good }, &[first], &[chunk.as_fd()]), invalid);
    assert_eq!(send(good, &[], &[chunk.as_fd()]), Err(Errno::OPNOTSUPP), "nothing to hand over");
    assert_eq!(send(good, &[first], &[not_a_chunk.as_fd()]), Err(Errno::IO), "not a chunk");
    assert_eq!(send(HandOver { last_pages: 1, ..good }, &[first], &[chunk.as_fd()]), invalid, "of another length");
    let elsewhere = HandOver { device: [9; 16], ..good };
    assert_eq!(send(elsewhere, &[first], &[chunk.as_fd()]), Err(Errno::NODEV), "no such device");
    let closed = HandOver { pages: 2048, chunk: 1024, ..good };
    assert_eq!(send(closed, &[run(1024, 1)], &[chunk.as_fd()]), Err(Errno::AGAIN), "not in the epoch");
    // Nothing of all that has ended the epoch. It stores to the chunk after it was handed over, as it may.
    assert_eq!(send(good, &[run(3, 2)], &[chunk.as_fd()]), Ok(2));
    rustix::io::pwrite(&chunk, &[5; PAGE], 0).unwrap();
    let now = read(&file);
    assert!(now[..3 * PAGE] == vec![1; 3 * PAGE] && now[5 * PAGE..] == vec![1; LEN - 5 * PAGE]);
    assert!(now[3 * PAGE..5 * PAGE] == [0; 2 * PAGE]);
    // Closed now.
    assert_eq!(send(good, &[run(3, 2)], &[chunk.as_fd()]), Err(Errno::AGAIN));
    assert_eq!(mount.servers(), 1);
}
