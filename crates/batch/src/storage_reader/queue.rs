//! Groups of reads on their way between the caller and the shadow workers that read them.
//!
//! ```text
//!   caller ── push ──> ready ── take ──> shadow worker ── complete ──> completed ── next_completed ──> caller
//! ```

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spinio_host::lock;

/// How long a shadow worker without work waits for the next group.
const IDLE_WAIT: Duration = Duration::from_millis(1);

/// A group that a shadow worker reads.
pub(super) struct GroupInFlight {
    pub(super) group: usize,
    pub(super) base: u64,
    /// Bytes read, for each read.
    pub(super) got: Vec<u32>,
    /// Storage may still write its buffer.
    pub(super) dma_unresolved: bool,
    pub(super) started: Instant,
}

#[derive(Default)]
struct State {
    ready: VecDeque<GroupInFlight>,
    completed: VecDeque<GroupInFlight>,
    /// Shadow workers that were woken and have not left.
    workers: usize,
    /// The caller is submitting the first groups, as many as fill a ring.
    filling: bool,
    closed: bool,
}

/// Groups in flight.
#[derive(Default)]
pub(super) struct GroupQueue {
    state: Mutex<State>,
    changed: Condvar,
}

/// What the caller does.
impl GroupQueue {
    /// Adds a group that is to be read.
    pub(super) fn push(&self, group: GroupInFlight) {
        lock(&self.state).ready.push_back(group);
        self.changed.notify_all();
    }

    /// Groups that no worker has taken.
    pub(super) fn ready(&self) -> usize {
        lock(&self.state).ready.len()
    }

    /// How many workers to wake, so that up to `count` are at work; they count as such from now on.
    pub(super) fn claim_workers(&self, count: usize) -> usize {
        let mut state = lock(&self.state);
        let more = count.min(state.ready.len()).saturating_sub(state.workers);
        state.workers += more;
        more
    }

    /// The caller submits the first groups, as many as fill a ring.
    pub(super) fn begin_filling(&self) {
        lock(&self.state).filling = true;
    }

    /// Shadow workers need not wait for a group before they check for completions.
    pub(super) fn finish_filling(&self) {
        if std::mem::take(&mut lock(&self.state).filling) {
            self.changed.notify_all();
        }
    }

    /// A completed group; waits for one, and with `more` only until a group is ready.
    pub(super) fn next_completed(&self, more: bool) -> Option<GroupInFlight> {
        let state = lock(&self.state);
        // The time limit lets the caller check whether there is a ring, and whether there are shadow workers.
        let limit = Duration::from_millis(5);
        let waiting = |s: &mut State| s.completed.is_empty() && !(more && s.ready.is_empty());
        let (mut state, _) =
            self.changed.wait_timeout_while(state, limit, waiting).unwrap_or_else(PoisonError::into_inner);
        state.completed.pop_front()
    }

    /// Lets workers leave; the groups that none has taken.
    pub(super) fn close(&self) -> VecDeque<GroupInFlight> {
        let not_begun = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        self.changed.notify_all();
        not_begun
    }

    /// All completed groups.
    pub(super) fn take_completed(&self) -> VecDeque<GroupInFlight> {
        std::mem::take(&mut lock(&self.state).completed)
    }
}

/// What a shadow worker does.
impl GroupQueue {
    /// A group to read, if there is one. `idle`: the worker has nothing else to do; it waits briefly, and leaves
    /// without one. It must not wait forever: the caller may wait for buffers of another batch, and that batch for
    /// shadow workers.
    pub(super) fn take(&self, idle: bool) -> Option<GroupInFlight> {
        let mut state = lock(&self.state);
        if idle {
            state = self.wait_briefly(state, |_| true);
        }
        let next = self.pop_ready(&mut state);
        if idle && next.is_none() {
            // Under the lock, so that a thread that adds a group from now on wakes it again.
            state.workers -= 1;
        }
        next
    }

    /// One of the first groups, if there is or soon will be one.
    pub(super) fn take_while_filling(&self) -> Option<GroupInFlight> {
        self.pop_ready(&mut self.wait_briefly(lock(&self.state), |state| state.filling))
    }

    fn wait_briefly<'a>(&self, state: MutexGuard<'a, State>, while_: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        let must_wait = |s: &mut State| s.ready.is_empty() && !s.closed && while_(s);
        self.changed.wait_timeout_while(state, IDLE_WAIT, must_wait).unwrap_or_else(PoisonError::into_inner).0
    }

    fn pop_ready(&self, state: &mut State) -> Option<GroupInFlight> {
        let next = state.ready.pop_front()?;
        if state.ready.is_empty() {
            // The caller has to prepare others, even if nothing completes.
            self.changed.notify_all();
        }
        Some(next)
    }

    /// Whether the caller submits the first groups.
    pub(super) fn is_filling(&self) -> bool {
        lock(&self.state).filling
    }

    /// Gives a group back, read.
    pub(super) fn complete(&self, group: GroupInFlight) {
        lock(&self.state).completed.push_back(group);
        self.changed.notify_all();
    }
}
