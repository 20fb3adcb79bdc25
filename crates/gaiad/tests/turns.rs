//! A GPU program and a CPU program take turns on one file while servers die, so that every byte is known at any time.

#![expect(unsafe_code, reason = "mappings and device memory")]

mod common;

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{Advice, FallocateFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice as MapAdvice, Map};

use crate::common::both::{Block, Random, direct};
use crate::common::{TestMount, audit};

const PAGE: usize = 4096;
const PAGES: usize = 4;
const LEN: usize = PAGES * PAGE;

#[test]
fn server_role() {
    common::server_role();
}

/// The file as it must be.
struct Turns {
    file: File,
    /// Open with O_DIRECT.
    direct: File,
    mapping: *mut u8,
    bytes: Vec<u8>,
    random: Random,
    /// What the CPU program has changed in this epoch.
    touched: Vec<Range<usize>>,
}

impl Turns {
    fn offset(&mut self, end: usize) -> usize {
        // Near the begins and ends of pages, and few others.
        let near = self.random.range(0, PAGES as u64 + 1) as usize * PAGE;
        (near + self.random.range(0, 40) as usize).saturating_sub(20).min(end)
    }

    /// One operation of the CPU program.
    fn cpu(&mut self) {
        let value = self.random.range(1, 255) as u8;
        match self.random.range(0, 13) {
            0..3 => {
                let at = self.offset(LEN - 8);
                self.file.write_all_at(&[value; 8], at as u64).unwrap();
                if self.bytes.len() < at + 8 {
                    self.bytes.resize(at + 8, 0);
                }
                self.bytes[at..at + 8].fill(value);
                self.touched.push(at..at + 8);
            }
            3..5 if !self.bytes.is_empty() => {
                let at = self.offset(self.bytes.len() - 1);
                // SAFETY: inside the file, so inside the mapping.
                unsafe { self.mapping.add(at).write_volatile(value) };
                self.bytes[at] = value;
                self.touched.push(at..at + 1);
            }
            5 => {
                let size = self.offset(LEN);
                self.file.set_len(size as u64).unwrap();
                self.touched.push(size..LEN);
                self.bytes.resize(size, 0);
            }
            6 => {
                let at = self.offset(LEN - 1);
                let len = (self.random.range(1, PAGE as u64 + 100) as usize).min(LEN - at);
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&self.file, flags, at as u64, len as u64).unwrap();
                self.touched.push(at..at + len);
                let end = self.bytes.len();
                self.bytes[at.min(end)..(at + len).min(end)].fill(0);
            }
            7 => self.file.sync_all().unwrap(),
            9 => {
                let at = self.random.range(0, PAGES as u64) as usize * PAGE;
                self.direct.write_all_at(&Block([value; PAGE]).0, at as u64).unwrap();
                let end = self.bytes.len().max(at + PAGE);
                self.bytes.resize(end, 0);
                self.bytes[at..at + PAGE].fill(value);
                self.touched.push(at..at + PAGE);
            }
            10 if !self.bytes.is_empty() => {
                let at = self.offset(self.bytes.len() - 1) / PAGE * PAGE;
                let mut block = Block([0; PAGE]);
                let len = self.direct.read_at(&mut block.0, at as u64).unwrap();
                assert_eq!(len, (self.bytes.len() - at).min(PAGE), "size");
                compare("O_DIRECT", &block.0[..len], &self.bytes[at..at + len]);
            }
            11 => {
                let at = self.offset(LEN - 1);
                let len = (self.random.range(1, PAGE as u64 + 100) as usize).min(LEN - at);
                let zero = self.random.range(0, 2) == 0;
                let flags = if zero { FallocateFlags::ZERO_RANGE } else { FallocateFlags::empty() };
                match rustix::fs::fallocate(&self.file, flags, at as u64, len as u64) {
                    // Some file systems have no ZERO_RANGE, as tmpfs.
                    Err(Errno::OPNOTSUPP) => return,
                    result => result.unwrap(),
                }
                let end = self.bytes.len().max(at + len);
                self.bytes.resize(end, 0);
                if zero {
                    self.bytes[at..at + len].fill(0);
                    self.touched.push(at..at + len);
                }
            }
            8 => rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed).unwrap(),
            _ => self.verify("CPU"),
        }
    }

    fn verify(&self, who: &str) {
        let mut seen = vec![0; LEN + 1];
        let len = self.file.read_at(&mut seen, 0).unwrap();
        assert_eq!(len, self.bytes.len(), "{who}: size");
        compare(who, &seen[..len], &self.bytes);
    }
}

