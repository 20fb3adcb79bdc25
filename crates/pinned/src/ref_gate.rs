//! The uses of a file's pins that are active, and when the pins may be unpinned.
//!
//! ```text
//!   a use           acquire ── find or add ── use ── release         any number, until closing begins
//!   any thread      begin_closing                                    once; from then on acquire fails
//!   the last release        wakes the unpinner, if closing has begun
//!   unpinner                take_unused ── unpins ── set_unpinned            no use is active; it waits for none
//!   lease watcher                                      └── set_released      the lease is released
//!   any thread                                                 wait_released
//! ```
//!
//! It has no knowledge of files, so that a model checker can run it (`interleavings.rs`).

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, PoisonError};

use spinio_host::sync::{AtomicBool, Condvar, Mutex, lock, yield_now};

/// Wakes the unpinner.
pub(crate) struct UnpinSignal {
    /// Gates may be ready that the unpinner has not looked at. No thread allocates or frees with the lock.
    marked: Mutex<bool>,
    changed: Condvar,
}

impl Default for UnpinSignal {
    fn default() -> UnpinSignal {
        UnpinSignal { marked: Mutex::new(false), changed: Condvar::new() }
    }
}

impl UnpinSignal {
    /// A gate may be ready.
    pub(crate) fn send(&self) {
        *lock(&self.marked) = true;
        self.changed.notify_all();
    }

    /// Waits for the next signal.
    pub(crate) fn wait(&self) {
        let mut marked = lock(&self.marked);
        while !std::mem::take(&mut *marked) {
            marked = self.changed.wait(marked).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct State<T> {
    active: usize,
    /// Of these, mappings: they may last long.
    mappings: usize,
    /// Number of times that the file was pinned, less those that it was unpinned.
    refs: usize,
    released: bool,
    pins: Vec<Arc<T>>,
}

/// The uses of a pinned file, and its pins (`T`: those of one device).
pub(crate) struct RefGate<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    unpinner: Arc<UnpinSignal>,
    /// Set without the lock, with which threads allocate: `close` sets it, perhaps in a signal handler that has interrupted
    /// `malloc`. A use that was counted by then keeps the pins, and its release sees this; later ones see it, because the
    /// unpinner takes the lock after it was set.
    closing: AtomicBool,
    /// Read with the lock of the list of files, for which such a handler may wait.
    unpinned: AtomicBool,
}

impl<T> RefGate<T> {
    /// With one reference.
    pub(crate) fn new(unpinner: Arc<UnpinSignal>) -> RefGate<T> {
        let state = State { active: 0, mappings: 0, refs: 1, released: false, pins: Vec::new() };
        RefGate {
            state: Mutex::new(state),
            changed: Condvar::new(),
            unpinner,
            closing: AtomicBool::new(false),
            unpinned: AtomicBool::new(false),
        }
    }

    /// Begins a use, which has to be released; false if closing has begun. Until the release the pins stay.
    pub(crate) fn acquire(&self) -> bool {
        let mut state = lock(&self.state);
        let open = !self.is_closing();
        state.active += usize::from(open);
        open
    }

    /// Ends a use; `is_mapping`: one that was marked as a mapping.
    pub(crate) fn release(&self, is_mapping: bool) {
        let mut state = lock(&self.state);
        state.active -= 1;
        state.mappings -= usize::from(is_mapping);
        let is_ready = state.active == 0 && self.is_closing();
        drop(state);
        if is_ready {
            self.unpinner.send();
        }
    }

    /// Marks an active use as a mapping.
    pub(crate) fn mark_mapping(&self) {
        lock(&self.state).mappings += 1;
        self.changed.notify_all();
    }

    /// Pins that exist. Within a use.
    pub(crate) fn find(&self, matches: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        lock(&self.state).pins.iter().find(|pins| matches(pins)).map(Arc::clone)
    }

    /// Adds pins that were made. Within a use.
    pub(crate) fn add(&self, pins: Arc<T>) {
        lock(&self.state).pins.push(pins);
    }

    /// Adds a reference; false if closing has begun.
    pub(crate) fn add_ref(&self) -> bool {
        let mut state = lock(&self.state);
        let open = !self.is_closing();
        state.refs += usize::from(open);
        open
    }

    /// Drops a reference: whether it was the last.
    pub(crate) fn unref(&self) -> bool {
        let mut state = lock(&self.state);
        state.refs = state.refs.saturating_sub(1);
        state.refs == 0
    }

    /// Whether closing has begun.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Acquire)
    }

    /// No use begins any more, at the latest once [`RefGate::take_unused`] has returned the pins; after the last active
    /// one the unpinner unpins them. Allocates and frees nothing.
    pub(crate) fn begin_closing(&self) {
        if !self.closing.swap(true, AcqRel) {
            self.unpinner.send();
        }
    }

    /// After [`RefGate::begin_closing`]: takes the pins out. `None` while a use is active, whose release wakes the unpinner.
    pub(crate) fn take_unused(&self) -> Option<Vec<T>> {
        let mut state = lock(&self.state);
        let pins = (state.active == 0).then(|| std::mem::take(&mut state.pins));
        drop(state);
        Some(pins?.into_iter().map(unwrap_last).collect())
    }

    /// The pins that were taken out are unpinned.
    pub(crate) fn set_unpinned(&self) {
        self.unpinned.store(true, Release);
    }

    pub(crate) fn is_unpinned(&self) -> bool {
        self.unpinned.load(Acquire)
    }

    /// Nothing is left: neither pins nor a lease.
    pub(crate) fn set_released(&self) {
        lock(&self.state).released = true;
        self.changed.notify_all();
    }

    /// Waits until nothing is left.
    pub(crate) fn wait_released(&self) {
        let mut state = lock(&self.state);
        while !state.released {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same, but also returns while there is a mapping; whether it is released.
    pub(crate) fn wait_released_unless_mapped(&self) -> bool {
        let mut state = lock(&self.state);
        while !state.released && state.mappings == 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.released
    }
}

/// The pins themselves. The last use has been released, but its thread may not have dropped its `Arc` yet.
fn unwrap_last<T>(mut pins: Arc<T>) -> T {
    loop {
        match Arc::try_unwrap(pins) {
            Ok(pins) => return pins,
            Err(shared) => pins = shared,
        }
        yield_now();
    }
}
