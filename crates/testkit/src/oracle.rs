//! Which bytes a read concurrent with a writer may have returned.
//!
//! ```text
//!   writer   begin v ── write version v everywhere ── end v
//!   reader           begin ── read ── end
//!
//!   allowed: every version from the last that had ended when the read began
//!            up to the last that had begun when the read ended
//! ```
//!
//! A test file's bytes say which version they are of ([`crate::file::byte`]), so one byte is enough to detect an error.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::file::byte;

/// The versions of a range that one writer writes again and again.
#[derive(Debug, Default)]
pub struct Versions {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Versions {
    /// The file contains version 0.
    pub fn new() -> Versions {
        Versions::default()
    }

    /// Runs a write of the next version, which is given to it.
    pub fn write(&self, write: impl FnOnce(u8)) {
        let version = self.begun.fetch_add(1, SeqCst) + 1;
        write(version as u8);
        self.ended.store(version, SeqCst);
    }

    /// Runs a read; returns its result and the versions that it may have seen.
    pub fn read<T>(&self, read: impl FnOnce() -> T) -> (T, Window) {
        let oldest = self.ended.load(SeqCst);
        let result = read();
        let newest = self.begun.load(SeqCst);
        (result, Window { oldest, newest })
    }

    /// Versions written so far.
    pub fn count(&self) -> u64 {
        self.ended.load(SeqCst)
    }
}

/// The versions a read may have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Written before the read began.
    pub oldest: u64,
    /// Begun before the read ended.
    pub newest: u64,
}

impl Window {
    /// Whether `seen` at a file offset is of an allowed version. With 256 versions or more in the window, all are.
    pub fn allows(&self, offset: u64, seen: u8) -> bool {
        let version = seen.wrapping_sub(byte(offset, 0));
        u64::from(version.wrapping_sub(self.oldest as u8)) <= self.newest - self.oldest
    }

    /// The first byte that no read could have returned; `also` allows more, such as the zeros of a hole.
    pub fn first_wrong(&self, offset: u64, bytes: &[u8], also_allowed: impl Fn(u64, u8) -> bool) -> Option<(u64, u8)> {
        let seen = bytes.iter().enumerate().map(|(n, &b)| (offset + n as u64, b));
        seen.into_iter().find(|&(at, b)| !self.allows(at, b) && !also_allowed(at, b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::bytes;

    #[test]
    fn window_allows_concurrent_versions() {
        let versions = Versions::new();
        for _ in 0..300 {
            versions.write(|_| ());
        }
        let ((), window) = versions.read(|| versions.write(|_| ()));
        assert_eq!(window, Window { oldest: 300, newest: 301 });
        let first_wrong = |version: u64| window.first_wrong(7, &bytes(7, 100, version as u8), |_, _| false);
        assert_eq!(first_wrong(300), None);
        assert_eq!(first_wrong(301), None);
        assert!(first_wrong(299).is_some_and(|(at, _)| at == 7));
        assert!(first_wrong(302).is_some());
    }
}
