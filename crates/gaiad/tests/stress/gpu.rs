//! A GPU process: rounds of acquire, kernels, release or discard.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use rustix::io::Errno;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Map};

use crate::board::{Board, Counter};
use crate::common::both::Random;
use crate::layout::{self, CELL_PAGES, KEPT_FROM, LEN, PAGE};
use crate::names;
use crate::worker::Life;

struct Gpu<'a> {
    life: &'a Life,
    board: &'a Board,
    device: &'static Emulated,
    random: Random,
}

pub(crate) fn run(life: &Life, board: &Board, file: &File, at: &Path, random: Random) {
    let device = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
    let mut gpu = Gpu { life, board, device, random };
    let mut round = 0;
    while !board.is_over() {
        let map = gpu.map(file, Access::Write);
        for _ in 0..gpu.random.range(1, 200) {
            if board.is_over() {
                break;
            }
            gpu.round(&map, round);
            round += 1;
        }
        let info = map.info();
        life.count(board, Counter::Recovered, info.releases_recovered);
        life.count(board, Counter::Merged, info.pages_merged);
        life.count(board, Counter::Patched, info.pages_patched);
        drop(map);
        let reader = gpu.map(file, Access::Read);
        gpu.acquire_and_look(&reader, LEN, Access::Read, round);
        drop(reader);
        gpu.file_without_name(at, round);
        assert_eq!(device.resources_in_use().allocations, 0, "device memory is left");
    }
}

impl Gpu<'_> {
    fn map(&self, file: &File, access: Access) -> Map {
        Map::new(file.as_raw_fd(), 0, LEN as u64, access, self.device).unwrap()
    }

    /// Acquires until it succeeds.
    fn acquire(&self, map: &Map, len: usize, access: Access) {
        loop {
            match map.acquire(0, len as u64, access) {
                Ok(_) => return,
                Err(e) if e.errno == Errno::STALE => self.life.count(self.board, Counter::Stale, 1),
                Err(e) => panic!("acquire: {e}"),
            }
        }
    }

    /// Acquires, and compares what came: own cells show exactly the last round that was released.
    fn acquire_and_look(&self, map: &Map, len: usize, access: Access, round: u64) -> Vec<u8> {
        let done = self.board.rounds(Counter::Done);
        self.acquire(map, len, access);
        let bytes = self.load(map, len);
        let own = (self.life.worker, self.life.number);
        let compared = layout::compare(&|at| bytes[at], &done, self.board, Some(own));
        self.life.count(self.board, Counter::Compared, compared);
        for number in 0..CELL_PAGES {
            let shown = bytes[layout::cell(own.0, own.1, number)];
            let wanted = layout::value(own.0, number, round) as u8;
            assert_eq!(shown, wanted, "own cell {number} of {own:?} after round {round}");
        }
        layout::compare_wild(&bytes, 0);
        bytes
    }

    /// A file of its own, which it deletes while it is mapped: released bytes stay until it is closed.
    fn file_without_name(&self, at: &Path, round: u64) {
        let path = at.with_file_name(names::scratch(self.life.worker, self.life.number, round));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.write_all_at(&[1; 2 * PAGE], 0).unwrap();
        let map = Map::new(file.as_raw_fd(), 0, 2 * PAGE as u64, Access::Write, self.device).unwrap();
        for (nth, byte) in [100, 101].into_iter().enumerate() {
            loop {
                self.acquire(&map, 2 * PAGE, Access::Write);
                self.store(&map, PAGE + nth, byte);
                match map.release(0, 2 * PAGE as u64) {
                    Ok(_) => break,
                    Err(e) if e.errno == Errno::STALE => self.life.count(self.board, Counter::Stale, 1),
                    Err(e) => panic!("release: {e}"),
                }
            }
            if nth == 0 {
                std::fs::remove_file(&path).unwrap();
            }
        }
        let mut bytes = [0; 2 * PAGE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let mut wanted = [1; 2 * PAGE];
        wanted[PAGE..PAGE + 2].copy_from_slice(&[100, 101]);
        assert!(bytes == wanted, "a file without a name has lost bytes: {:?}", &bytes[PAGE..PAGE + 4]);
    }

    /// The round after `round`, again until it is released.
    fn round(&mut self, map: &Map, round: u64) {
        let (worker, number) = (self.life.worker, self.life.number);
        let len = self.random.pick(&[KEPT_FROM, 2 * KEPT_FROM, LEN, LEN]);
        loop {
            self.life.count(self.board, Counter::Alive, 1);
            self.acquire_and_look(map, len, Access::Write, round);
            self.life.counter(self.board, Counter::Begun).store(round + 1, SeqCst);
            let touched: Vec<usize> =
                (0..CELL_PAGES).filter(|cell| layout::touches(worker, *cell, round + 1)).collect();
            for (nth, cell) in touched.iter().enumerate() {
                self.store(map, layout::cell(worker, number, *cell), (round + 1) as u8);
                // Others release in the middle of this epoch.
                if nth == 0 && self.random.range(0, 4) == 0 {
                    let lives = self.board.counter(worker, number, Counter::Stale).load(SeqCst);
                    self.acquire(map, len, Access::Write);
                    if self.board.counter(worker, number, Counter::Stale).load(SeqCst) != lives {
                        break;
                    }
                }
            }
            if touched.iter().any(|cell| self.byte(map, layout::cell(worker, number, *cell)) != (round + 1) as u8) {
                // The server died during the second acquire, so the first stores are lost: an epoch without effect
                // would publish the others. Begin again.
                self.abandon(map, len, round, &touched);
                continue;
            }
            if len > KEPT_FROM {
                for _ in 0..self.random.range(0, 6) {
                    let offset = layout::wild_offset(self.random.next(), len);
                    self.store(map, offset, layout::wild(worker, offset));
                }
            }
            // Nothing of it is seen, here neither: the next epoch begins with the last round that was released.
            if self.random.range(0, 8) == 0 {
                map.discard(0, len as u64).unwrap();
                continue;
            }
            match map.release(0, len as u64) {
                Ok(_) => break,
                Err(e) if e.errno == Errno::STALE => self.life.count(self.board, Counter::Stale, 1),
                Err(e) => panic!("release: {e}"),
            }
        }
        self.life.counter(self.board, Counter::Done).store(round + 1, SeqCst);
    }

    /// Sets cells back to what they were, and ends the epoch.
    fn abandon(&self, map: &Map, len: usize, round: u64, touched: &[usize]) {
        let (worker, number) = (self.life.worker, self.life.number);
        for cell in touched {
            self.store(map, layout::cell(worker, number, *cell), layout::value(worker, *cell, round) as u8);
        }
        match map.release(0, len as u64) {
            Err(e) if e.errno != Errno::STALE => panic!("release: {e}"),
            _ => {}
        }
    }

    fn load(&self, map: &Map, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.device.copy_out(StreamId(0), bytes.as_mut_ptr(), DeviceAddr(map.address()), len) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes
    }

    fn byte(&self, map: &Map, offset: usize) -> u8 {
        let page = offset / PAGE * PAGE;
        self.load(map, page + PAGE)[offset]
    }

    fn store(&self, map: &Map, offset: usize, byte: u8) {
        let to = DeviceAddr(map.address() + offset as u64);
        // SAFETY: as above.
        unsafe { self.device.copy_in(StreamId(0), to, &raw const byte, 1) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }
}
