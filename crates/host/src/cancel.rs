//! Cancellation of long requests: a language whose signal handlers run only when it is polled (Python) installs its
//! poll function here.
//!
//! ```text
//!   install_cancel_poll(poll) ─┐
//!   read ── piece, piece, [poll: continue], piece, piece, [poll: stop] ── the rest is cancelled ── the count so far
//! ```
//!
//! The kernel does the same to a request that a signal interrupts: it ends early with the bytes it has moved, or with
//! EINTR if there are none. Only the thread that makes the request polls, between two pieces and while it waits for
//! workers. It waits for pieces in flight: from storage, some tens of MiB at most. The poll function may make requests
//! too. So a request does not poll where the polling requests could have all bounce buffers (reads, with
//! `SPINIO_BOUNCE_LIMIT` below 64 MiB); a write leaves half of them free while it polls.
//!
//! Known flaws: a write that is one system call is not interrupted, nor are reads of a batch from the page cache.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

#[derive(Clone, Copy)]
struct PollState {
    poll: fn() -> bool,
    interval: Duration,
    last_poll: Instant,
    /// The poll returned true: no further poll.
    cancelled: bool,
}

thread_local! {
    // Without a destructor: hooks use it too.
    static POLL_STATE: Cell<Option<PollState>> = const { Cell::new(None) };
}

/// While it lives, long requests of this thread poll for cancellation.
#[must_use]
pub struct CancelPoll {
    previous: Option<PollState>,
    /// Bound to this thread.
    _here: PhantomData<*const ()>,
}

/// From now on long requests of this thread call `poll` between their pieces, at most once per `interval`, and end
/// early once it has returned true.
pub fn install_cancel_poll(poll: fn() -> bool, interval: Duration) -> CancelPoll {
    let state = PollState { poll, interval, last_poll: Instant::now(), cancelled: false };
    CancelPoll { previous: POLL_STATE.replace(Some(state)), _here: PhantomData }
}

impl Drop for CancelPoll {
    fn drop(&mut self) {
        POLL_STATE.set(self.previous);
    }
}

/// Whether the requests of this thread poll.
pub fn has_cancel_poll() -> bool {
    POLL_STATE.get().is_some()
}

/// Whether this thread's request must end early.
pub fn is_cancelled() -> bool {
    let Some(state) = POLL_STATE.get() else { return false };
    if state.cancelled || state.last_poll.elapsed() < state.interval {
        return state.cancelled;
    }
    // It may make requests itself, which do not poll.
    POLL_STATE.set(None);
    let cancelled = (state.poll)();
    POLL_STATE.set(Some(PollState { last_poll: Instant::now(), cancelled, ..state }));
    cancelled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_without_poll_is_not_cancelled() {
        assert!(!is_cancelled());
        drop(install_cancel_poll(|| true, Duration::ZERO));
        assert!(!is_cancelled());
    }

    #[test]
    fn poll_runs_at_interval_until_cancelled() {
        thread_local!(static POLLED: Cell<u32> = const { Cell::new(0) });
        fn third() -> bool {
            POLLED.set(POLLED.get() + 1);
            POLLED.get() == 3
        }
        let _outer = install_cancel_poll(third, Duration::from_secs(1000));
        assert!(!is_cancelled() && POLLED.get() == 0);
        {
            let _inner = install_cancel_poll(third, Duration::ZERO);
            let answers: Vec<bool> = (0..5).map(|_| is_cancelled()).collect();
            assert_eq!((answers, POLLED.get()), (vec![false, false, true, true, true], 3));
        }
        assert!(!is_cancelled());
    }

    #[test]
    fn requests_of_poll_callback_are_not_polled() {
        let _poll = install_cancel_poll(is_cancelled, Duration::ZERO);
        assert!(!is_cancelled());
    }
}
