//! Shares of a scarce resource, so that one server that does not answer takes only part of it.
//!
//! ```text
//!   16 workers:  server A (hangs)  8     server B (hangs)  4     server C  2     ...  always some for the next one
//! ```
//!
//! A file server may never answer, and until then a thread or a buffer that waits for it is not available. So each file
//! system has a share: it gets another unit only if afterwards it has no more than are left over. A file system that
//! keeps all its units ends at half of all, the next one at half of the rest.

/// The key of a share: a device number, or one of the keys below.
pub type ShareKey = u64;

/// The share of work that waits for no file server.
pub const NO_SERVER: ShareKey = 0;

/// The share of files that are opened by path: their server is not known before, so they have one share together. With
/// a descriptor number of the shadow table added, the share of one such file. No device number has this bit.
pub const OPENED_BY_NAME: ShareKey = 1 << 63;

/// The share of work on several file systems at once. No device number has this bit.
pub const MIXED: ShareKey = 1 << 62;

/// How many units each key has.
#[derive(Debug, Default)]
pub struct Shares(Vec<(ShareKey, usize)>);

impl Shares {
    /// Units of one key.
    pub fn of(&self, key: ShareKey) -> usize {
        self.0.iter().find(|c| c.0 == key).map_or(0, |c| c.1)
    }

    /// Units of all keys.
    pub fn total(&self) -> usize {
        self.0.iter().map(|c| c.1).sum()
    }

    /// How many more units a key may have now, of `size` in total.
    pub fn available(&self, key: ShareKey, size: usize) -> usize {
        let left = size.saturating_sub(self.total());
        (left + 1).saturating_sub(self.of(key)) / 2
    }

    /// Adds units to a key.
    pub fn add(&mut self, key: ShareKey, count: usize) {
        match self.0.iter_mut().find(|c| c.0 == key) {
            Some(entry) => entry.1 += count,
            None if count > 0 => self.0.push((key, count)),
            None => {}
        }
    }

    /// Removes units from a key.
    pub fn remove(&mut self, key: ShareKey, count: usize) {
        let Some(at) = self.0.iter().position(|c| c.0 == key) else { return debug_assert_eq!(count, 0) };
        debug_assert!(self.0[at].1 >= count, "more released than taken");
        self.0[at].1 = self.0[at].1.saturating_sub(count);
        if self.0[at].1 == 0 {
            self.0.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(shares: &mut Shares, key: ShareKey, size: usize) -> usize {
        while shares.available(key, size) > 0 {
            shares.add(key, 1);
        }
        shares.of(key)
    }

    #[test]
    fn one_key_gets_half_and_each_further_key_half_of_the_rest() {
        let mut shares = Shares::default();
        assert_eq!(shares.available(1, 16), 8);
        assert_eq!(fill(&mut shares, 1, 16), 8);
        assert_eq!(fill(&mut shares, 2, 16), 4);
        assert_eq!(fill(&mut shares, 3, 16), 2);
        assert_eq!(fill(&mut shares, 4, 16), 1);
        assert_eq!(shares.total(), 15);
        shares.remove(1, 8);
        assert_eq!((shares.of(1), shares.total()), (0, 7));
        assert_eq!(fill(&mut shares, 4, 16), 5);
    }

    #[test]
    fn two_units_serve_two_keys() {
        let mut shares = Shares::default();
        assert_eq!((fill(&mut shares, 1, 2), fill(&mut shares, 2, 2)), (1, 1));
    }
}
