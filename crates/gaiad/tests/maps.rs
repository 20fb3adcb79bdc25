//! Maps of files of a mount, in memory of the emulated device, with CPU programs and servers that die.

#![expect(unsafe_code, reason = "mappings and device memory")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Map};

use crate::common::TestMount;
use crate::common::both::Random;

const PAGE: usize = 4096;

#[test]
fn server_role() {
    common::server_role();
}

fn device() -> &'static Emulated {
    Emulated::start(Config::parse("size=64M").unwrap()).unwrap()
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn map(file: &File, len: usize, access: Access, device: &'static Emulated) -> Map {
    Map::new(file.as_raw_fd(), 0, len as u64, access, device).unwrap()
}

fn load(device: &Emulated, map: &Map, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let from = DeviceAddr(map.address() + offset as u64);
    // SAFETY: the bytes live until the device was synchronized.
    unsafe { device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, len) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

fn store(device: &Emulated, map: &Map, offset: usize, bytes: &[u8]) {
    let to = DeviceAddr(map.address() + offset as u64);
    // SAFETY: as above.
    unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
}

/// A shared mapping of a file, as a CPU program has it.
struct Mapping(*mut u8, usize);

// SAFETY: each test decides which thread uses which byte.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(file: &File, len: usize) -> Mapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) };
        Mapping(at.unwrap().cast(), len)
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < self.1);
        // SAFETY: inside the mapping.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < self.1);
        // SAFETY: inside the mapping.
        unsafe { self.0.add(at).write_volatile(byte) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), self.1) };
    }
}

fn contents(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 % 251) as u8).collect()
}

fn mount_with(len: usize) -> Option<TestMount> {
    TestMount::new(|dir| std::fs::write(dir.join("file"), contents(len)).unwrap())
}

#[test]
fn released_bytes_reach_existing_mappings_and_cpu_stores_reach_acquire() {
    let Some(mount) = mount_with(3 * PAGE + 100) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let cpu = Mapping::new(&file, 3 * PAGE + 100);
    let gpu = map(&file, 4 * PAGE, Access::Write, device);
    assert_eq!(cpu.get(5), contents(6)[5]);
    assert_eq!(gpu.acquire(0, 4 * PAGE as u64, Access::Write).unwrap(), (3 * PAGE + 100) as u64);
    let mut wanted = contents(3 * PAGE + 100);
    wanted.resize(4 * PAGE, 0);
    assert_eq!(load(device, &gpu, 0, 4 * PAGE), wanted);
    store(device, &gpu, 5, &[200]);
    store(device, &gpu, 3 * PAGE + 99, &[201, 202]);
    assert_eq!(cpu.get(5), contents(6)[5], "not released yet");
    let times = file.metadata().unwrap().modified().unwrap();
    assert_eq!(gpu.release(0, 4 * PAGE as u64).unwrap(), PAGE as u64 + 100);
    assert_eq!((cpu.get(5), cpu.get(3 * PAGE + 99)), (200, 201));
    assert!(file.metadata().unwrap().modified().unwrap() > times);
    assert_eq!(file.metadata().unwrap().len(), 3 * PAGE as u64 + 100);
    // And back: a store through the mapping, and a write.
    cpu.set(6, 203);
    file.write_all_at(&[204], 2 * PAGE as u64).unwrap();
    gpu.acquire(0, 4 * PAGE as u64, Access::Read).unwrap();
    assert_eq!(load(device, &gpu, 5, 2), [200, 203]);
    assert_eq!(load(device, &gpu, 2 * PAGE, 1), [204]);
    assert_eq!(load(device, &gpu, 3 * PAGE + 99, 2), [201, 0]);
    assert_eq!(gpu.stats().unwrap().commits, 1);
    drop((cpu, gpu, file));
    let (dir, _root) = mount.unmount();
    let below = std::fs::read(dir.join("file")).unwrap();
    wanted.truncate(3 * PAGE + 100);
    for (at, byte) in [(5, 200), (6, 203), (2 * PAGE, 204), (3 * PAGE + 99, 201)] {
        wanted[at] = byte;
    }
    assert!(below == wanted);
}

