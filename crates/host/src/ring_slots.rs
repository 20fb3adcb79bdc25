//! The slots of a ring: the numbers by which reads name the files that shadow workers put there.
//!
//! ```text
//!   free ── add: the kernel takes the file ──> in use ── remove: the kernel drops the file ──> free
//!                     └─ refused ──> free                          └─ refused ──> out of use
//! ```

use std::sync::Mutex;

use spinio_sys::Errno;

use crate::lock;

/// Which slots of a ring are free.
#[derive(Debug)]
pub(crate) struct RingSlots {
    free: Mutex<Vec<u32>>,
}

impl RingSlots {
    /// The slots of an empty ring.
    pub(crate) fn new(count: u32) -> RingSlots {
        RingSlots { free: Mutex::new((0..count).rev().collect()) }
    }

    /// Takes a free slot, into which `put` puts a file; `None` if none is free, or the kernel refuses.
    pub(crate) fn add(&self, put: impl FnOnce(u32) -> Result<(), Errno>) -> Option<u32> {
        let slot = lock(&self.free).pop()?;
        let added = put(slot).is_ok();
        if !added {
            lock(&self.free).push(slot);
        }
        added.then_some(slot)
    }

    /// Frees a slot, which `empty` empties. If the kernel refuses, the slot stays out of use: it still has its file, and
    /// must not get reads of another one.
    pub(crate) fn remove(&self, slot: u32, empty: impl FnOnce(u32) -> Result<(), Errno>) {
        if empty(slot).is_ok() {
            lock(&self.free).push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_slot_is_free_and_one_that_keeps_its_file_is_not() {
        let slots = RingSlots::new(2);
        assert_eq!(slots.add(|_| Err(Errno::NOMEM)), None);
        let [first, second] = [(); 2].map(|()| slots.add(|_| Ok(())));
        assert_eq!((first, second, slots.add(|_| Ok(()))), (Some(0), Some(1), None));
        slots.remove(1, |_| Err(Errno::NOMEM));
        slots.remove(0, |_| Ok(()));
        assert_eq!([(); 2].map(|()| slots.add(|_| Ok(()))), [Some(0), None]);
    }
}
