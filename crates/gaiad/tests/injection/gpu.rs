//! GPU programs and a CPU program on the same pages, while the server or the invalidator is killed at a step.
//!
//! Each page has a byte for each writer. A release that returned success is there for all readers, one that failed with
//! ESTALE is not, and of one release all pages are as it says; the CPU program's bytes are there at any time.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;

use crate::Step;
use crate::common::gpu::{Gpu, PAGE};

pub(crate) const PAGES: usize = 6;
/// Bytes of a page.
const BEFORE: usize = 3;
const INSIDE: usize = 1;
const FIRST: usize = 2;
const SECOND: usize = 4;
const DISCARDED: usize = 5;

/// The server is killed before the commit, or after it.
const UNCOMMITTED: [&str; 3] =
    ["server: release staged", "server: release begun", "server: release taken from the kernel"];
const COMMITTED: [&str; 4] =
    ["server: release committed", "server: twins dropped", "server: release invalidated", "server: epoch ended"];

/// The file, its two GPU programs, and what they have released.
pub(crate) struct Programs {
    pub(crate) file: File,
    gpus: [Gpu; 2],
    released: [u8; 2],
    /// Signals before this run.
    fired: u64,
}

/// A byte of each of the first pages.
pub(crate) fn bytes(file: &File, pages: usize, at: usize) -> Vec<u8> {
    let mut all = vec![0; pages * PAGE];
    file.read_exact_at(&mut all, 0).unwrap();
    all.chunks(PAGE).map(|page| page[at]).collect()
}

fn write(file: &File, at: usize, byte: u8) {
    (0..PAGES).for_each(|page| file.write_all_at(&[byte], (page * PAGE + at) as u64).unwrap());
}

fn store(gpu: &Gpu, at: usize, byte: u8) {
    (0..PAGES).for_each(|page| gpu.store(page * PAGE + at, &[byte]));
}

impl Programs {
    /// Connections to the server.
    pub(crate) const MAPS: usize = 2;

    pub(crate) fn new(file: File) -> Programs {
        let gpus = [0, 1].map(|_| Gpu::new(&file, PAGES));
        Programs { file, gpus, released: [0; 2], fired: 0 }
    }

    fn release(&mut self, gpu: usize, at: usize, byte: u8, step: &Step<'_>) {
        let before = step.control.fired();
        let released = self.gpus[gpu].1.release(0, (PAGES * PAGE) as u64);
        let hit = step.control.fired() > before;
        match &released {
            Ok(_) => self.released[gpu] = byte,
            Err(error) => assert_eq!(error.errno, Errno::STALE, "{error}, {step}"),
        }
        assert!(released.is_ok() || step.control.fired() > self.fired, "an epoch is lost, {step}");
        if hit && UNCOMMITTED.contains(&step.point()) {
            assert!(released.is_err(), "it was not committed, {step}");
        }
        if hit && COMMITTED.contains(&step.point()) {
            assert!(released.is_ok(), "it was committed, {step}");
        }
        assert_eq!(bytes(&self.file, PAGES, at), [self.released[gpu]; PAGES], "after the release, {step}");
    }

    pub(crate) fn run(&mut self, step: &Step<'_>) {
        let byte = (step.round % 250 + 1) as u8;
        self.fired = step.control.fired();
        write(&self.file, BEFORE, byte);
        self.gpus[0].acquire();
        assert_eq!(self.gpus[0].load(BEFORE), byte, "{step}");
        // The pages will be merged, and the kernel has them.
        write(&self.file, INSIDE, byte);
        store(&self.gpus[0], FIRST, byte);
        self.release(0, FIRST, byte, step);
        self.gpus[1].acquire();
        let seen = [BEFORE, INSIDE, FIRST].map(|at| self.gpus[1].load((PAGES - 1) * PAGE + at));
        assert_eq!(seen, [byte, byte, self.released[0]], "{step}");
        store(&self.gpus[1], SECOND, byte);
        self.release(1, SECOND, byte, step);
        self.file.sync_all().unwrap();
        self.gpus[0].acquire();
        store(&self.gpus[0], DISCARDED, byte);
        self.gpus[0].1.discard(0, (PAGES * PAGE) as u64).unwrap();
        // A map that begins, and ends without an epoch.
        let third = self.gpus[0].another(&self.file);
        third.acquire();
        assert_eq!(third.load(SECOND), self.released[1], "{step}");
        drop(third);
        self.verify(step, byte);
    }

    /// Releases what is not written out.
    pub(crate) fn leave_released(&mut self, step: &Step<'_>) -> u8 {
        let byte = (step.round % 250 + 1) as u8;
        self.gpus[0].acquire();
        store(&self.gpus[0], FIRST, byte);
        self.gpus[0].release();
        self.released[0] = byte;
        byte
    }

    pub(crate) fn verify_released(&self, byte: u8, step: &Step<'_>) {
        assert_eq!(bytes(&self.file, PAGES, FIRST), [byte; PAGES], "{step}");
    }

    fn verify(&self, step: &Step<'_>, byte: u8) {
        let seen = [BEFORE, INSIDE, FIRST, SECOND, DISCARDED].map(|at| bytes(&self.file, PAGES, at));
        let wanted = [byte, byte, self.released[0], self.released[1], 0].map(|byte| vec![byte; PAGES]);
        assert_eq!(seen, wanted, "{step}");
    }
}
