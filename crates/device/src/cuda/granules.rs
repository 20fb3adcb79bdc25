//! Which 2 MiB granules of the address space are known to be the host's.
//!
//! One word a slot, directly mapped: a reader sees a whole entry or another whole entry, so there is no lock and
//! nothing to tear. Two granules that share a slot push each other out, which costs a question to the driver.
//! 2 MiB is the granularity of device mappings. Where one granule does hold both, its entry is dropped at the first
//! fault and the next host read there makes it again: slow, and right.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SHIFT: u32 = 21;
const SLOTS: usize = 8192;

pub(super) struct Granules {
    /// Number of the granule plus one; 0 is empty.
    slots: [AtomicU64; SLOTS],
}

impl Granules {
    pub(super) const fn new() -> Granules {
        Granules { slots: [const { AtomicU64::new(0) }; SLOTS] }
    }

    #[inline(always)]
    fn slot(&self, addr: u64) -> (&AtomicU64, u64) {
        let granule = addr >> SHIFT;
        (&self.slots[granule as usize % SLOTS], granule + 1)
    }

    /// Whether `addr` is known to be host memory.
    #[inline(always)]
    pub(super) fn is_host(&self, addr: u64) -> bool {
        let (slot, entry) = self.slot(addr);
        slot.load(Relaxed) == entry
    }

    /// Remembers it.
    pub(super) fn remember(&self, addr: u64) {
        let (slot, entry) = self.slot(addr);
        slot.store(entry, Relaxed);
    }

    /// Forgets it.
    pub(super) fn forget(&self, addr: u64) {
        let (slot, entry) = self.slot(addr);
        let _ = slot.compare_exchange(entry, 0, Relaxed, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_granule_is_known_until_it_is_forgotten_or_pushed_out() {
        static TABLE: Granules = Granules::new();
        let at = 0x7f00_0040_1234;
        assert!(!TABLE.is_host(at) && !TABLE.is_host(0));
        TABLE.remember(at);
        assert!(TABLE.is_host(at & !0x1f_ffff) && TABLE.is_host(at | 0x1f_ffff) && !TABLE.is_host(at + 0x20_0000));
        let rival = at + ((SLOTS as u64) << SHIFT);
        assert!(!TABLE.is_host(rival));
        TABLE.forget(rival);
        assert!(TABLE.is_host(at), "forgetting another granule of the slot does not touch it");
        TABLE.remember(rival);
        assert!(TABLE.is_host(rival) && !TABLE.is_host(at));
        TABLE.forget(rival);
        assert!(!TABLE.is_host(rival));
    }
}
