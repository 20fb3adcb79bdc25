//! Slots that are read without the lock of their file.
//!
//! ```text
//!   run of slots ──hold──> a fill, a READ ──── copies ──── copies ──> dropped
//!        └────────────── retired, freed ──> put aside ──────────────────> free
//! ```
//!
//! What is held are numbers of slots, so that the run can be divided, written out or replaced meanwhile, and needs no
//! reference for each page. Recovery knows nothing of it: a server that dies has no readers.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::layout::MOST_COUNT;
use crate::page::PageBytes;
use crate::share::Share;
use crate::slots::Slots;

/// Slots that nothing refers to any more, and the share that they count for.
type Freed = (Range<u32>, Option<Arc<Share>>);

/// What is held, by the first slot and a number. No hold is of more than [`MOST_COUNT`] slots.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    holds: BTreeMap<(u32, u64), Hold>,
    last: u64,
}

#[derive(Debug)]
struct Hold {
    end: u32,
    aside: Vec<Freed>,
}

impl Holds {
    pub(crate) fn is_empty(&self) -> bool {
        self.holds.is_empty()
    }

    fn begin(&mut self, slots: Range<u32>) -> u64 {
        self.last += 1;
        self.holds.insert((slots.start, self.last), Hold { end: slots.end, aside: Vec::new() });
        self.last
    }

    /// Ends a hold. What was put aside for it is returned: another one may be of the same slots.
    fn end(&mut self, first: u32, number: u64) -> Vec<Freed> {
        self.holds.remove(&(first, number)).map_or_else(Vec::new, |hold| hold.aside)
    }

    /// Puts slots aside that are held; returns the others.
    pub(crate) fn put_aside(&mut self, slots: Range<u32>, share: Option<&Arc<Share>>) -> Vec<Range<u32>> {
        let (mut free, mut at) = (Vec::new(), slots.start);
        let near = (slots.start.saturating_sub(MOST_COUNT), 0)..(slots.end, 0);
        for ((first, _), hold) in self.holds.range_mut(near) {
            let held = (*first).max(at)..hold.end.min(slots.end);
            if held.is_empty() {
                continue;
            }
            free.push(at..held.start);
            at = held.end;
            hold.aside.push((held, share.cloned()));
        }
        free.push(at..slots.end);
        free.retain(|run| !run.is_empty());
        free
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_free_when_no_hold_is_of_them_any_more() {
        let mut holds = Holds::default();
        assert_eq!(holds.put_aside(0..9, None), [0..9]);
        let (long, short, other) = (holds.begin(10..20), holds.begin(15..17), holds.begin(30..31));
        assert_eq!(holds.put_aside(5..25, None), [5..10, 20..25]);
        let aside = |freed: Vec<Freed>| freed.into_iter().map(|(slots, _)| slots).collect::<Vec<_>>();
        assert_eq!(aside(holds.end(10, long)), [10..20]);
        // Freed again, as by the drop of the hold.
        assert_eq!(holds.put_aside(10..20, None), [10..15, 17..20]);
        assert_eq!(aside(holds.end(15, short)), [15..17]);
        assert_eq!(holds.put_aside(15..17, None), [15..17]);
        assert!(aside(holds.end(30, other)).is_empty() && holds.is_empty());
    }
}
