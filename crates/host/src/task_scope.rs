//! Who is at work on a part of a batch, and when it is over: helpers come when they like, and the batch returns when
//! nobody who came is left. A large read that panics uses one too.

use std::sync::PoisonError;

use crate::sync::{Condvar, Mutex, lock};

/// Counts the threads that are at work on something, and lets nobody in once it is over.
pub struct TaskScope {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Default)]
struct State {
    active: usize,
    closed: bool,
    /// Somebody panicked inside: what he had taken in hand is lost.
    poisoned: bool,
}

/// A thread inside.
pub struct ScopeGuard<'a>(&'a TaskScope);

impl TaskScope {
    /// An open one, with no thread inside.
    pub fn new() -> TaskScope {
        TaskScope { state: Mutex::new(State::default()), idle: Condvar::new() }
    }

    /// Goes in; `None` if it is too late.
    pub fn enter(&self) -> Option<ScopeGuard<'_>> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        state.active += 1;
        Some(ScopeGuard(self))
    }

    /// Nobody comes in any more; waits until those inside have left.
    ///
    /// # Panics
    /// If one of them did: better no answer than one that counts bytes which never came.
    pub fn join(&self) {
        assert!(!self.close_and_wait(), "a helper of this batch panicked");
    }

    /// The same; whether one of them panicked.
    pub fn close_and_wait(&self) -> bool {
        let mut state = lock(&self.state);
        state.closed = true;
        while state.active > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.poisoned
    }

    /// Whether somebody panicked inside.
    pub fn is_poisoned(&self) -> bool {
        lock(&self.state).poisoned
    }
}

impl Drop for ScopeGuard<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.active -= 1;
        state.poisoned |= std::thread::panicking();
        if state.active == 0 {
            self.0.idle.notify_all();
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
        gate: TaskScope,
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
            let batch = Arc::new(Batch { gate: TaskScope::new(), next: AtomicUsize::new(0), results });
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
    fn worker_panic_poisons_scope() {
        let scope = TaskScope::new();
        drop(scope.enter());
        assert!(!scope.is_poisoned());
        let outcome = catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _inside = scope.enter();
            std::panic::resume_unwind(Box::new("planned"));
        }));
        assert!(outcome.is_err() && scope.is_poisoned());
        assert!(catch_unwind(std::panic::AssertUnwindSafe(|| scope.join())).is_err());
        assert!(scope.enter().is_none());
    }
}
