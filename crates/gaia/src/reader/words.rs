//! What a reader's kernels and fillers share in pinned memory: words, and the staged bytes of pages.
//!
//! ```text
//!   stop     1: kernels give up                                               written by the program
//!   ring     phase 4 | frame 20 | page 40: a request                          written by kernels
//!   done     ticket + 1: 32 | slot 14 and bytes 17, or -errno: 32, one a frame    written by fillers
//!   taken    ticket + 1: 32, of the request whose bytes are taken, one a slot written by kernels
//!   slots    the bytes of a page each                                         written by fillers
//! ```
//!
//! Each word is 8 aligned bytes, stored and loaded whole, with release and acquire. The phase of ring entry t is
//! t / entries % 15 + 1, so an entry of the round before, or none, has another one. A frame has at most one open request
//! and the ring at least as many entries as there are frames, so an entry is never overwritten before it is read.
//!
//! A slot is free if the kernels have taken what it was given for last. The kernel that needs a page copies it from its
//! slot into its frame.

#![expect(unsafe_code, reason = "memory that kernels share")]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use spinio_device::{Device, PinnedBuffer};

use crate::{Error, Result};

/// Words before the ring: the stop word, in lines of its own.
const HEADER: usize = 16;
/// Pinned memory for staged pages, and how many there are at most: the done word has 14 bits for one.
const STAGED_BYTES: u64 = 16 << 20;
const MAX_SLOTS: u64 = 4096;
const SLOT_SHIFT: u32 = 17;
/// Of a slot that was never given: no number of a request.
const NEVER: u64 = u64::MAX;

/// The words; freed when this is dropped.
pub(super) struct Words {
    device: &'static dyn Device,
    memory: PinnedBuffer,
    frames: usize,
    slots: usize,
    page: usize,
    /// Of each slot, what `taken` says once it is free.
    given: Box<[AtomicU64]>,
}

/// A request of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) page: u64,
    pub(super) frame: u64,
}

/// Where the words are for kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceAddresses {
    pub(super) stop: u64,
    pub(super) ring: u64,
    pub(super) done: u64,
    pub(super) taken: u64,
    pub(super) staged: u64,
}

impl Words {
    pub(super) fn new(device: &'static dyn Device, frames: u64, page: u64) -> Result<Words> {
        let slots = frames.min(STAGED_BYTES / page).min(MAX_SLOTS) as usize;
        let (frames, page) = (frames as usize, page as usize);
        let words = HEADER + frames.next_power_of_two() + frames + slots;
        let len = (words * 8).next_multiple_of(page) + slots * page;
        let memory = device.alloc_pinned(len).map_err(|e| Error::device(e, "allocate pinned memory for a reader"))?;
        let given = (0..slots).map(|_| AtomicU64::new(NEVER)).collect();
        let this = Words { device, memory, frames, slots, page, given };
        // It may be memory of an earlier reader.
        (0..words).for_each(|at| this.at(at).store(0, Relaxed));
        (0..slots).for_each(|slot| this.at(this.first_taken() + slot).store(NEVER, Relaxed));
        Ok(this)
    }

    fn at(&self, number: usize) -> &AtomicU64 {
        debug_assert!((number + 1) * 8 <= self.memory.len, "a word outside the memory");
        // SAFETY: in page-aligned memory that lives as long as this, and is accessed as whole words only.
        unsafe { &*self.memory.ptr.cast::<AtomicU64>().add(number) }
    }

    pub(super) fn entries(&self) -> u64 {
        self.frames.next_power_of_two() as u64
    }

    pub(super) fn stop(&self) -> &AtomicU64 {
        self.at(0)
    }

    fn first_done(&self) -> usize {
        HEADER + self.entries() as usize
    }

    fn first_taken(&self) -> usize {
        self.first_done() + self.frames
    }

    /// Where the slots begin, in bytes.
    fn first_slot(&self) -> usize {
        ((self.first_taken() + self.slots) * 8).next_multiple_of(self.page)
    }

