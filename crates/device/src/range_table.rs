//! The range table: which ranges of addresses belong to which device, looked up without a lock.
//!
//! ```text
//!   slot   version | start | len | owner      even version: stable; odd: being written
//!   find   version, fields, version again: the same and even, or retry
//! ```
//!
//! Seldom more than a few ranges in a fixed table. Most look-ups are for host memory and end at the two bounds that enclose
//! every range ever added. Writers are rare and serialised.
//!
//! Known flaw: a child forked while another thread was writing a slot never finds that slot stable, so it treats the
//! range as host memory; the Linux kernel then refuses it or serves it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence};
use std::sync::{Mutex, PoisonError};

/// The limit of ranges. A look-up goes through those that have been in use at a time.
const SLOTS: usize = 256;
/// The number of retries while a slot is being written.
const MAX_RETRIES: usize = 1000;

/// A range and the number of its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRange {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) owner: u32,
}

impl DeviceRange {
    fn end(&self) -> u64 {
        self.start + self.len
    }
}

#[derive(Debug)]
struct Slot {
    version: AtomicU64,
    start: AtomicU64,
    len: AtomicU64,
    owner: AtomicU64,
}

/// The table.
#[derive(Debug)]
pub(crate) struct RangeTable {
    low: AtomicU64,
    high: AtomicU64,
    used: AtomicUsize,
    slots: [Slot; SLOTS],
    writers: Mutex<()>,
}

impl Slot {
    const fn new() -> Slot {
        Slot { version: AtomicU64::new(0), start: AtomicU64::new(0), len: AtomicU64::new(0), owner: AtomicU64::new(0) }
    }

    /// The contents of the slot; a free slot has length 0.
    fn read(&self) -> Option<DeviceRange> {
        for _ in 0..MAX_RETRIES {
            let before = self.version.load(Acquire);
            let arena = DeviceRange {
                start: self.start.load(Relaxed),
                len: self.len.load(Relaxed),
                owner: self.owner.load(Relaxed) as u32,
            };
            fence(Acquire);
            if before.is_multiple_of(2) && self.version.load(Relaxed) == before {
                return Some(arena);
            }
            core::hint::spin_loop();
        }
        None
    }

    /// For one writer at a time.
    fn write(&self, arena: DeviceRange) {
        let version = self.version.load(Relaxed);
        self.version.store(version | 1, Relaxed);
        fence(Release);
        self.start.store(arena.start, Relaxed);
        self.len.store(arena.len, Relaxed);
        self.owner.store(u64::from(arena.owner), Relaxed);
        self.version.store((version | 1) + 1, Release);
    }
}

impl RangeTable {
    pub(crate) const fn new() -> RangeTable {
        RangeTable {
            low: AtomicU64::new(u64::MAX),
            high: AtomicU64::new(0),
            used: AtomicUsize::new(0),
            slots: [const { Slot::new() }; SLOTS],
            writers: Mutex::new(()),
        }
    }

    /// The range that contains an address.
    pub(crate) fn find(&self, addr: u64) -> Option<DeviceRange> {
        if addr < self.low.load(Relaxed) || addr >= self.high.load(Relaxed) {
            return None;
        }
        let used = self.used.load(Acquire);
        self.slots[..used].iter().filter_map(Slot::read).find(|a| a.start <= addr && addr - a.start < a.len)
    }

    /// Adds a range; false if the table is full. Older entries of the range are removed.
    pub(crate) fn add(&self, arena: DeviceRange) -> bool {
        let _writer = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        if arena.len == 0 || arena.start.checked_add(arena.len).is_none() {
            return false;
        }
        self.split_out(arena.start, arena.end(), &|_| true);
        self.insert(arena)
    }

    /// Removes a range, also a part of an entry, if `owned` accepts its owner.
    pub(crate) fn remove(&self, start: u64, len: u64, is_owner: impl Fn(u32) -> bool) {
        let _writer = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        self.split_out(start, start.saturating_add(len), &is_owner);
    }

    /// Whether any entry contains a byte of the range.
    pub(crate) fn overlaps(&self, start: u64, len: u64) -> bool {
        let end = start.saturating_add(len);
        if end <= self.low.load(Relaxed) || start >= self.high.load(Relaxed) {
            return false;
        }
        let used = self.used.load(Acquire);
        self.slots[..used].iter().filter_map(Slot::read).any(|a| a.len > 0 && a.start < end && start < a.end())
    }

