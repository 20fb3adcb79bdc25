//! Slots that are read without the lock of their file.
//!
//! ```text
//!   run of slots ──hold──> a fill, a READ ──── copies ──── copies ──> dropped
//!        └────────────── retired, freed ──> put aside ──────────────────> free
//! ```
//!
//! What is held are numbers of slots, so that the run can be divided, written out or replaced meanwhile, and needs no
//! reference for each page. Recovery knows nothing of it: a server that dies has no readers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::layout::MOST_COUNT;
use crate::page::PageBytes;
use crate::slots::Slots;

/// Keeps the bytes of slots side by side, of pages side by side, until the last clone is dropped.
#[derive(Clone)]
pub struct HeldSlots {
    held: Arc<Held>,
    /// The slot of the first page.
    first: u32,
}

struct Held {
    slots: Arc<Slots>,
    first: u32,
    number: u64,
}

impl HeldSlots {
    /// Of slots that are in use.
    pub(crate) fn new(slots: &Arc<Slots>, indices: Range<u32>) -> HeldSlots {
        debug_assert!(indices.len() <= MOST_COUNT as usize);
        let first = indices.start;
        let number = slots.lock().holds.begin(indices);
        HeldSlots { held: Arc::new(Held { slots: Arc::clone(slots), first, number }), first }
    }

    /// Copies the bytes of a page, counted from the first.
    pub(crate) fn read(&self, at: u64, bytes: &mut PageBytes) {
        self.held.slots.memory.read(self.first + at as u32, bytes);
    }

    /// The first pages are no longer of interest. They stay held.
    pub(crate) fn skip(&mut self, pages: u64) {
        self.first += pages as u32;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let aside = self.slots.lock().holds.end(self.first, self.number);
        aside.into_iter().for_each(|(slots, share)| self.slots.free(slots, share.as_ref()));
    }
}

impl fmt::Debug for HeldSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({}..)", self.first)
    }
}
