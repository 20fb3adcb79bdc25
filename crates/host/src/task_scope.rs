//! Counts the threads at work on part of a batch, and waits until they are done: workers enter at any time, and the
//! batch returns when all that entered have left. A large read that panics uses one too.

#![cfg_attr(loom, expect(unsafe_code, reason = "loom hands out raw pointers"))]

use std::sync::PoisonError;

use crate::sync::{Condvar, Mutex, lock};

/// Counts the threads at work, and admits none once it is closed.
pub struct TaskScope {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Default)]
struct State {
    active: usize,
    closed: bool,
    /// A thread panicked inside: the items that it had taken are lost.
    poisoned: bool,
}

/// A thread inside.
pub struct ScopeGuard<'a>(&'a TaskScope);

impl Default for TaskScope {
    fn default() -> TaskScope {
        TaskScope::new()
    }
}

impl TaskScope {
    /// An open one, with no thread inside.
    pub fn new() -> TaskScope {
        TaskScope { state: Mutex::new(State::default()), idle: Condvar::new() }
    }

    /// Enters; `None` if it is closed.
    pub fn enter(&self) -> Option<ScopeGuard<'_>> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        state.active += 1;
        Some(ScopeGuard(self))
    }

    /// Admits no further thread, and waits until those inside have left.
    ///
    /// # Panics
    /// If one of them did: an error is better than a count of bytes that never arrived.
    pub fn join(&self) {
        assert!(!self.close_and_wait(), "a worker of this batch panicked");
    }

    /// As [`TaskScope::join`], but returns whether one of them panicked.
    pub fn close_and_wait(&self) -> bool {
        let mut state = lock(&self.state);
        state.closed = true;
        while state.active > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.poisoned
    }

    /// Whether a thread panicked inside.
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

/// Under a model checker: no worker of a batch touches its results once the batch has returned.
#[cfg(all(test, loom))]
mod interleavings {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use loom::thread;

    use super::*;

    /// Items are taken by index; results are the caller's memory, freed when the call has returned.
    struct Batch {
        scope: TaskScope,
        next: AtomicUsize,
        results: [UnsafeCell<u32>; ITEMS],
    }

    const ITEMS: usize = 3;

    // SAFETY: the cells are what is being checked; loom reports an access that the scope does not order.
    unsafe impl Sync for Batch {}
    // SAFETY: as above.
    unsafe impl Send for Batch {}

    impl Batch {
        fn work(&self) {
            loop {
                let item = self.next.fetch_add(1, Relaxed);
                let Some(result) = self.results.get(item) else { return };
                // SAFETY: loom checks that no other thread accesses it.
                result.with_mut(|value| unsafe { *value += 1 });
            }
        }

        fn execute(&self) {
            if let Some(_guard) = self.scope.enter() {
                self.work();
            }
        }
    }

    #[test]
    fn join_returns_after_all_workers_left() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let results = std::array::from_fn(|_| UnsafeCell::new(0));
            let batch = Arc::new(Batch { scope: TaskScope::new(), next: AtomicUsize::new(0), results });
            let workers: Vec<_> = (0..2)
                .map(|_| {
                    let batch = Arc::clone(&batch);
                    thread::spawn(move || batch.execute())
                })
                .collect();
            batch.work();
            batch.scope.join();
            // From here on only the caller uses the results.
            for result in &batch.results {
                // SAFETY: loom checks that no other thread accesses it.
                result.with_mut(|value| unsafe { assert_eq!(value.replace(9), 1, "moved once") });
            }
            workers.into_iter().for_each(|worker| worker.join().unwrap());
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
            let _guard = scope.enter();
            std::panic::resume_unwind(Box::new("planned"));
        }));
        assert!(outcome.is_err() && scope.is_poisoned());
        assert!(catch_unwind(std::panic::AssertUnwindSafe(|| scope.join())).is_err());
        assert!(scope.enter().is_none());
    }
}
