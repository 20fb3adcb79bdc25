//! Which slots are held: those that are freed meanwhile are put aside ([`crate::held_slots`] has who holds them).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::layout::MOST_COUNT;
use crate::share::Share;

/// Slots that nothing refers to any more, and the share that they count for.
pub(crate) type Freed = (Range<u32>, Option<Arc<Share>>);

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

    pub(crate) fn begin(&mut self, slots: Range<u32>) -> u64 {
        self.last += 1;
        self.holds.insert((slots.start, self.last), Hold { end: slots.end, aside: Vec::new() });
        self.last
    }

    /// Ends a hold. What was put aside for it is returned: another one may be of the same slots.
    pub(crate) fn end(&mut self, first: u32, number: u64) -> Vec<Freed> {
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

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[test]
    fn slots_are_free_when_no_hold_is_of_them_any_more() {
        let mut holds = Holds::default();
        assert_eq!(holds.put_aside(0..9, None), slice::from_ref(&(0..9)));
        let (long, short, other) = (holds.begin(10..20), holds.begin(15..17), holds.begin(30..31));
        assert_eq!(holds.put_aside(5..25, None), [5..10, 20..25]);
        let aside = |freed: Vec<Freed>| freed.into_iter().map(|(slots, _)| slots).collect::<Vec<_>>();
        assert_eq!(aside(holds.end(10, long)), slice::from_ref(&(10..20)));
        // Freed again, as by the drop of the hold.
        assert_eq!(holds.put_aside(10..20, None), [10..15, 17..20]);
        assert_eq!(aside(holds.end(15, short)), slice::from_ref(&(15..17)));
        assert_eq!(holds.put_aside(15..17, None), slice::from_ref(&(15..17)));
        assert!(aside(holds.end(30, other)).is_empty() && holds.is_empty());
    }
}
