//! Memory for releases that come in parts: their pages are in slots before the last part is there.
//!
//! A release takes what it will need before its first part is copied. So two that do not fit beside each other come one
//! after the other, instead of each waiting for what the other one has. What a commit needs besides, for twins and merged
//! pages, is not known before; if there is none the commit is refused.
//!
//! Known flaws: a user with many connections can keep others waiting until they give up, and a large release can starve
//! beside small ones, which take what is free.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::files::Files;

/// Longer than a client may leave a release of a moderate size unfinished.
const WAIT: Duration = Duration::from_secs(20);
/// Between looks: pages that are written out free slots too.
const LOOK: Duration = Duration::from_millis(100);

/// What is promised to releases.
#[derive(Debug, Default)]
pub(crate) struct ReleaseMemory {
    promised: Mutex<Promised>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Promised {
    releases: usize,
    /// Slots that they have not taken yet.
    slots: u64,
}

/// Slots for a release, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reserved<'a> {
    memory: &'a ReleaseMemory,
    left: u64,
}

impl ReleaseMemory {
    /// Reserves slots; waits for other releases that have some.
    ///
    /// # Errors
    /// ENOSPC: there are not so many.
    pub(crate) fn reserve(&self, files: &Files, slots: u64) -> Result<Reserved<'_>, Errno> {
        if slots > files.slots().all_slots() as u64 {
            return Err(Errno::NOSPC);
        }
        let give_up = Instant::now() + WAIT;
        // Each file once: later releases are written out by timer. Those that wait for a lease or a device again and again,
        // between looks: they must not keep a release waiting for which there is memory by then.
        let mut unwritten = None;
        let mut promised = self.lock();
        loop {
            if slots + promised.slots <= files.slots().free_slots() as u64 {
                promised.releases += 1;
                promised.slots += slots;
                return Ok(Reserved { memory: self, left: slots });
            }
            if unwritten.as_ref().is_none_or(|left: &Vec<_>| !left.is_empty()) {
                drop(promised);
                unwritten = Some(files.write_out_ready(unwritten.take().unwrap_or_else(|| files.all())));
                promised = self.lock();
                if slots + promised.slots <= files.slots().free_slots() as u64 {
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
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reserved<'_> {
    /// Slots that are allocated now.
    pub(crate) fn take(&mut self, slots: u64) {
        let slots = slots.min(self.left);
        self.left -= slots;
        self.memory.lock().slots -= slots;
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let mut promised = self.memory.lock();
        promised.releases -= 1;
        promised.slots -= self.left;
        drop(promised);
        self.memory.changed.notify_all();
    }
}
