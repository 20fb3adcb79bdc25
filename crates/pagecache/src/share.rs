//! How many slots one user may have: what others can be sure to find.
//!
//! ```text
//!   stage_runs_of(share) ──> run of slots ──> entry of a page ──> another slot for the same page: a merge, a twin
//!        │ counted                │ divided: each part keeps the share                │ counted
//!        └ NoSpace                └──────────── freed: no longer counted ─────────────┘
//! ```
//!
//! A share is that of this server: slots that an earlier one has left are in none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Slots of one user.
#[derive(Debug)]
pub struct Share {
    used: AtomicUsize,
    most: usize,
}

impl Share {
    /// With room for so many.
    pub fn new(most: usize) -> Arc<Share> {
        Arc::new(Share { used: AtomicUsize::new(0), most })
    }

    /// How many there are.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// How many there may be.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Counts some more, if there may be so many.
    pub(crate) fn take(&self, slots: usize) -> bool {
        let fits = |used: usize| used.checked_add(slots).filter(|used| *used <= self.most);
        self.used.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }

    /// These are free.
    pub(crate) fn give_back(&self, slots: usize) {
        self.used.fetch_sub(slots, Relaxed);
    }
}
