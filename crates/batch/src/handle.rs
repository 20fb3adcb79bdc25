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

use spinio_device::{StreamId, set_thread_stream, thread_stream};
use spinio_sys::linux::spawn_signals_blocked;

use crate::ctx::BatchCtx;
use crate::run::{BatchResult, ResolvedBatch};
use spinio_host::lock;
use spinio_host::pool::{STACK_SIZE, Task};

enum State {
    /// Nobody has begun.
    Queued(Box<ResolvedBatch>),
    Running,
    Done(BatchResult),
}

struct Shared {
    ctx: Arc<BatchCtx>,
    /// What the thread that submitted it had chosen: its order on the device.
    stream: StreamId,
    /// Mates may run it.
    workers_share_fds: bool,
    state: Mutex<State>,
    changed: Condvar,
}

/// Stands for a batch that was submitted. It must be waited for; dropping it waits.
pub struct BatchHandle {
    shared: Arc<Shared>,
}

impl Shared {
    /// Runs the batch if nobody has begun it.
    fn run(&self) {
        let mut state = lock(&self.state);
        if !matches!(*state, State::Queued(_)) {
            return;
        }
        let State::Queued(batch) = std::mem::replace(&mut *state, State::Running) else { return };
        drop(state);
        let ops = batch.work.ops.len();
        let previous = thread_stream();
        set_thread_stream(self.stream);
        // Who waits must hear of it, whatever happens.
        let outcome = catch_unwind(AssertUnwindSafe(|| batch.run()));
        set_thread_stream(previous);
        *lock(&self.state) = State::Done(outcome.unwrap_or(BatchResult { bytes: 0, failed: ops }));
        self.changed.notify_all();
    }

    /// Whether descriptors mean to this thread what they meant to who submitted it.
    fn can_run_here(&self) -> bool {
        self.workers_share_fds
            && self
                .ctx
                .reader
                .files
                .workers()
                .batch_copy()
                .is_some_and(|workers| workers.shares_fd_table() == Some(true))
    }
}

impl Task for Shared {
    fn execute(&self) {
        self.run();
    }
}

impl BatchHandle {
    pub(super) fn new(ctx: &Arc<BatchCtx>, batch: ResolvedBatch) -> BatchHandle {
        let workers = ctx.reader.files.workers().batch_copy().filter(|mates| mates.shares_fd_table() == Some(true));
        let shared = Arc::new(Shared {
            ctx: Arc::clone(ctx),
            stream: thread_stream(),
            workers_share_fds: workers.is_some(),
            state: Mutex::new(State::Queued(Box::new(batch))),
            changed: Condvar::new(),
        });
        let core_ref = Arc::clone(&shared);
        match workers {
            Some(workers) => workers.submit(core_ref, 1),
            None => {
                if spawn_signals_blocked("spinio-batch", STACK_SIZE, move || core_ref.run()).is_err() {
                    shared.run();
                }
            }
        }
        BatchHandle { shared }
    }

    /// Whether every piece has its result.
    pub fn is_done(&self) -> bool {
        matches!(*lock(&self.shared.state), State::Done(_))
    }

    /// Waits until every piece has arrived or failed.
    pub fn wait(self) -> BatchResult {
        self.finish()
    }

    fn finish(&self) -> BatchResult {
        // Where no helper has had time for it, this thread has.
        if !self.is_done() && self.shared.can_run_here() {
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

impl Drop for BatchHandle {
    fn drop(&mut self) {
        self.finish();
    }
}

impl std::fmt::Debug for BatchHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket {{ done: {} }}", self.is_done())
    }
}