    fn split_out(&self, start: u64, end: u64, is_owner: &dyn Fn(u32) -> bool) {
        for slot in &self.slots[..self.used.load(Relaxed)] {
            let found = |a: &DeviceRange| a.len > 0 && a.start < end && start < a.end() && is_owner(a.owner);
            let Some(arena) = slot.read().filter(found) else { continue };
            let left = DeviceRange { len: start.saturating_sub(arena.start), ..arena };
            let right = DeviceRange { start: end, len: arena.end().saturating_sub(end), ..arena };
            slot.write(if left.len > 0 { left } else { right });
            if left.len > 0 && right.len > 0 {
                // With no free slot, the right part is dropped: it is treated as host memory.
                let _ = self.insert(right);
            }
        }
    }

    fn insert(&self, arena: DeviceRange) -> bool {
        let used = self.used.load(Relaxed);
        let free = self.slots[..used].iter().position(|s| s.read().is_some_and(|a| a.len == 0));
        let at = free.unwrap_or(used);
        let Some(slot) = self.slots.get(at) else { return false };
        slot.write(arena);
        self.used.store(used.max(at + 1), Release);
        self.low.fetch_min(arena.start, Relaxed);
        self.high.fetch_max(arena.end(), Relaxed);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Add(u64, u64, u32),
        Remove(u64, u64, u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0..50u64, 1..12u64, 0..3u32);
        let step = prop_oneof![
            range().prop_map(|(start, len, owner)| Step::Add(start, len, owner)),
            range().prop_map(|(start, len, owner)| Step::Remove(start, len, owner)),
        ];
        prop::collection::vec(step, 0..60)
    }

    proptest! {
        #[test]
        fn address_has_last_owner_added(steps in steps()) {
            let arenas = RangeTable::new();
            let mut model = [None; 64];
            for step in steps {
                match step {
                    Step::Add(start, len, owner) => {
                        let added = arenas.add(DeviceRange { start, len, owner });
                        prop_assert!(added);
                        model[start as usize..(start + len) as usize].fill(Some(owner));
                    }
                    Step::Remove(start, len, owner) => {
                        arenas.remove(start, len, |o| o == owner);
                        for cell in &mut model[start as usize..(start + len) as usize] {
                            *cell = cell.filter(|&o| o != owner);
                        }
                    }
                }
                for (addr, expected) in model.iter().enumerate() {
                    prop_assert_eq!(arenas.find(addr as u64).map(|a| a.owner), *expected);
                    prop_assert_eq!(arenas.overlaps(addr as u64, 1), expected.is_some());
                }
            }
        }
    }

    #[test]
    fn full_table_refuses_and_keeps_entries() {
        let arenas = RangeTable::new();
        for n in 0..SLOTS as u64 {
            assert!(arenas.add(DeviceRange { start: n * 10, len: 5, owner: 1 }));
        }
        assert!(!arenas.add(DeviceRange { start: 10_000, len: 5, owner: 1 }));
        assert_eq!(arenas.find(630).map(|a| a.start), Some(630));
        arenas.remove(0, 5, |_| true);
        assert!(arenas.add(DeviceRange { start: 10_000, len: 5, owner: 1 }));
    }

    #[test]
    fn empty_range_is_not_added() {
        let arenas = RangeTable::new();
        assert!(!arenas.add(DeviceRange { start: 5, len: 0, owner: 1 }));
        assert!(!arenas.add(DeviceRange { start: u64::MAX, len: 2, owner: 1 }));
        assert_eq!(arenas.find(5), None);
    }

    /// A reader must never see half of one entry and half of another.
    #[test]
    fn concurrent_lookup_sees_consistent_entries() {
        let arenas = Arc::new(RangeTable::new());
        let stop = Arc::new(AtomicBool::new(false));
        let hits = Arc::new(AtomicU64::new(0));
        // Each entry's length depends on its owner: a mixture is detected.
        let each = |n: u64| DeviceRange { start: 1000 + 100 * (n % 7), len: 10 + n % 50, owner: (10 + n % 50) as u32 };
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let (arenas, stop, hits) = (Arc::clone(&arenas), Arc::clone(&stop), Arc::clone(&hits));
                std::thread::spawn(move || {
                    while !stop.load(Relaxed) {
                        for addr in (1000..1700).step_by(3) {
                            if let Some(arena) = arenas.find(addr) {
                                assert_eq!(arena.len, u64::from(arena.owner));
                                assert!((arena.start..arena.end()).contains(&addr));
                                assert_eq!(arena.start % 100, 0);
                                hits.fetch_add(1, Relaxed);
                            }
                        }
                    }
                })
            })
            .collect();
        let mut n = 0;
        while n < 20_000 || hits.load(Relaxed) == 0 {
            arenas.add(each(n));
            arenas.remove(each(n.wrapping_mul(31)).start, 60, |_| true);
            n += 1;
        }
        stop.store(true, Relaxed);
        readers.into_iter().for_each(|r| r.join().unwrap());
    }
}
