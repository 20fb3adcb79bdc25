//! A batch that goes on while the program does something else.
//!
//! Known flaw: a helper may run it, by the descriptors of its own table: wrong for a thread that has left the program's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::batch::{Done, Sorted};
use crate::core::Core;
use crate::crew::Task;
use crate::lock::lock;

enum State {
    /// Nobody has begun.
    Waiting(Box<Sorted>),
    Running,
    Done(Done),
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Stands for a batch that was submitted. It must be waited for; dropping it waits.
pub struct Ticket {
    shared: Arc<Shared>,
}

impl Shared {
    /// Runs the batch if nobody has begun it.
    fn run(&self) {
        let mut state = lock(&self.state);
        if !matches!(*state, State::Waiting(_)) {
            return;
        }
        let State::Waiting(sorted) = std::mem::replace(&mut *state, State::Running) else { return };
        drop(state);
        let pieces = sorted.work.list.len();
        // Who waits must hear of it, whatever happens.
        let ran = catch_unwind(AssertUnwindSafe(|| sorted.run()));
        let done = ran.unwrap_or(Done { bytes: 0, failed: pieces });
        *lock(&self.state) = State::Done(done);
        self.changed.notify_all();
    }
}

impl Task for Shared {
    fn help(&self) {
        self.run();
    }
}

impl Ticket {
    pub(super) fn new(core: &Arc<Core>, sorted: Sorted) -> Ticket {
        let shared = Arc::new(Shared { state: Mutex::new(State::Waiting(Box::new(sorted))), changed: Condvar::new() });
        if let Some(crew) = core.batchers() {
            crew.post(Arc::clone(&shared) as Arc<dyn Task>, 1);
        }
        Ticket { shared }
    }

    /// Whether every piece has its result.
    pub fn is_done(&self) -> bool {
        matches!(*lock(&self.shared.state), State::Done(_))
    }

    /// Waits until every piece has arrived or failed.
    pub fn wait(self) -> Done {
        self.finish()
    }

    fn finish(&self) -> Done {
        // Where no helper has had time for it, this thread has.
        self.shared.run();
        let mut state = lock(&self.shared.state);
        loop {
            match *state {
                State::Done(done) => return done,
                _ => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.finish();
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket {{ done: {} }}", self.is_done())
    }
}
