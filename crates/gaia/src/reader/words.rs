//! The words of a reader in pinned memory, which kernels and the CPU share across the bus.
//!
//! ```text
//!   stop   1: kernels give up                                            written by the program
//!   ring   phase 4 | frame 20 | page 40: a request                       written by kernels
//!   done   ticket + 1: 32 | bytes or -errno: 32, one for each frame      written by fillers
//! ```
//!
//! Each is 8 aligned bytes, stored and loaded whole, with release and acquire. The phase of ring entry t is
//! t / slots % 15 + 1, so an entry of the round before, or none, has another one. A frame has at most one open request
//! and the ring at least as many slots as there are frames, so an entry is never overwritten before it is read.

#![expect(unsafe_code, reason = "words that kernels share")]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use spinio_device::{Device, PinnedBuffer};

use crate::{Error, Result};

/// Words before the ring: the stop word, in lines of its own.
const HEADER: usize = 16;

/// The words; freed when this is dropped.
pub(super) struct Words {
    device: &'static dyn Device,
    memory: PinnedBuffer,
    frames: usize,
}

/// A request of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) page: u64,
    pub(super) frame: u64,
}

impl Words {
    pub(super) fn new(device: &'static dyn Device, frames: u64) -> Result<Words> {
        let frames = frames as usize;
        let len = (HEADER + frames.next_power_of_two() + frames) * 8;
        let memory = device.alloc_pinned(len).map_err(|e| Error::device(e, "allocate pinned memory for a reader"))?;
        let words = Words { device, memory, frames };
        // It may be memory of an earlier reader.
        (0..len / 8).for_each(|at| words.at(at).store(0, Relaxed));
        Ok(words)
    }

    fn at(&self, number: usize) -> &AtomicU64 {
        debug_assert!((number + 1) * 8 <= self.memory.len, "a word outside the memory");
        // SAFETY: in page-aligned memory that lives as long as this, and is accessed as whole words only.
        unsafe { &*self.memory.ptr.cast::<AtomicU64>().add(number) }
    }

    pub(super) fn slots(&self) -> u64 {
        self.frames.next_power_of_two() as u64
    }

    pub(super) fn stop(&self) -> &AtomicU64 {
        self.at(0)
    }

    /// Where kernels see ring, done words and stop word.
    pub(super) fn device_addresses(&self, device: &dyn Device) -> Result<(u64, u64, u64)> {
        let start = device.device_ptr(self.memory.ptr).map_err(|e| Error::device(e, "map pinned memory"))?;
        let ring = start + HEADER as u64 * 8;
        Ok((ring, ring + self.slots() * 8, start))
    }

    /// Request `ticket`, if a kernel has stored it.
    pub(super) fn request(&self, ticket: u64) -> Option<Request> {
        let word = self.at(HEADER + (ticket % self.slots()) as usize).load(Acquire);
        let phase = ticket / self.slots() % 15 + 1;
        (word >> 60 == phase).then_some(Request { frame: word >> 40 & 0xf_ffff, page: word & 0xff_ffff_ffff })
    }

    /// Says that a frame has been filled, or not.
    pub(super) fn finish(&self, ticket: u64, frame: u64, result: i32) {
        let word = (ticket + 1) << 32 | u64::from(result as u32);
        self.at(HEADER + self.slots() as usize + frame as usize).store(word, Release);
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.device.free_pinned(self.memory);
    }
}
