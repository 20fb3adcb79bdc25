//! Long requests that a thread wants to be asked about: a language whose signal handlers run only when it is looked
//! whether one should (Python) says here how to look.
//!
//! ```text
//!   interruptible(ask) ─┐
//!   read ── piece, piece, [ask: go on], piece, piece, [ask: stop] ── what was not begun is left out ── the count so far
//! ```
//!
//! The kernel does the same to a request that a signal meets: it ends early with what it has moved, or with EINTR if that
//! is nothing. Only the thread that makes the request asks, between two pieces and while it waits for helpers. What is
//! under way is waited for: from storage, some tens of MiB at most. Who is asked may make requests too: so nobody is asked
//! where those who do the asking could have all of the staging memory in their hands (reads, with `SPINIO_BOUNCE_LIMIT` below
//! 64 MiB); a write keeps half of it while it asks.
//!
//! Known flaws: a write that is one call of the kernel is not interrupted, nor is what a batch reads out of the page cache.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

#[derive(Clone, Copy)]
struct PollState {
    poll: fn() -> bool,
    interval: Duration,
    last_poll: Instant,
    /// The answer was to stop: it is not asked again.
    cancelled: bool,
}

thread_local! {
    // Without a destructor: hooks come here too.
    static POLL_STATE: Cell<Option<PollState>> = const { Cell::new(None) };
}

/// While it lives, long requests of this thread ask whether to go on.
#[must_use]
pub struct CancelPoll {
    previous: Option<PollState>,
    /// It is this thread's.
    _here: PhantomData<*const ()>,
}

/// From now on long requests of this thread call `ask` between their pieces, no more often than `every` so long, and end
/// early once it has answered true.
pub fn install_cancel_poll(poll: fn() -> bool, interval: Duration) -> CancelPoll {
    let state = PollState { poll, interval, last_poll: Instant::now(), cancelled: false };
    CancelPoll { previous: POLL_STATE.replace(Some(state)), _here: PhantomData }
}

impl Drop for CancelPoll {
    fn drop(&mut self) {
        POLL_STATE.set(self.previous);
    }
}

/// Whether this thread's request shall end early.
pub fn is_cancelled() -> bool {
    let Some(state) = POLL_STATE.get() else { return false };
    if state.cancelled || state.last_poll.elapsed() < state.interval {
        return state.cancelled;
    }
    // It may make requests of its own, which it is not asked about.
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
        let _asking = install_cancel_poll(is_cancelled, Duration::ZERO);
        assert!(!is_cancelled());
    }
}
