//! How much of the server clients may use: connections and pages of maps, in all and for each user.
//!
//! A connection costs a thread and a few descriptors, which handlers need too. A page of a map costs 8 bytes of a table
//! once it was acquired, whether or not the file has it. One user gets half at most, so that others find room. The memory for
//! released pages is in release_memory.rs.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) connections: usize,
    pub(crate) pages: u64,
}

impl Limits {
    fn of_user(&self) -> Limits {
        Limits { connections: self.connections.div_ceil(2), pages: self.pages / 2 }
    }
}

/// What is in use.
#[derive(Debug)]
pub(crate) struct Quotas {
    limits: Limits,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    connections: usize,
    pages: u64,
    users: HashMap<u32, (usize, u64)>,
}

/// A connection; it is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted<'a> {
    quotas: &'a Quotas,
    user: u32,
    pages: u64,
    within: bool,
}

impl Quotas {
    pub(crate) fn new(limits: Limits) -> Quotas {
        Quotas { limits, used: Mutex::default() }
    }

    /// Counts a connection; `None`: there are too many of all users.
    pub(crate) fn connect(&self, user: u32) -> Option<Counted<'_>> {
        let mut used = self.lock();
        if used.connections >= self.limits.connections {
            return None;
        }
        used.connections += 1;
        let (connections, _) = used.users.entry(user).or_default();
        *connections += 1;
        let within = *connections <= self.limits.of_user().connections;
        Some(Counted { quotas: self, user, pages: 0, within })
    }

    /// What there is, in all and for one user.
    pub(crate) fn limits(&self) -> [Limits; 2] {
        [self.limits, self.limits.of_user()]
    }

    /// Connections, and pages of their maps.
    pub(crate) fn used(&self) -> (usize, u64) {
        let used = self.lock();
        (used.connections, used.pages)
    }

    /// The same of each user who has some.
    pub(crate) fn users(&self) -> Vec<(u32, (usize, u64))> {
        self.lock().users.iter().map(|(user, has)| (*user, *has)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counted<'_> {
    /// Whether its user has not too many.
    pub(crate) fn is_within(&self) -> bool {
        self.within
    }

    /// Counts the pages of its map; false if they are too many.
    pub(crate) fn map(&mut self, pages: u64) -> bool {
        let limits = self.quotas.limits;
        let mut used = self.quotas.lock();
        let of_user = used.users.get(&self.user).map_or(0, |(_, pages)| *pages);
        if pages > limits.pages - used.pages || pages > limits.of_user().pages.saturating_sub(of_user) {
            return false;
        }
        used.pages += pages;
        if let Some((_, of_user)) = used.users.get_mut(&self.user) {
            *of_user += pages;
        }
        self.pages += pages;
        true
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut used = self.quotas.lock();
        used.connections -= 1;
        used.pages -= self.pages;
        if let Some((connections, pages)) = used.users.get_mut(&self.user) {
            *connections -= 1;
            *pages -= self.pages;
            if *connections == 0 {
                used.users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_leaves_room_for_others() {
        let quotas = Quotas::new(Limits { connections: 4, pages: 100 });
        let mut of_one: Vec<_> = (0..3).map(|_| quotas.connect(1).unwrap()).collect();
        assert_eq!(of_one.iter().map(Counted::is_within).collect::<Vec<_>>(), [true, true, false]);
        assert!(of_one[0].map(50) && !of_one[1].map(1));
        let mut of_two = quotas.connect(2).unwrap();
        assert!(of_two.is_within() && of_two.map(40) && of_two.map(10));
        assert!(quotas.connect(3).is_none());
        of_one.clear();
        assert!(!of_two.map(u64::MAX));
        let mut again = quotas.connect(1).unwrap();
        assert!(again.is_within() && again.map(50));
        drop((of_two, again));
        let used = quotas.lock();
        assert_eq!((used.connections, used.pages, used.users.len()), (0, 0, 0));
    }
}