    pub(super) fn device_addresses(&self, device: &dyn Device) -> Result<DeviceAddresses> {
        let stop = device.device_ptr(self.memory.ptr).map_err(|e| Error::device(e, "map pinned memory"))?;
        let word = |number: usize| stop + number as u64 * 8;
        Ok(DeviceAddresses {
            stop,
            ring: word(HEADER),
            done: word(self.first_done()),
            taken: word(self.first_taken()),
            staged: stop + self.first_slot() as u64,
        })
    }

    /// Request `ticket`, if a kernel has stored it.
    pub(super) fn request(&self, ticket: u64) -> Option<Request> {
        let word = self.at(HEADER + (ticket % self.entries()) as usize).load(Acquire);
        let phase = ticket / self.entries() % 15 + 1;
        (word >> 60 == phase).then_some(Request { frame: word >> 40 & 0xf_ffff, page: word & 0xff_ffff_ffff })
    }

    /// A free slot, for request `ticket`; the search begins after slot `after`. By one thread at a time.
    pub(super) fn take_slot(&self, ticket: u64, after: usize) -> Option<usize> {
        let number = |step: usize| (after + step) % self.slots;
        let free = |slot: &usize| self.at(self.first_taken() + slot).load(Acquire) == self.given[*slot].load(Acquire);
        let slot = (1..=self.slots).map(number).find(free)?;
        // As kernels have it, from the done word.
        self.given[slot].store(u64::from((ticket + 1) as u32), Relaxed);
        Some(slot)
    }

    /// The memory of a slot, which the caller has taken.
    pub(super) fn slot(&self, slot: usize) -> *mut u8 {
        debug_assert!(slot < self.slots, "a slot outside the memory");
        // SAFETY: inside the memory.
        unsafe { self.memory.ptr.add(self.first_slot() + slot * self.page) }
    }

    /// Says that the bytes of a frame's page are in a slot, which is the kernels' now.
    pub(super) fn finish(&self, ticket: u64, frame: u64, slot: usize, bytes: usize) {
        self.answer(ticket, frame, (slot << SLOT_SHIFT | bytes) as u32);
    }

    /// Says that there are no bytes, and why: 0 or a negative errno. The slot is free again.
    pub(super) fn finish_empty(&self, ticket: u64, frame: u64, slot: usize, result: i32) {
        self.free_slot(slot);
        self.answer(ticket, frame, result as u32);
    }

    pub(super) fn free_slot(&self, slot: usize) {
        // Kernels store there only what they have taken.
        self.given[slot].store(self.at(self.first_taken() + slot).load(Relaxed), Release);
    }

    fn answer(&self, ticket: u64, frame: u64, result: u32) {
        self.at(self.first_done() + frame as usize).store((ticket + 1) << 32 | u64::from(result), Release);
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.device.free_pinned(self.memory);
    }
}

#[cfg(test)]
mod tests {
    use spinio_device::emulated::{Config, Emulated};

    use super::*;

    #[test]
    fn slots_are_free_again_once_they_are_taken_also_after_four_billion_requests() {
        let device = Emulated::start(Config::parse("size=1M").unwrap()).unwrap();
        let words = Words::new(device, 8, 4096).unwrap();
        let taken = |slot: usize| words.at(words.first_taken() + slot);
        let first = u64::from(u32::MAX) - 3;
        let mut last = 0;
        for ticket in first..first + 8 {
            last = words.take_slot(ticket, last).unwrap();
            words.finish(ticket, 3, last, 4096);
        }
        assert_eq!(words.take_slot(first + 8, last), None);
        // A kernel gives back what the done word says.
        let done = words.at(words.first_done() + 3).load(Relaxed);
        taken(last).store(done >> 32, Release);
        assert_eq!(words.take_slot(first + 8, last), Some(last));
        words.finish_empty(first + 8, 3, last, -5);
        assert_eq!(words.take_slot(first + 9, last), Some(last));
    }
}
