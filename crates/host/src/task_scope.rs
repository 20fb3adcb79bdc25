//! Who is at work on a part of a batch, and when it is over: helpers come when they like, and the batch returns when
//! nobody who came is left. A large read that panics uses one too.

use std::sync::PoisonError;

use crate::sync::{Condvar, Mutex, lock};

/// Counts the threads that are at work on something, and lets nobody in once it is over.
pub struct Gate {
    state: Mutex<State>,
    empty: Condvar,
}

#[derive(Default)]
struct State {
    inside: usize,
    closed: bool,
    /// Somebody panicked inside: what he had taken in hand is lost.
    broken: bool,
}

/// A thread inside.
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// An open one, with no thread inside.
    pub fn new() -> Gate {
        Gate { state: Mutex::new(State::default()), empty: Condvar::new() }
    }

    /// Goes in; `None` if it is too late.
    pub fn enter(&self) -> Option<Inside<'_>> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Inside(self))
    }

    /// Nobody comes in any more; waits until those inside have left.
    ///
    /// # Panics
    /// If one of them did: better no answer than one that counts bytes which never came.
    pub fn close(&self) {
        assert!(!self.shut(), "a helper of this batch panicked");
    }

    /// The same; whether one of them panicked.
    pub fn shut(&self) -> bool {
        let mut state = lock(&self.state);
        state.closed = true;
        while state.inside > 0 {
            state = self.empty.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.broken
    }

    /// Whether somebody panicked inside.
    pub fn is_broken(&self) -> bool {
        lock(&self.state).broken
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.inside -= 1;
        state.broken |= std::thread::panicking();
        if state.inside == 0 {
            self.0.empty.notify_all();
        }
    }
}

/// Under a model checker: what helpers of a batch touch nobody touches when the batch has returned.
#[cfg(all(test, loom))]
mod interleavings {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use loom::thread;

    use super::*;

    /// Pieces are taken by number; results are the caller's memory, gone when the call has returned.
    struct Batch {
        gate: Gate,
        next: AtomicUsize,
        results: [UnsafeCell<u32>; PIECES],
    }

    const PIECES: usize = 3;

    // SAFETY: the cells are what is being checked; loom reports a touch that the gate does not order.
    unsafe impl Sync for Batch {}
    // SAFETY: as above.
    unsafe impl Send for Batch {}

    impl Batch {
        fn work(&self) {
            loop {
                let piece = self.next.fetch_add(1, Relaxed);
                let Some(result) = self.results.get(piece) else { return };
                // SAFETY: loom checks that nobody else touches it.
                result.with_mut(|value| unsafe { *value += 1 });
            }
        }

        fn help(&self) {
            if let Some(_inside) = self.gate.enter() {
                self.work();
            }
        }
    }

    #[test]
    fn helpers_are_out_when_the_batch_returns() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let results = std::array::from_fn(|_| UnsafeCell::new(0));
            let batch = Arc::new(Batch { gate: Gate::new(), next: AtomicUsize::new(0), results });
            let helpers: Vec<_> = (0..2)
                .map(|_| {
                    let batch = Arc::clone(&batch);
                    thread::spawn(move || batch.help())
                })
                .collect();
            batch.work();
            batch.gate.close();
            // From here on the results are the caller's alone.
            for result in &batch.results {
                // SAFETY: loom checks that nobody else touches it.
                result.with_mut(|value| unsafe { assert_eq!(value.replace(9), 1, "moved once") });
            }
            helpers.into_iter().for_each(|helper| helper.join().unwrap());
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn a_helper_that_panics_is_no_success() {
        let gate = Gate::new();
        drop(gate.enter());
        assert!(!gate.is_broken());
        let helped = catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _inside = gate.enter();
            std::panic::resume_unwind(Box::new("planned"));
        }));
        assert!(helped.is_err() && gate.is_broken());
        assert!(catch_unwind(std::panic::AssertUnwindSafe(|| gate.close())).is_err());
        assert!(gate.enter().is_none());
    }
}