#[test]
fn file_that_was_just_created_can_be_mapped_for_writing() {
    let Some(mount) = mount_with(PAGE) else { return };
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(mount.dir.join("new")).unwrap();
    file.set_len(PAGE as u64).unwrap();
    let device = device();
    let gpu = map(&file, PAGE, Access::Write, device);
    gpu.acquire(0, PAGE as u64, Access::Write).unwrap();
    store(device, &gpu, 7, &[7]);
    gpu.release(0, PAGE as u64).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 7).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn copy_of_a_range_contains_released_bytes() {
    let Some(mount) = mount_with(2 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let gpu = map(&file, 2 * PAGE, Access::Write, device);
    gpu.acquire(0, 2 * PAGE as u64, Access::Write).unwrap();
    store(device, &gpu, 5, &[200]);
    gpu.release(0, 2 * PAGE as u64).unwrap();
    let copy = File::create(mount.dir.join("copy")).unwrap();
    let copied = rustix::fs::copy_file_range(&file, Some(&mut 0), &copy, Some(&mut 0), 2 * PAGE).unwrap();
    assert_eq!(copied, 2 * PAGE);
    let mut wanted = contents(2 * PAGE);
    wanted[5] = 200;
    assert!(std::fs::read(mount.dir.join("copy")).unwrap() == wanted);
    // And into a file that is mapped.
    let from = open(&mount.dir.join("copy"));
    from.write_all_at(&[77], 9).unwrap();
    rustix::fs::copy_file_range(&from, Some(&mut 0), &file, Some(&mut 0), PAGE).unwrap();
    gpu.acquire(0, 2 * PAGE as u64, Access::Read).unwrap();
    assert_eq!(load(device, &gpu, 5, 5), [200, wanted[6], wanted[7], wanted[8], 77]);
}

#[test]
fn false_sharing_keeps_bytes_of_all_writers() {
    let Some(mount) = mount_with(2 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let cpu = Mapping::new(&file, 2 * PAGE);
    let (one, two) = (map(&file, 2 * PAGE, Access::Write, device), map(&file, 2 * PAGE, Access::Write, device));
    let all = 2 * PAGE as u64;
    for round in 0..20u8 {
        one.acquire(0, all, Access::Write).unwrap();
        two.acquire(0, all, Access::Write).unwrap();
        let at = round as usize * 10;
        cpu.set(at, 101 + round);
        store(device, &one, at + 1, &[102 + round]);
        file.write_all_at(&[103 + round], at as u64 + 2).unwrap();
        store(device, &two, at + 3, &[104 + round]);
        one.release(0, all).unwrap();
        cpu.set(at + 4, 105 + round);
        two.release(0, all).unwrap();
        let seen: Vec<u8> = (0..5).map(|n| cpu.get(at + n)).collect();
        assert_eq!(seen, [101 + round, 102 + round, 103 + round, 104 + round, 105 + round], "round {round}");
    }
    assert!(two.info().pages_merged >= 19, "{:?}", two.info());
    one.acquire(0, all, Access::Read).unwrap();
    let mut bytes = vec![0; 2 * PAGE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(load(device, &one, 0, 2 * PAGE), bytes);
}

#[test]
fn acquire_inside_an_epoch_keeps_its_stores() {
    let Some(mount) = mount_with(PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let gpu = map(&file, PAGE, Access::Write, device);
    gpu.acquire(0, PAGE as u64, Access::Write).unwrap();
    store(device, &gpu, 10, &[200]);
    file.write_all_at(&[201], 20).unwrap();
    gpu.acquire(0, PAGE as u64, Access::Write).unwrap();
    assert_eq!((load(device, &gpu, 10, 1), load(device, &gpu, 20, 1)), (vec![200], vec![201]));
    assert_eq!(gpu.info().pages_patched, 1);
    file.write_all_at(&[202], 30).unwrap();
    gpu.release(0, PAGE as u64).unwrap();
    let mut bytes = vec![0; PAGE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!((bytes[10], bytes[20], bytes[30]), (200, 201, 202));
}

#[test]
fn discarded_stores_reach_nobody() {
    let Some(mount) = mount_with(4 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let (cpu, old) = (Mapping::new(&file, 4 * PAGE), contents(4 * PAGE));
    let gpu = map(&file, 4 * PAGE, Access::Write, device);
    let (page, all) = (PAGE as u64, 4 * PAGE as u64);
    gpu.acquire(0, all, Access::Write).unwrap();
    (0..4).for_each(|page| store(device, &gpu, page * PAGE + 1, &[200]));
    cpu.set(2, 201);
    gpu.discard(0, 2 * page).unwrap();
    assert_eq!(gpu.release(0, all).unwrap_err().errno, Errno::INVAL);
    assert_eq!(gpu.release(2 * page, 2 * page).unwrap(), 2 * page);
    assert_eq!([cpu.get(1), cpu.get(PAGE + 1), cpu.get(2 * PAGE + 1)], [old[1], old[PAGE + 1], 200]);
    gpu.acquire(0, all, Access::Write).unwrap();
    assert_eq!(load(device, &gpu, 0, 3), [old[0], old[1], 201]);
    // A store of the same byte after the discard is merged with what the CPU stored.
    store(device, &gpu, 1, &[202]);
    cpu.set(3, 203);
    gpu.release(0, all).unwrap();
    assert_eq!([cpu.get(0), cpu.get(1), cpu.get(2), cpu.get(3)], [old[0], 202, 201, 203]);
    assert_eq!(cpu.get(PAGE + 1), old[PAGE + 1]);
    // Also when the server dies first.
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 1, &[204]);
    mount.kill_server();
    gpu.discard(0, all).unwrap();
    assert_eq!(gpu.acquire(0, all, Access::Write).unwrap(), all);
    assert_eq!(gpu.release(0, all).unwrap(), 0);
    assert_eq!(cpu.get(1), 202);
}

#[test]
fn synced_bytes_are_in_the_file_below() {
    let Some(mount) = mount_with(2 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let all = 2 * PAGE as u64;
    let gpu = map(&file, 2 * PAGE, Access::Write, device);
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 5, &[200]);
    gpu.release(0, PAGE as u64).unwrap();
    store(device, &gpu, PAGE, &[201]);
    // The descriptor that acquire reads with is of the file below the mount.
    let read_only = map(&File::open(mount.dir.join("file")).unwrap(), 2 * PAGE, Access::Read, device);
    gpu.sync(0, 1).unwrap();
    read_only.acquire(0, all, Access::Read).unwrap();
    assert_eq!(load(device, &read_only, 5, 1), [200]);
    assert_eq!(load(device, &read_only, PAGE, 1), contents(PAGE + 1)[PAGE..], "stores that were not released stay");
    assert_eq!((read_only.info().bytes_from_file, read_only.info().bytes_from_snapshots), (all, 0));
    // A map for reading syncs too, also at a server that has just started.
    gpu.release(PAGE as u64, PAGE as u64).unwrap();
    mount.kill_server();
    read_only.sync(0, all).unwrap();
    read_only.advise(0, all, Advice::Sequential).unwrap();
    read_only.advise(0, all, Advice::WillNeed).unwrap();
    read_only.acquire(0, all, Access::Read).unwrap();
    assert_eq!(load(device, &read_only, PAGE, 1), [201]);
    assert_eq!((read_only.info().bytes_from_file, read_only.info().bytes_from_snapshots), (2 * all, 0));
}

#[test]
fn epoch_is_stale_after_the_server_died_and_released_bytes_stay() {
    let Some(mount) = mount_with(4 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let cpu = Mapping::new(&file, 4 * PAGE);
    let gpu = map(&file, 4 * PAGE, Access::Write, device);
    let all = 4 * PAGE as u64;
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 0, &[200]);
    gpu.release(0, all).unwrap();
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 1, &[201]);
    cpu.set(2, 202);
    mount.kill_server();
    assert_eq!(gpu.release(0, all).unwrap_err().errno, Errno::STALE);
    assert_eq!(gpu.acquire(0, all, Access::Write).unwrap(), all);
    assert_eq!(load(device, &gpu, 0, 3), [200, contents(2)[1], 202]);
    store(device, &gpu, 1, &[201]);
    gpu.release(0, all).unwrap();
    assert_eq!([cpu.get(0), cpu.get(1), cpu.get(2)], [200, 201, 202]);
    assert_eq!(gpu.info().reattached, 1);
}

/// Without the process that invalidates, the server ends before the commit; the next one has another process.
#[test]
fn release_without_an_invalidator_is_lost_and_can_be_redone() {
    let Some(mount) = mount_with(PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let cpu = Mapping::new(&file, PAGE);
    let gpu = map(&file, PAGE, Access::Write, device);
    let before = cpu.get(3);
    gpu.acquire(0, PAGE as u64, Access::Write).unwrap();
    store(device, &gpu, 3, &[200]);
    let pid = rustix::process::Pid::from_raw(mount.invalidator() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(gpu.release(0, PAGE as u64).unwrap_err().errno, Errno::STALE);
    assert_eq!((cpu.get(3), mount.servers()), (before, 2));
    gpu.acquire(0, PAGE as u64, Access::Write).unwrap();
    store(device, &gpu, 3, &[201]);
    gpu.release(0, PAGE as u64).unwrap();
    assert_eq!(cpu.get(3), 201);
}

/// More pages are overwritten below an epoch than the server has memory for: it gives the epoch up, not itself.
#[test]
fn epoch_whose_bases_need_too_much_memory_is_stale() {
    const PAGES: usize = 800;
    let Some(mount) = mount_with(PAGES * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let all = (PAGES * PAGE) as u64;
    let gpu = map(&file, PAGES * PAGE, Access::Write, device);
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 5, &[200]);
    let written = vec![100; PAGES * PAGE];
    file.write_all_at(&written, 0).unwrap();
    file.sync_all().unwrap();
    let error = gpu.release(0, all).unwrap_err();
    assert_eq!(error.errno, Errno::STALE, "{error}");
    gpu.acquire(0, all, Access::Write).unwrap();
    assert!(load(device, &gpu, 0, PAGES * PAGE) == written);
    store(device, &gpu, 5, &[200]);
    assert_eq!(gpu.release(0, all).unwrap(), PAGE as u64);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5).unwrap();
    assert_eq!((byte, mount.servers()), ([200], 1));
}

#[test]
fn truncated_bytes_are_zeros_and_extended_files_are_seen() {
    let Some(mount) = mount_with(2 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let gpu = map(&file, 4 * PAGE, Access::Write, device);
    let all = 4 * PAGE as u64;
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 0, &[200; PAGE]);
    store(device, &gpu, 3 * PAGE, &[201]);
    gpu.release(0, all).unwrap();
    file.set_len(100).unwrap();
    file.set_len(2 * PAGE as u64).unwrap();
    assert_eq!(gpu.acquire(0, all, Access::Write).unwrap(), 2 * PAGE as u64);
    let mut wanted = vec![200; 100];
    wanted.resize(4 * PAGE, 0);
    assert_eq!(load(device, &gpu, 0, 4 * PAGE), wanted);
    // Written far behind the end, and dirty in the kernel only.
    file.write_all_at(&[202], all - 1).unwrap();
    assert_eq!(gpu.acquire(0, PAGE as u64, Access::Write).unwrap(), PAGE as u64);
    gpu.acquire(0, all, Access::Write).unwrap();
    store(device, &gpu, 2 * PAGE + 7, &[203]);
    gpu.release(0, all).unwrap();
    let mut bytes = vec![0; 4 * PAGE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    wanted[all as usize - 1] = 202;
    wanted[2 * PAGE + 7] = 203;
    assert!(bytes == wanted);
}

/// The size is what it was at the acquire, but the server has been told of the truncation only.
#[test]
fn store_in_a_page_that_was_cut_off_and_came_back_is_released() {
    let Some(mount) = mount_with(4 * PAGE) else { return };
    let (device, file) = (device(), open(&mount.dir.join("file")));
    let gpu = map(&file, 4 * PAGE, Access::Write, device);
    let all = 4 * PAGE as u64;
    gpu.acquire(0, all, Access::Write).unwrap();
    file.set_len(0).unwrap();
    file.write_all_at(&[202], all - 1).unwrap();
    store(device, &gpu, 2 * PAGE + 7, &[203]);
    assert!(gpu.release(0, all).unwrap() > 0);
    let mut bytes = vec![0; 4 * PAGE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!((bytes[2 * PAGE + 7], bytes[4 * PAGE - 1]), (203, 202));
}

#[test]
fn descriptors_decide_what_a_map_may_do() {
    let Some(mount) = mount_with(PAGE) else { return };
    let device = device();
    let path = mount.dir.join("file");
    let file = File::open(&path).unwrap();
    let refused = |file: &File, access| Map::new(file.as_raw_fd(), 0, 10, access, device).unwrap_err().errno;
    assert_eq!(refused(&file, Access::Write), Errno::ACCESS);
    assert!(Map::new(file.as_raw_fd(), 0, 10, Access::Read, device).is_ok());
    let only = OpenOptions::new().write(true).open(&path).unwrap();
    assert_eq!(refused(&only, Access::Read), Errno::ACCESS);
    assert_eq!(refused(&File::open(&mount.dir).unwrap(), Access::Read), Errno::NOTSUP);
}

/// Counts a thread as working until it ends, however it does.
struct Done<'a>(&'a AtomicU32);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Two maps and a CPU program count in bytes of their own, in pages of all, while servers die. SPINIO_GAIA_ROUNDS makes
/// it longer.
#[test]
fn counters_survive_servers_that_die() {
    const PAGES: usize = 3;
    let rounds = std::env::var("SPINIO_GAIA_ROUNDS").map_or(800, |text| text.parse().unwrap());
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [0; PAGES * PAGE]).unwrap()) else {
        return;
    };
    let path = mount.dir.join("file");
    let all = (PAGES * PAGE) as u64;
    let mut committed = [[0u8; 16]; 3];
    let (mut stale, mut recovered) = (0, 0);
    let working = AtomicU32::new(2);
    {
        let _killer = mount.killer(7, 20..60);
        std::thread::scope(|scope| {
            let gpus: Vec<_> = (0..2)
                .map(|number| {
                    let (path, working) = (&path, &working);
                    scope.spawn(move || {
                        let _done = Done(working);
                        let (device, file) = (device(), open(path));
                        let gpu = map(&file, PAGES * PAGE, Access::Write, device);
                        let mut counts = [0u8; 16];
                        let mut random = Random::new(number as u64 + 1);
                        let mut stale = 0;
                        for _ in 0..rounds {
                            let which = random.range(0, 16) as usize;
                            let at = which * 700 + number;
                            loop {
                                match gpu.acquire(0, all, Access::Write) {
                                    Err(e) if e.errno == Errno::STALE => {
                                        stale += 1;
                                        continue;
                                    }
                                    other => other.unwrap(),
                                };
                                let count = load(device, &gpu, at, 1)[0];
                                assert_eq!(count, counts[which], "writer {number}, counter {which}");
                                store(device, &gpu, at, &[count.wrapping_add(1)]);
                                match gpu.release(0, all) {
                                    Ok(_) => break,
                                    Err(e) if e.errno == Errno::STALE => stale += 1,
                                    Err(e) => panic!("{e}"),
                                }
                            }
                            counts[which] = counts[which].wrapping_add(1);
                        }
                        (counts, stale, gpu.info().releases_recovered)
                    })
                })
                .collect();
            let (path, working) = (&path, &working);
            let cpu = scope.spawn(move || {
                let file = open(path);
                let mapping = Mapping::new(&file, PAGES * PAGE);
                let mut counts = [0u8; 16];
                let mut random = Random::new(99);
                while working.load(SeqCst) > 0 {
                    let which = random.range(0, 16) as usize;
                    let at = which * 700 + 2;
                    let count = mapping.get(at);
                    assert_eq!(count, counts[which], "CPU, counter {which}");
                    counts[which] = count.wrapping_add(1);
                    match random.range(0, 2) {
                        0 => mapping.set(at, counts[which]),
                        _ => file.write_all_at(&[counts[which]], at as u64).unwrap(),
                    }
                    if random.range(0, 8) == 0 {
                        file.sync_all().unwrap();
                    }
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
                counts
            });
            for (number, gpu) in gpus.into_iter().enumerate() {
                let (counts, times, found) = gpu.join().unwrap();
                committed[number] = counts;
                stale += times;
                recovered += found;
            }
            committed[2] = cpu.join().unwrap();
        });
    }
    eprintln!("{} servers, {stale} stale epochs, {recovered} releases recovered", mount.servers());
    let mut bytes = vec![0; PAGES * PAGE];
    open(&path).read_exact_at(&mut bytes, 0).unwrap();
    let (dir, _root) = mount.unmount();
    let below = std::fs::read(dir.join("file")).unwrap();
    assert!(below == bytes);
    for (writer, counts) in committed.iter().enumerate() {
        for (which, count) in counts.iter().enumerate() {
            assert_eq!(bytes[which * 700 + writer], *count, "writer {writer}, counter {which}");
        }
    }
}
