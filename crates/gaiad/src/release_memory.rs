//! Memory for releases: who has how much of it.
//!
//! Where the mount is for all users, one of them gets seven eighths of it at most: others always find the rest, or what they
//! have of it is written out first. Each of their releases waits until it fits into both, or fails.
//!
//! Of a release that comes in parts pages are in slots before the last part is there. It takes what it will need before
//! its first part is copied. So two that do not fit beside each other come one after the other, instead of each waiting
//! for what the other one has. What a commit needs besides, for twins and merged pages, is not known before; if there is
//! none the commit is refused.
//!
//! Known flaws: several users with many connections can keep others waiting until they give up, and a large release can
//! starve beside small ones, which take what is free. Pages that were released before the server was replaced are in no
//! user's share. Pages that a user has released again stay in its share as long as another program's open epoch has the bytes
//! before: one that may write the same file can keep that user's releases out.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use spinio_pagecache::Share;

use crate::files::Files;
use crate::lock::lock;

/// Longer than a client may leave a release of a moderate size unfinished.
const WAIT: Duration = Duration::from_secs(20);
/// Between looks: pages that are written out free slots too.
const LOOK: Duration = Duration::from_millis(100);

/// What users have, and what is promised to releases.
#[derive(Debug)]
pub(crate) struct ReleaseMemory {
    /// Slots of one user.
    most: usize,
    users: Mutex<HashMap<u32, Arc<Share>>>,
    promised: Mutex<Promised>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Promised {
    releases: usize,
    /// Slots that they have not taken yet.
    slots: u64,
    /// Those of each user.
    users: HashMap<u32, u64>,
}

/// The memory of a user.
#[derive(Clone, Debug)]
pub(crate) struct OfUser {
    user: u32,
    share: Arc<Share>,
}

/// Slots for a release, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reserved<'a> {
    memory: &'a ReleaseMemory,
    user: u32,
    left: u64,
}

impl OfUser {
    /// Slots that count as this user's.
    pub(crate) fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Whether a release of so many pages can ever fit.
    pub(crate) fn has_room_for(&self, slots: u64) -> bool {
        slots <= self.share.most() as u64
    }
}

impl ReleaseMemory {
    /// Of so many slots. `shared`: by several users.
    pub(crate) fn new(slots: usize, shared: bool) -> ReleaseMemory {
        let most = if shared { slots - slots / 8 } else { slots };
        ReleaseMemory { most, users: Mutex::default(), promised: Mutex::default(), changed: Condvar::new() }
    }

    /// Slots that one user may have.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// That of a user.
    pub(crate) fn of_user(&self, user: u32) -> OfUser {
        let mut users = lock(&self.users);
        // Those of users who have neither maps nor slots any more.
        users.retain(|_, share| Arc::strong_count(share) > 1);
        let share = users.entry(user).or_insert_with(|| Share::new(self.most)).clone();
        OfUser { user, share }
    }

    /// Slots that each user has, for those who have some.
    pub(crate) fn used(&self) -> Vec<(u32, usize)> {
        let users = lock(&self.users);
        users.iter().map(|(user, share)| (*user, share.used())).filter(|(_, used)| *used > 0).collect()
    }

    /// Reserves slots; waits for other releases that have some.
    ///
    /// # Errors
    /// ENOSPC: there are not so many.
    pub(crate) fn reserve(&self, files: &Files, of: &OfUser, slots: u64) -> Result<Reserved<'_>, Errno> {
        if !of.has_room_for(slots) {
            return Err(Errno::NOSPC);
        }
        let fits = |promised: &Promised| {
            let of_user = promised.users.get(&of.user).copied().unwrap_or_default() + of.share.used() as u64;
            slots + of_user <= of.share.most() as u64 && slots + promised.slots <= files.slots().free_slots() as u64
        };
        let give_up = Instant::now() + WAIT;
        // Each file once: later releases are written out by timer. Those that wait for a lease or a device again and again,
        // between looks: they must not keep a release waiting for which there is memory by then.
        let mut unwritten = None;
        let mut promised = self.lock();
        loop {
            if fits(&promised) {
                promised.releases += 1;
                promised.slots += slots;
                *promised.users.entry(of.user).or_default() += slots;
                return Ok(Reserved { memory: self, user: of.user, left: slots });
            }
            if unwritten.as_ref().is_none_or(|left: &Vec<_>| !left.is_empty()) {
                drop(promised);
                unwritten = Some(files.write_out_ready(unwritten.take().unwrap_or_else(|| files.all())));
                promised = self.lock();
                if fits(&promised) {
                    continue;
                }
            }
            let nothing_comes = promised.releases == 0 && unwritten.as_ref().is_some_and(Vec::is_empty);
            if nothing_comes || Instant::now() > give_up {
                return Err(Errno::NOSPC);
            }
            promised = self.changed.wait_timeout(promised, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Promised> {
        lock(&self.promised)
    }
}

impl Promised {
    fn take(&mut self, user: u32, slots: u64) {
        self.slots -= slots;
        if let Some(of_user) = self.users.get_mut(&user) {
            *of_user -= slots;
            if *of_user == 0 {
                self.users.remove(&user);
            }
        }
    }
}

impl Reserved<'_> {
    /// Slots that are allocated now.
    pub(crate) fn take(&mut self, slots: u64) {
        let slots = slots.min(self.left);
        self.left -= slots;
        self.memory.lock().take(self.user, slots);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let mut promised = self.memory.lock();
        promised.releases -= 1;
        promised.take(self.user, self.left);
        drop(promised);
        self.memory.changed.notify_all();
    }
}
