//! Shares of a scarce resource, so that one server that does not answer takes only part of it.
//!
//! ```text
//!   16 workers:  server A (hangs)  8     server B (hangs)  4     server C  2     ...  always some for the next one
//! ```
//!
//! A server of files may never answer, and a thread or a buffer that waits for it is gone until then. So each file system
//! has a share: it gets one more only while it then has no more than are left over. A file system that keeps all it gets
//! ends at half of everything, the next one at half of the rest.

/// Which share something takes: a device number, or one of the keys below.
pub type ShareKey = u64;

/// The share of work that waits for no file server.
pub const NO_SERVER: ShareKey = 0;

/// The share of files that are opened by name: their server is unknown before, so they have one share together. With a
/// descriptor number of the shadow table added, the share of one such file. No device number has this bit.
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

    /// How many more units a key may have now, of `size` in all.
    pub fn available(&self, key: ShareKey, size: usize) -> usize {
        let left = size.saturating_sub(self.total());
        (left + 1).saturating_sub(self.of(key)) / 2
    }

    /// A key takes some units.
    pub fn add(&mut self, key: ShareKey, count: usize) {
        match self.0.iter_mut().find(|c| c.0 == key) {
            Some(entry) => entry.1 += count,
            None if count > 0 => self.0.push((key, count)),
            None => {}
        }
    }

    /// A key gives some units back.
    pub fn remove(&mut self, key: ShareKey, count: usize) {
        let Some(at) = self.0.iter().position(|c| c.0 == key) else { return debug_assert_eq!(count, 0) };
        debug_assert!(self.0[at].1 >= count, "more given back than taken");
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
