//! Who uses the pins of a held file, and when these may go.
//!
//! ```text
//!   users     enter ── find or add ── use ── leave         any number, as long as it is not closing
//!   whoever   begin_closing                                once; from then on nobody enters
//!   holder                  take ── gives them back ── bare          waits for those inside
//!   watcher                                             └── gone     the lease is back
//!   anybody                                                  await_gone
//! ```
//!
//! It knows nothing of files, so that a model checker can run it (`interleavings.rs`).

use std::sync::{Arc, PoisonError};

use spinio_host::sync::{Condvar, Mutex, lock, yield_now};

struct State<T> {
    active: usize,
    /// Of these, maps: they may stay for long.
    mappings: usize,
    /// How often it was asked for.
    refs: usize,
    closing: bool,
    /// The pins are gone.
    unpinned: bool,
    released: bool,
    pins: Vec<Arc<T>>,
}

/// The users of a held file, and the pins (`T`: those of one device).
pub(super) struct RefGate<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> RefGate<T> {
    /// Asked for once.
    pub(super) fn new() -> RefGate<T> {
        let state = State {
            active: 0,
            mappings: 0,
            refs: 1,
            closing: false,
            unpinned: false,
            released: false,
            pins: Vec::new(),
        };
        RefGate { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// One more user, who has to leave; false if it is too late. From then on the pins stay.
    pub(super) fn acquire(&self) -> bool {
        let mut state = lock(&self.state);
        state.active += usize::from(!state.closing);
        !state.closing
    }

    /// A user goes; `map`: one that had become a map.
    pub(super) fn release(&self, is_mapping: bool) {
        let mut state = lock(&self.state);
        state.active -= 1;
        state.mappings -= usize::from(is_mapping);
        if state.active == 0 {
            self.changed.notify_all();
        }
    }

    /// A user says that it is a map.
    pub(super) fn mark_mapping(&self) {
        lock(&self.state).mappings += 1;
        self.changed.notify_all();
    }

    /// For a user: pins that are there.
    pub(super) fn find(&self, matches: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        lock(&self.state).pins.iter().find(|pins| matches(pins)).map(Arc::clone)
    }

    /// For a user: pins that were made.
    pub(super) fn add(&self, pins: Arc<T>) {
        lock(&self.state).pins.push(pins);
    }

    /// Asked for once more; false if it is too late.
    pub(super) fn add_ref(&self) -> bool {
        let mut state = lock(&self.state);
        state.refs += usize::from(!state.closing);
        !state.closing
    }

    /// Asked for once less: whether nobody asks for it any more, and whether it is mapped.
    pub(super) fn unref(&self) -> (bool, bool) {
        let mut state = lock(&self.state);
        state.refs = state.refs.saturating_sub(1);
        (state.refs == 0, state.mappings > 0)
    }

    /// Whether the pages are wanted back.
    pub(super) fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }

    /// From now on nobody enters; false if that was so already.
    pub(super) fn begin_closing(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).closing, true)
    }

    /// Behind [`Users::begin_closing`]: waits until nobody is inside, and takes the pins out.
    pub(super) fn wait_and_take(&self) -> Vec<T> {
        let mut state = lock(&self.state);
        while state.active > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let pins = std::mem::take(&mut state.pins);
        drop(state);
        pins.into_iter().map(unwrap_last).collect()
    }

    /// The pins were given back.
    pub(super) fn set_unpinned(&self) {
        lock(&self.state).unpinned = true;
    }

    pub(super) fn is_unpinned(&self) -> bool {
        lock(&self.state).unpinned
    }

    /// Nothing is left.
    pub(super) fn set_released(&self) {
        lock(&self.state).released = true;
        self.changed.notify_all();
    }

    pub(super) fn wait_released(&self) {
        let mut state = lock(&self.state);
        while !state.released {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same, but not as long as a map stays; whether it is gone.
    pub(super) fn wait_released_unless_mapped(&self) -> bool {
        let mut state = lock(&self.state);
        while !state.released && state.mappings == 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.released
    }
}

/// The pins themselves: whoever left last may not have dropped his yet.
fn unwrap_last<T>(mut pins: Arc<T>) -> T {
    loop {
        match Arc::try_unwrap(pins) {
            Ok(pins) => return pins,
            Err(shared) => pins = shared,
        }
        yield_now();
    }
}
