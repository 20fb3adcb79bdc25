//! The page table's part of the state memory, as `spinio-pagecache` wants it: words, then slots of 4 KiB.
//!
//! Bytes are stored as atomic words too, since the memory is shared; no two threads use one slot at the same time
//! unless both read.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use spinio_pagecache::{PAGE, PageBytes, SlotMemory, words};

use crate::state::StateMemory;

/// Release records. A client that asks whether its release was committed must do so before as many others were.
const RECORDS: u32 = 4096;
/// Words of a slot's bytes.
const PAGE_WORDS: usize = PAGE / 8;

/// Snapshots and CPU twins.
pub(crate) struct PageSlots {
    state: Arc<StateMemory>,
    slots: u32,
    /// The word where the bytes of slot 0 begin.
    bytes: usize,
}

impl PageSlots {
    /// As many slots as the memory has room for.
    pub(crate) fn new(state: Arc<StateMemory>) -> PageSlots {
        let room = state.pages().len();
        let headers = |slots: usize| words(slots as u32, RECORDS).next_multiple_of(PAGE_WORDS);
        let each = PAGE_WORDS + words(1, 0) - words(0, 0);
        let mut slots = (room.saturating_sub(headers(0)) / each).min(u32::MAX as usize);
        while slots > 0 && headers(slots) + slots * PAGE_WORDS > room {
            slots -= 1;
        }
        PageSlots { bytes: headers(slots), slots: slots as u32, state }
    }

    fn words_of(&self, slot: u32) -> &[AtomicU64] {
        let start = self.bytes + slot as usize * PAGE_WORDS;
        &self.state.pages()[start..start + PAGE_WORDS]
    }
}

impl SlotMemory for PageSlots {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn records(&self) -> u32 {
        RECORDS
    }

    fn load(&self, index: usize) -> u64 {
        self.state.pages()[index].load(Acquire)
    }

    fn store(&self, index: usize, value: u64) {
        self.state.pages()[index].store(value, Release);
    }

    fn read(&self, slot: u32, bytes: &mut PageBytes) {
        for (to, from) in bytes.as_chunks_mut().0.iter_mut().zip(self.words_of(slot)) {
            *to = from.load(Relaxed).to_ne_bytes();
        }
    }

    fn write(&self, slot: u32, at: usize, bytes: &[u8]) {
        let words = self.words_of(slot);
        let mut at = at;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (word, within) = (&words[at / 8], at % 8);
            let (part, after) = rest.split_at(rest.len().min(8 - within));
            let mut value = if part.len() == 8 { [0; 8] } else { word.load(Relaxed).to_ne_bytes() };
            value[within..within + part.len()].copy_from_slice(part);
            word.store(u64::from_ne_bytes(value), Relaxed);
            (at, rest) = (at + part.len(), after);
        }
    }
}
