//! Descriptors whose storage cannot DMA into a device, so that short reads of them are not looked into again.
//!
//! A hint: a number that is another file's by now, by a call without a hook, has its short reads go through the page cache.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_sys::linux::Fd;

use crate::fd_identity::FdIdentity;

/// Numbers with separate entries; others share one, which only costs further looks.
const ENTRIES: usize = 256;

/// The descriptors that are known.
pub struct NoP2pFds {
    /// A number and its count of changes in one word; 0: none.
    entries: [AtomicU64; ENTRIES],
}

impl Default for NoP2pFds {
    fn default() -> NoP2pFds {
        NoP2pFds { entries: [const { AtomicU64::new(0) }; ENTRIES] }
    }
}

impl NoP2pFds {
    /// Whether this number was added, and was not reassigned since.
    pub fn is_known(&self, fd: Fd) -> bool {
        let word = FdIdentity::of(fd).settled_word();
        word.is_some_and(|word| self.entries[fd as usize % ENTRIES].load(Relaxed) == word)
    }

    /// Adds a number.
    pub fn add(&self, fd: Fd) {
        if let Some(word) = FdIdentity::of(fd).settled_word() {
            self.entries[fd as usize % ENTRIES].store(word, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FdChange;
    use crate::fd_identity::TESTS;

    #[test]
    fn number_is_known_until_it_is_reassigned() {
        let _one = spinio_host::lock(&TESTS);
        let fds = NoP2pFds::default();
        assert!(!fds.is_known(50_000));
        fds.add(50_000);
        fds.add(50_001);
        assert!(fds.is_known(50_000) && fds.is_known(50_001));
        assert!(!fds.is_known(50_000 + ENTRIES as Fd), "another number with the same entry");
        drop(FdChange::begin(50_000, 50_000));
        assert!(!fds.is_known(50_000) && fds.is_known(50_001));
    }
}
