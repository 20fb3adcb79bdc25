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

use spinio_host::sync::{Condvar, Mutex, give_way, lock};

struct State<T> {
    users: usize,
    /// Of these, maps: they may stay for long.
    maps: usize,
    /// How often it was asked for.
    asked: usize,
    closing: bool,
    /// The pins are gone.
    bare: bool,
    gone: bool,
    pins: Vec<Arc<T>>,
}

/// The users of a held file, and the pins (`T`: those of one device).
pub(super) struct Users<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Users<T> {
    /// Asked for once.
    pub(super) fn new() -> Users<T> {
        let state = State { users: 0, maps: 0, asked: 1, closing: false, bare: false, gone: false, pins: Vec::new() };
        Users { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// One more user, who has to leave; false if it is too late. From then on the pins stay.
    pub(super) fn enter(&self) -> bool {
        let mut state = lock(&self.state);
        state.users += usize::from(!state.closing);
        !state.closing
    }

    /// A user goes; `map`: one that had become a map.
    pub(super) fn leave(&self, map: bool) {
        let mut state = lock(&self.state);
        state.users -= 1;
        state.maps -= usize::from(map);
        if state.users == 0 {
            self.changed.notify_all();
        }
    }

    /// A user says that it is a map.
    pub(super) fn become_map(&self) {
        lock(&self.state).maps += 1;
        self.changed.notify_all();
    }

    /// For a user: pins that are there.
    pub(super) fn find(&self, is: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        lock(&self.state).pins.iter().find(|pins| is(pins)).map(Arc::clone)
    }

    /// For a user: pins that were made.
    pub(super) fn add(&self, pins: Arc<T>) {
        lock(&self.state).pins.push(pins);
    }

    /// Asked for once more; false if it is too late.
    pub(super) fn ask(&self) -> bool {
        let mut state = lock(&self.state);
        state.asked += usize::from(!state.closing);
        !state.closing
    }

    /// Asked for once less: whether nobody asks for it any more, and whether it is mapped.
    pub(super) fn ask_less(&self) -> (bool, bool) {
        let mut state = lock(&self.state);
        state.asked = state.asked.saturating_sub(1);
        (state.asked == 0, state.maps > 0)
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
    pub(super) fn take(&self) -> Vec<T> {
        let mut state = lock(&self.state);
        while state.users > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let pins = std::mem::take(&mut state.pins);
        drop(state);
        pins.into_iter().map(alone).collect()
    }

    /// The pins were given back.
    pub(super) fn set_bare(&self) {
        lock(&self.state).bare = true;
    }

    pub(super) fn is_bare(&self) -> bool {
        lock(&self.state).bare
    }

    /// Nothing is left.
    pub(super) fn set_gone(&self) {
        lock(&self.state).gone = true;
        self.changed.notify_all();
    }

    pub(super) fn await_gone(&self) {
        let mut state = lock(&self.state);
        while !state.gone {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same, but not as long as a map stays; whether it is gone.
    pub(super) fn await_gone_unless_mapped(&self) -> bool {
        let mut state = lock(&self.state);
        while !state.gone && state.maps == 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.gone
    }
}

/// The pins themselves: whoever left last may not have dropped his yet.
fn alone<T>(mut pins: Arc<T>) -> T {
    loop {
        match Arc::try_unwrap(pins) {
            Ok(pins) => return pins,
            Err(shared) => pins = shared,
        }
        give_way();
    }
}
