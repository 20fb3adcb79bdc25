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
//! where those who do the asking could have all of the staging memory in their hands (reads, with `SPINIO_STAGING` below
//! 64 MiB); a write keeps half of it while it asks.
//!
//! Known flaws: a write that is one call of the kernel is not interrupted, nor is what a batch reads out of the page cache.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};


#[derive(Clone, Copy)]
struct Asking {
    ask: fn() -> bool,
    every: Duration,
    last: Instant,
    /// The answer was to stop: it is not asked again.
    stop: bool,
}

thread_local! {
    // Without a destructor: hooks come here too.
    static ASKING: Cell<Option<Asking>> = const { Cell::new(None) };
}

/// While it lives, long requests of this thread ask whether to go on.
#[must_use]
pub struct Interruptible {
    before: Option<Asking>,
    /// It is this thread's.
    _here: PhantomData<*const ()>,
}

/// From now on long requests of this thread call `ask` between their pieces, no more often than `every` so long, and end
/// early once it has answered true.
pub fn interruptible(ask: fn() -> bool, every: Duration) -> Interruptible {
    let asking = Asking { ask, every, last: Instant::now(), stop: false };
    Interruptible { before: ASKING.replace(Some(asking)), _here: PhantomData }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        ASKING.set(self.before);
    }
}

/// Whether this thread's request shall end early.
pub fn is_interrupted() -> bool {
    let Some(asking) = ASKING.get() else { return false };
    if asking.stop || asking.last.elapsed() < asking.every {
        return asking.stop;
    }
    // It may make requests of its own, which it is not asked about.
    ASKING.set(None);
    let stop = (asking.ask)();
    ASKING.set(Some(Asking { last: Instant::now(), stop, ..asking }));
    stop
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_nothing_is_not_interrupted() {
        assert!(!is_interrupted());
        drop(interruptible(|| true, Duration::ZERO));
        assert!(!is_interrupted());
    }

    #[test]
    fn it_is_asked_when_it_is_time_and_until_it_says_stop() {
        thread_local!(static ASKED: Cell<u32> = const { Cell::new(0) });
        fn third() -> bool {
            ASKED.set(ASKED.get() + 1);
            ASKED.get() == 3
        }
        let _outer = interruptible(third, Duration::from_secs(1000));
        assert!(!is_interrupted() && ASKED.get() == 0);
        {
            let _inner = interruptible(third, Duration::ZERO);
            let said: Vec<bool> = (0..5).map(|_| is_interrupted()).collect();
            assert_eq!((said, ASKED.get()), (vec![false, false, true, true, true], 3));
        }
        assert!(!is_interrupted());
    }

    #[test]
    fn a_request_of_the_one_who_is_asked_is_not_asked_about() {
        let _asking = interruptible(is_interrupted, Duration::ZERO);
        assert!(!is_interrupted());
    }
}
