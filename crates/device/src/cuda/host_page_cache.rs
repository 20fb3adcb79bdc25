//! The 2 MiB granules of the address space that are known to be host memory.
//!
//! One word per slot, directly mapped: a reader sees a whole entry or another whole entry, so there is no lock and
//! no torn read. Two granules that share a slot evict each other, which costs a driver query.
//! 2 MiB is the granularity of device mappings. Where one granule has both, its entry is dropped at the first
//! fault and the next host read adds it again: slow, and correct.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SHIFT: u32 = 21;
const SLOTS: usize = 8192;

pub(super) struct HostPageCache {
    /// Number of the granule plus one; 0 is empty.
    slots: [AtomicU64; SLOTS],
}

impl HostPageCache {
    pub(super) const fn new() -> HostPageCache {
        HostPageCache { slots: [const { AtomicU64::new(0) }; SLOTS] }
    }

    #[inline(always)]
    fn slot(&self, addr: u64) -> (&AtomicU64, u64) {
        let granule = addr >> SHIFT;
        (&self.slots[granule as usize % SLOTS], granule + 1)
    }

    /// Whether `addr` is known to be host memory.
    #[inline(always)]
    pub(super) fn contains(&self, addr: u64) -> bool {
        let (slot, entry) = self.slot(addr);
        slot.load(Relaxed) == entry
    }

    /// Adds it.
    pub(super) fn insert(&self, addr: u64) {
        let (slot, entry) = self.slot(addr);
        slot.store(entry, Relaxed);
    }

    /// Removes it.
    pub(super) fn remove(&self, addr: u64) {
        let (slot, entry) = self.slot(addr);
        let _ = slot.compare_exchange(entry, 0, Relaxed, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_found_until_removed_or_evicted() {
        static TABLE: HostPageCache = HostPageCache::new();
        let at = 0x7f00_0040_1234;
        assert!(!TABLE.contains(at) && !TABLE.contains(0));
        TABLE.insert(at);
        assert!(TABLE.contains(at & !0x1f_ffff) && TABLE.contains(at | 0x1f_ffff) && !TABLE.contains(at + 0x20_0000));
        let colliding = at + ((SLOTS as u64) << SHIFT);
        assert!(!TABLE.contains(colliding));
        TABLE.remove(colliding);
        assert!(TABLE.contains(at), "forgetting another granule of the slot does not touch it");
        TABLE.insert(colliding);
        assert!(TABLE.contains(colliding) && !TABLE.contains(at));
        TABLE.remove(colliding);
        assert!(!TABLE.contains(colliding));
    }
}
