//! The calls of a map that are queued on streams, and what has failed of them: [`crate::stream_order`].

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spinio_host::{lock, try_lock};

use crate::{Error, Result};

/// Between looks whether the device still works.
const LOOK: Duration = Duration::from_millis(100);

/// The calls of a map that are queued.
#[derive(Default)]
pub(crate) struct Queue {
    /// Held while a call is queued, and during one that waits.
    turn: Mutex<()>,
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// Calls so far.
    queued: u64,
    ended: u64,
    /// Of the first call that failed, until it is reported.
    failure: Option<Error>,
    /// The one that was reported last, and the number of the last call that was queued before.
    reported: Option<(Error, u64)>,
}

/// While it lives, no call is queued on the map, and after a wait none runs.
pub(crate) struct Turn<'a>(#[expect(dead_code, reason = "held")] Option<MutexGuard<'a, ()>>);

impl Turn<'_> {
    /// The call that runs now.
    pub(crate) fn of_lane() -> Turn<'static> {
        Turn(None)
    }
}

impl Queue {
    /// The turn of a call that waits, after those that are queued; fails with a failure of theirs.
    pub(crate) fn turn(&self, is_lost: impl Fn() -> bool) -> Result<Turn<'_>> {
        let turn = lock(&self.turn);
        self.wait(is_lost);
        self.take_failure().map(|()| Turn(Some(turn)))
    }

    /// The turn of the last call, which reports no failure.
    pub(crate) fn last_turn(&self, is_lost: impl Fn() -> bool) -> Turn<'_> {
        let turn = lock(&self.turn);
        self.wait(is_lost);
        Turn(Some(turn))
    }

    /// The turn to queue one.
    pub(crate) fn turn_to_queue(&self) -> Result<Turn<'_>> {
        let turn = lock(&self.turn);
        self.take_failure().map(|()| Turn(Some(turn)))
    }

    /// The failure that no call has reported.
    fn take_failure(&self) -> Result<()> {
        let mut state = lock(&self.state);
        match state.failure.take() {
            Some(failure) => {
                state.reported = Some((failure.clone(), state.queued));
                Err(failure)
            }
            None => Ok(()),
        }
    }

    /// A call in stream order has failed.
    pub(crate) fn fail(&self, error: &Error, what: &str) {
        let sentence = format!("An earlier {what} in stream order failed: {error}");
        lock(&self.state).failure.get_or_insert_with(|| Error::new(error.errno, sentence));
    }

    /// The turn, if no call has it, all that were queued have ended, and none has failed: after one that has, kernels of its
    /// stream may have stored to pages in no epoch. It is tried: the caller holds the state of the map, for which a call
    /// with the turn may wait.
    pub(crate) fn turn_if_quiet(&self) -> Option<Turn<'_>> {
        let turn = try_lock(&self.turn)?;
        let state = lock(&self.state);
        let is_quiet = state.ended == state.queued && state.failure.is_none() && state.reported.is_none();
        is_quiet.then_some(Turn(Some(turn)))
    }

    /// A call that is queued.
    pub(crate) fn ticket(self: &Arc<Queue>) -> Ticket {
        let mut state = lock(&self.state);
        state.queued += 1;
        Ticket { queue: Arc::clone(self), number: state.queued }
    }

    /// Waits until the calls that are queued have ended, in whatever order, or the device is lost: then they never run.
    /// The caller has the turn.
    fn wait(&self, is_lost: impl Fn() -> bool) {
        let mut state = lock(&self.state);
        while state.ended < state.queued {
            let waited = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            if waited.1.timed_out() {
                drop(waited.0);
                if is_lost() {
                    return;
                }
                state = lock(&self.state);
            } else {
                state = waited.0;
            }
        }
    }
}

/// A call that is queued; it has ended when this is dropped.
pub(crate) struct Ticket {
    queue: Arc<Queue>,
    number: u64,
}

impl Ticket {
    /// Why it must not run: a call before it failed, and it was queued before that was reported.
    pub(crate) fn reason_to_drop(&self) -> Option<Error> {
        let state = lock(&self.queue.state);
        let earlier = state.reported.as_ref().filter(|(_, last)| self.number <= *last).map(|(failure, _)| failure);
        state.failure.as_ref().or(earlier).cloned()
    }

    /// It has failed.
    pub(crate) fn fail(&self, error: &Error, what: &str) {
        self.queue.fail(error, what);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        lock(&self.queue.state).ended += 1;
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_is_given_at_once_or_not_at_all_and_after_a_failure_not_before_a_later_call() {
        let queue = Arc::new(Queue::default());
        let turn = queue.turn_if_quiet().unwrap();
        assert!(queue.turn_if_quiet().is_none(), "another has it");
        drop(turn);
        drop(queue.turn(|| false).unwrap());
        let ticket = queue.ticket();
        assert!(queue.turn_if_quiet().is_none(), "a call is queued");
        drop(ticket);
        assert!(queue.turn_if_quiet().is_some());
        queue.fail(&Error::new(spinio_sys::Errno::IO, "it failed"), "acquire");
        assert!(queue.turn_if_quiet().is_none(), "a call has failed");
    }
}
