//! What only the process that made it drops: a forked child has neither the mappings, nor the threads, nor the device.

#![expect(unsafe_code, reason = "nothing is dropped in a forked child")]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use spinio_sys::linux;

/// A value that a forked child leaves as it is.
pub(crate) struct ProcessOwned<T> {
    value: ManuallyDrop<T>,
    pid: u32,
}

impl<T> ProcessOwned<T> {
    pub(crate) fn new(value: T) -> ProcessOwned<T> {
        ProcessOwned { value: ManuallyDrop::new(value), pid: linux::getpid() }
    }

    /// Whether this process made it, and is not a forked child of that.
    pub(crate) fn is_own_process(&self) -> bool {
        self.pid == linux::getpid()
    }
}

impl<T> Deref for ProcessOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ProcessOwned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if self.is_own_process() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn child_does_not_drop_what_its_parent_does() {
        let value = Arc::new(7);
        let owned = ProcessOwned::new(Arc::clone(&value));
        let child = ProcessOwned { value: ManuallyDrop::new(Arc::clone(&value)), pid: owned.pid + 1 };
        assert!(owned.is_own_process() && !child.is_own_process() && **owned == 7);
        drop((owned, child));
        assert_eq!(Arc::strong_count(&value), 2, "the child's is left");
    }
}
