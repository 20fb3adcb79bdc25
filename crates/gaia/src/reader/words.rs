//! What a reader's kernels and fillers share in pinned memory: words, and the staged bytes of pages.
//!
//! ```text
//!   stop                      1: kernels give up                              written by the program
//!   ring, done, taken         requests and answers                            spinio_ring::page_requests
//!   slots                     the bytes of a page each                        written by fillers
//! ```
//!
//! Each word is 8 aligned bytes, stored and loaded whole, with release and acquire.

#![expect(unsafe_code, reason = "memory that kernels share")]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::{Device, PinnedBuffer};
use spinio_ring::page_requests::{NEVER, PageRequests};

use crate::{Error, Result};

/// Words before the ring: the stop word, in lines of its own.
const HEADER: usize = 16;
/// Pinned memory for staged pages, and how many there are at most: the done word has 14 bits for one.
const STAGED_BYTES: u64 = 16 << 20;
const MAX_SLOTS: u64 = 4096;

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

    /// Requests and answers.
    pub(super) fn requests(&self) -> PageRequests<'_, AtomicU64> {
        let words = |first, len| {
            debug_assert!((first + len) * 8 <= self.memory.len, "words outside the memory");
            // SAFETY: in page-aligned memory that lives as long as this, and is accessed as whole words only.
            unsafe { core::slice::from_raw_parts(self.memory.ptr.cast::<AtomicU64>().add(first), len) }
        };
        PageRequests {
            ring: words(HEADER, self.entries() as usize),
            done: words(self.first_done(), self.frames),
            taken: words(self.first_taken(), self.slots),
            given: &self.given,
        }
    }

    /// The memory of a slot, which the caller has taken.
    pub(super) fn slot(&self, slot: usize) -> *mut u8 {
        debug_assert!(slot < self.slots, "a slot outside the memory");
        // SAFETY: inside the memory.
        unsafe { self.memory.ptr.add(self.first_slot() + slot * self.page) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.device.free_pinned(self.memory);
    }
}
