//! A batch that goes on while the program does something else.
//!
//! ```text
//!   submit ── the mates have this thread's descriptor table ──> whichever of them has time, or who waits
//!          ── they have not, or nobody tells ─────────────────> a thread of its own, made by this one
//! ```
//!
//! A piece means the file that its descriptor names in the table of who submits it. Mates have the table of the thread that
//! made them, which another one may have left (`unshare`, CLONE_FILES): there the same number may be any file. A new thread
//! has the table of its maker. So has who waits, perhaps, and where it does, it need not wait for anybody.
//!
//! Where no thread can be made either, the batch is over when it has been submitted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use spinio_device::{QueueId, set_thread_queue, thread_queue};
use spinio_sys::linux::spawn_quiet;

use crate::run::{Done, Sorted};
use crate::ctx::BatchCtx;
use spinio_host::pool::{STACK, Task};
use spinio_host::lock;

enum State {
    /// Nobody has begun.
    Waiting(Box<Sorted>),
    Running,
    Done(Done),
}

struct Shared {
    ctx: Arc<BatchCtx>,
    /// What the thread that submitted it had chosen: its order on the device.
    queue: QueueId,
    /// Mates may run it.
    for_mates: bool,
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
        let before = thread_queue();
        set_thread_queue(self.queue);
        // Who waits must hear of it, whatever happens.
        let ran = catch_unwind(AssertUnwindSafe(|| sorted.run()));
        set_thread_queue(before);
        *lock(&self.state) = State::Done(ran.unwrap_or(Done { bytes: 0, failed: pieces }));
        self.changed.notify_all();
    }

    /// Whether descriptors mean to this thread what they meant to who submitted it.
    fn may_run_here(&self) -> bool {
        self.for_mates && self.ctx.reader.files.workers().batch_copy().is_some_and(|mates| mates.shares_my_table() == Some(true))
    }
}

impl Task for Shared {
    fn help(&self) {
        self.run();
    }
}

impl Ticket {
    pub(super) fn new(ctx: &Arc<BatchCtx>, sorted: Sorted) -> Ticket {
        let mates = ctx.reader.files.workers().batch_copy().filter(|mates| mates.shares_my_table() == Some(true));
        let shared = Arc::new(Shared {
            ctx: Arc::clone(ctx),
            queue: thread_queue(),
            for_mates: mates.is_some(),
            state: Mutex::new(State::Waiting(Box::new(sorted))),
            changed: Condvar::new(),
        });
        let theirs = Arc::clone(&shared);
        match mates {
            Some(mates) => mates.post(theirs, 1),
            None => {
                if spawn_quiet("spinio-batch", STACK, move || theirs.run()).is_err() {
                    shared.run();
                }
            }
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
        if !self.is_done() && self.shared.may_run_here() {
            self.shared.run();
        }
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