fn compare(who: &str, seen: &[u8], wanted: &[u8]) {
    if let Some(at) = (0..wanted.len()).find(|at| seen[*at] != wanted[*at]) {
        panic!("{who}: byte {at:#x} is {} and must be {}", seen[at], wanted[at]);
    }
}

fn load(device: &Emulated, map: &Map) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    // SAFETY: the bytes live until the device was synchronized.
    unsafe { device.copy_out(StreamId(0), bytes.as_mut_ptr(), DeviceAddr(map.address()), LEN) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

fn store(device: &Emulated, map: &Map, at: usize, byte: u8) {
    let to = DeviceAddr(map.address() + at as u64);
    // SAFETY: as above.
    unsafe { device.copy_in(StreamId(0), to, &byte, 1) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
}

/// SPINIO_GAIA_ROUNDS makes it longer, SPINIO_GAIA_SEED begins elsewhere.
#[test]
fn turns_of_cpu_and_gpu_lose_and_invent_no_byte() {
    let setting = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (rounds, seed) = (setting("SPINIO_GAIA_ROUNDS", 300), setting("SPINIO_GAIA_SEED", 1));
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [7; LEN]).unwrap()) else { return };
    let device = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping.
    let mapping = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, protection, MapFlags::SHARED, &file, 0) };
    let gpus = [0, 1].map(|_| Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device).unwrap());
    let mut turns = Turns {
        file,
        direct: direct(&mount.dir.join("file")).unwrap(),
        mapping: mapping.unwrap().cast(),
        bytes: vec![7; LEN],
        random: Random::new(seed),
        touched: Vec::new(),
    };
    let (mut stale, mut released, mut discarded) = (0, 0, 0);
    let killer = mount.killer(seed, 50..300);
    for round in 0..rounds {
        (0..turns.random.range(0, 4)).for_each(|_| turns.cpu());
        let gpu = &gpus[round as usize % 2];
        if turns.random.range(0, 4) == 0 {
            let at = turns.offset(LEN - 1) as u64;
            gpu.advise(at, LEN as u64 - at, MapAdvice::DontNeed).unwrap();
        }
        match gpu.acquire(0, LEN as u64, Access::Write) {
            Ok(inside) => assert_eq!(inside, turns.bytes.len() as u64),
            Err(e) => panic!("no epoch was open: {e}"),
        }
        turns.touched.clear();
        let mut replica = load(device, gpu);
        let mut wanted = turns.bytes.clone();
        wanted.resize(LEN, 0);
        compare("GPU", &replica, &wanted);
        let mut stored = Vec::new();
        for _ in 0..turns.random.range(0, 6) {
            let (at, value) = (turns.offset(LEN - 1), turns.random.range(1, 255) as u8);
            // The value that is there already is no store.
            if replica[at] != value {
                store(device, gpu, at, value);
                replica[at] = value;
                stored.push(at);
            }
            if turns.random.range(0, 3) == 0 {
                turns.cpu();
            }
        }
        if turns.random.range(0, 5) == 0 {
            discarded += 1;
            gpu.discard(0, LEN as u64).unwrap();
            turns.verify("after the discard");
            continue;
        }
        match gpu.release(0, LEN as u64) {
            Ok(_) => {
                released += 1;
                for at in stored {
                    if at >= turns.bytes.len() || replica[at] == wanted[at] {
                        continue;
                    }
                    // Both stored it, in no order: one of the values.
                    let mut now = [replica[at]];
                    if turns.touched.iter().any(|range| range.contains(&at)) {
                        turns.file.read_exact_at(&mut now, at as u64).unwrap();
                        assert!([replica[at], turns.bytes[at]].contains(&now[0]), "byte {at:#x} is {}", now[0]);
                    }
                    turns.bytes[at] = now[0];
                }
            }
            Err(e) if e.errno == Errno::STALE => stale += 1,
            Err(e) => panic!("{e}"),
        }
        turns.verify("after the release");
    }
    drop(killer);
    eprintln!("{} servers, {released} releases, {discarded} discards, {stale} stale epochs", mount.servers());
    drop(gpus);
    // SAFETY: no code uses it any more.
    unsafe { rustix::mm::munmap(turns.mapping.cast(), LEN) }.unwrap();
    let Turns { file, direct, bytes, .. } = turns;
    file.sync_all().unwrap();
    drop((file, direct));
    audit::nothing_is_left(&mount, mount.servers() as usize);
    let (dir, _root) = audit::unmount_and_look(mount);
    assert!(std::fs::read(dir.join("file")).unwrap() == bytes);
}
