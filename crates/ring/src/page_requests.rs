//! Requests of kernels for pages of a file, and the staged bytes that answer them: the words of a reader (`spinio_gaia::reader`).
//!
//! ```text
//!   ring     phase 4 | frame 20 | page 40: a request                              written by kernels
//!   done     ticket + 1: 32 | slot 14 and bytes 17, or -errno: 32, one a frame    written by fillers
//!   taken    ticket + 1: 32, of the request whose bytes are taken, one a slot     written by kernels
//!   given    of each slot, what `taken` says once it is free                      of the fillers alone
//! ```
//!
//! The phase of ring entry t is t / entries % 15 + 1, so an entry of the round before, or none, has another one. A frame has at
//! most one open request and the ring at least as many entries as there are frames, so an entry is never overwritten before
//! it is read.
//!
//! A slot is free if the kernels have taken what it was given for last. The kernel that needs a page copies it from its
//! slot into its frame.

use crate::Word;

/// Of a slot that was never given, in both words: no number of a request.
pub const NEVER: u64 = u64::MAX;
const SLOT_SHIFT: u32 = 17;

/// A request of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// Of the file.
    pub page: u64,
    /// That the page is for.
    pub frame: u64,
}

/// The words, from the side of the fillers.
#[derive(Debug)]
pub struct PageRequests<'a, W> {
    /// A power of two of them.
    pub ring: &'a [W],
    /// One a frame.
    pub done: &'a [W],
    /// One a slot.
    pub taken: &'a [W],
    /// One a slot.
    pub given: &'a [W],
}

impl<W: Word> PageRequests<'_, W> {
    /// The request with this ticket, if a kernel has stored it.
    pub fn request(&self, ticket: u64) -> Option<PageRequest> {
        let entries = self.ring.len() as u64;
        let word = self.ring[(ticket % entries) as usize].load_acquire();
        (word >> 60 == phase(ticket, entries))
            .then_some(PageRequest { frame: word >> 40 & 0xf_ffff, page: word & 0xff_ffff_ffff })
    }

    /// A free slot, for request `ticket`; the search begins after slot `after`. By one thread at a time.
    pub fn take_slot(&self, ticket: u64, after: usize) -> Option<usize> {
        let number = |step: usize| (after + step) % self.taken.len();
        let is_free = |slot: &usize| self.taken[*slot].load_acquire() == self.given[*slot].load_acquire();
        let slot = (1..=self.taken.len()).map(number).find(is_free)?;
        // As kernels have it, from the done word.
        self.given[slot].store_relaxed(u64::from((ticket + 1) as u32));
        Some(slot)
    }

    /// Says that the bytes of a frame's page are in a slot, which is the kernels' now.
    pub fn finish(&self, ticket: u64, frame: u64, slot: usize, bytes: usize) {
        self.answer(ticket, frame, (slot << SLOT_SHIFT | bytes) as u32);
    }

    /// Says that there are no bytes, and why: 0 or a negative errno. The slot is free again.
    pub fn finish_empty(&self, ticket: u64, frame: u64, slot: usize, result: i32) {
        self.free_slot(slot);
        self.answer(ticket, frame, result as u32);
    }

    /// The slot is free again, without an answer.
    pub fn free_slot(&self, slot: usize) {
        // Kernels store there only what they have taken.
        self.given[slot].store_release(self.taken[slot].load_relaxed());
    }

    fn answer(&self, ticket: u64, frame: u64, result: u32) {
        self.done[frame as usize].store_release((ticket + 1) << 32 | u64::from(result));
    }
}

/// The words, from the side of a kernel: as device/include/spinio/gaia does it.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct Kernel<'a, W>(pub(crate) PageRequests<'a, W>);

#[cfg(test)]
impl<W: Word> Kernel<'_, W> {
    /// Stores a request, whose ticket no other kernel has.
    pub(crate) fn ask(&self, ticket: u64, request: PageRequest) {
        let entries = self.0.ring.len() as u64;
        let word = phase(ticket, entries) << 60 | request.frame << 40 | request.page;
        self.0.ring[(ticket % entries) as usize].store_release(word);
    }

    /// The slot and the bytes of the answer, if it is there; an errno or the end of the file without a slot.
    pub(crate) fn answer(&self, ticket: u64, frame: u64) -> Option<Result<(usize, usize), i32>> {
        let word = self.0.done[frame as usize].load_acquire();
        if word >> 32 != u64::from((ticket + 1) as u32) {
            return None;
        }
        let result = word as u32 as i32;
        Some(if result > 0 {
            Ok(((result >> SLOT_SHIFT) as usize, (result & ((1 << SLOT_SHIFT) - 1)) as usize))
        } else {
            Err(result)
        })
    }

    /// The bytes are copied out of the slot.
    pub(crate) fn take(&self, ticket: u64, slot: usize) {
        self.0.taken[slot].store_release(u64::from((ticket + 1) as u32));
    }
}

fn phase(ticket: u64, entries: u64) -> u64 {
    ticket / entries % 15 + 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn words<const N: usize>(value: u64) -> [AtomicU64; N] {
        std::array::from_fn(|_| AtomicU64::new(value))
    }

    #[test]
    fn slots_are_free_again_once_they_are_taken_also_after_four_billion_requests() {
        let (ring, done, taken, given) = (words::<8>(0), words::<8>(0), words::<8>(NEVER), words::<8>(NEVER));
        let requests = || PageRequests { ring: &ring, done: &done, taken: &taken, given: &given };
        let (fillers, kernel) = (requests(), Kernel(requests()));
        let first = u64::from(u32::MAX) - 3;
        let mut last = 0;
        for ticket in first..first + 8 {
            last = fillers.take_slot(ticket, last).unwrap();
            fillers.finish(ticket, 3, last, 4096);
        }
        assert_eq!(fillers.take_slot(first + 8, last), None);
        assert_eq!((kernel.answer(first + 6, 3), kernel.answer(first + 7, 3)), (None, Some(Ok((last, 4096)))));
        kernel.take(first + 7, last);
        assert_eq!(fillers.take_slot(first + 8, last), Some(last));
        fillers.finish_empty(first + 8, 3, last, -5);
        assert_eq!(kernel.answer(first + 8, 3), Some(Err(-5)));
        assert_eq!(fillers.take_slot(first + 9, last), Some(last));
    }

    #[test]
    fn entry_of_another_round_is_no_request() {
        let (ring, done, taken, given) = (words::<2>(0), words::<2>(0), words::<1>(NEVER), words::<1>(NEVER));
        let requests = || PageRequests { ring: &ring, done: &done, taken: &taken, given: &given };
        let (fillers, kernel) = (requests(), Kernel(requests()));
        for ticket in 0..100 {
            assert_eq!(fillers.request(ticket), None);
            let request = PageRequest { page: ticket * 7, frame: ticket % 2 };
            kernel.ask(ticket, request);
            assert_eq!(fillers.request(ticket), Some(request));
        }
    }
}
