//! The page table's part of the state memory, as `spinio-pagecache` wants it: words, then slots of 4 KiB.
//!
//! Bytes are stored as atomic words too, since the memory is shared; no two threads use one slot at the same time
//! unless both read.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::io::Errno;
use spinio_pagecache::{PAGE, PageBytes, SlotMemory, words};
use spinio_sys::{injection_point, linux};

use crate::state::StateMemory;

/// Release records. A client that asks whether its release was committed must do so before as many others were.
const RECORDS: u32 = 4096;
/// Words of a slot's bytes.
const PAGE_WORDS: usize = PAGE / 8;

/// Snapshots and CPU twins.
#[derive(Debug)]
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
        let each = PAGE_WORDS + words(1, 0) - words(0, 0);
        let mut slots = (room.saturating_sub(words(0, RECORDS)) / each).min(u32::MAX as usize);
        while slots > 0 && headers(slots) + slots * PAGE_WORDS > room {
            slots -= 1;
        }
        PageSlots { bytes: headers(slots), slots: slots as u32, state }
    }

    /// Bytes of the page table's part in which there are so many.
    pub(crate) fn bytes_for(slots: u32) -> usize {
        (headers(slots as usize) + slots as usize * PAGE_WORDS) * 8
    }

    /// Reads whole pages of a file from `offset` into slots side by side that no page refers to, so that no other thread
    /// uses them.
    pub(crate) fn read_from(&self, file: BorrowedFd<'_>, offset: u64, slots: Range<u32>) -> Result<(), Errno> {
        let words =
            &self.state.pages()[self.bytes..][slots.start as usize * PAGE_WORDS..slots.end as usize * PAGE_WORDS];
        let (start, len) = (words.as_ptr().cast_mut().cast::<u8>(), size_of_val(words));
        let mut done = 0;
        while done < len {
            #[expect(unsafe_code, reason = "a read into shared memory")]
            // SAFETY: these bytes are mapped as long as `self`, are atomics, and are this caller's.
            let got =
                unsafe { linux::pread(file.as_raw_fd(), start.wrapping_add(done), len - done, offset + done as u64) };
            match got {
                // The file is as long as its size was sealed.
                Ok(0) => return Err(Errno::PROTO),
                Ok(got) => done += got,
                Err(e) if e == spinio_sys::Errno::INTR => {}
                Err(e) => return Err(Errno::from_raw_os_error(e.raw_os_error())),
            }
        }
        Ok(())
    }

    /// Where the bytes of a slot are in the memory file.
    pub(crate) fn file_offset(&self, slot: u32) -> u64 {
        self.state.pages_offset() + (self.bytes + slot as usize * PAGE_WORDS) as u64 * 8
    }

    /// The slots of bytes of the memory file, of which there may be fewer.
    pub(crate) fn slots_at(&self, bytes: Range<u64>) -> Range<u64> {
        let first = self.file_offset(0);
        let page = PAGE as u64;
        bytes.start.saturating_sub(first) / page..bytes.end.saturating_sub(first).div_ceil(page)
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
        injection_point!("server: page table word stored");
    }

    fn read(&self, slot: u32, bytes: &mut PageBytes) {
        for (to, from) in bytes.as_chunks_mut().0.iter_mut().zip(self.words_of(slot)) {
            *to = from.load(Relaxed).to_ne_bytes();
        }
    }

    fn write(&self, slot: u32, at: usize, bytes: &[u8]) {
        let words = self.words_of(slot);
        // Whole pages mostly: they have whole words only.
        let (before, rest) = bytes.split_at(bytes.len().min(at.next_multiple_of(8) - at));
        let (whole, after) = rest.as_chunks::<8>();
        let first = (at + before.len()) / 8;
        write_part(words, at, before);
        for (word, bytes) in words[first..].iter().zip(whole) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
        write_part(words, (first + whole.len()) * 8, after);
    }
}

/// Words before the bytes of slots.
fn headers(slots: usize) -> usize {
    words(slots as u32, RECORDS).next_multiple_of(PAGE_WORDS)
}

/// Writes some bytes of a word.
fn write_part(words: &[AtomicU64], at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        let (word, within) = (&words[at / 8], at % 8);
        let mut value = word.load(Relaxed).to_ne_bytes();
        value[within..within + bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_ne_bytes(value), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_as_many_slots_as_were_asked_for() {
        for slots in (2048..2200).chain([4096, 70_000]) {
            let state = StateMemory::of(PageSlots::bytes_for(slots));
            assert_eq!(PageSlots::new(Arc::new(state)).slots(), slots);
        }
    }

    #[test]
    fn writes_of_every_start_and_length_are_read_back() {
        let slots = PageSlots::new(Arc::new(StateMemory::small()));
        let (slot, mut expected) = (slots.slots() - 1, [0; PAGE]);
        let mut byte = 0u8;
        for at in (0..20).chain(PAGE - 20..PAGE) {
            for len in (0..20).filter(|len| at + len <= PAGE).chain([PAGE - at]) {
                byte = byte.wrapping_add(1);
                let bytes: Vec<u8> = (0..len).map(|i| byte.wrapping_mul(31) ^ i as u8).collect();
                slots.write(slot, at, &bytes);
                expected[at..at + len].copy_from_slice(&bytes);
                let mut read = [0; PAGE];
                slots.read(slot, &mut read);
                assert!(read == expected, "{len} bytes at {at}");
            }
        }
    }
}
