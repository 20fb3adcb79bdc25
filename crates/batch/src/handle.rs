//! A batch that runs concurrently with the program.
//!
//! ```text
//!   submit ── the copy workers share this thread's fd table ──> the first free worker, or the thread that waits
//!          ── they do not, or it is not known ────────────────> a new thread, started by this one
//! ```
//!
//! An operation refers to the file that its descriptor has in the fd table of the thread that submits it. Copy workers
//! have the table of the thread that started them, which another thread may have left (`unshare`, CLONE_FILES): there
//! the same number may be any file. A new thread has the table of the thread that starts it. The thread that waits may
//! have that table, too; if so, it runs the batch itself unless another thread has begun it.
//!
//! If no thread can be started either, the batch is complete when `submit` returns.
//!
//! A forked child has none of the threads that run the batch, and its copy of a lock may be held by one of them forever. So
//! a handle is of no use there: it takes no lock, and reports ESRCH.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use spinio_device::{StreamId, set_thread_stream, thread_stream};
use spinio_sys::Errno;
use spinio_sys::linux::spawn_signals_blocked;

use crate::ctx::BatchCtx;
use crate::run::{BatchResult, ResolvedBatch};
use spinio_host::lock;
use spinio_host::pool::{STACK_SIZE, Task};
use spinio_transfer::Error;

enum State {
    /// No thread has begun.
    Queued(Box<ResolvedBatch>),
    Running,
    Done(BatchResult),
}

struct Shared {
    ctx: Arc<BatchCtx>,
    /// The stream of the thread that submitted it: its order on the device.
    stream: StreamId,
    /// The copy workers may run it.
    workers_share_fds: bool,
    state: Mutex<State>,
    changed: Condvar,
}

/// A batch that was submitted. It must be waited for; dropping it waits.
pub struct BatchHandle {
    shared: Arc<Shared>,
    /// The process that submitted it.
    process: u32,
}

impl Shared {
    /// Runs the batch if no thread has begun it.
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
        // A waiting thread must be woken, also after a panic.
        let outcome = catch_unwind(AssertUnwindSafe(|| batch.run()));
        set_thread_stream(previous);
        *lock(&self.state) = State::Done(outcome.unwrap_or(BatchResult { bytes: 0, failed: ops }));
        self.changed.notify_all();
    }

    /// Whether this thread has the fd table of the thread that submitted it.
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
        let workers = ctx.reader.files.workers().batch_copy().filter(|workers| workers.shares_fd_table() == Some(true));
        let shared = Arc::new(Shared {
            ctx: Arc::clone(ctx),
            stream: thread_stream(),
            workers_share_fds: workers.is_some(),
            state: Mutex::new(State::Queued(Box::new(batch))),
            changed: Condvar::new(),
        });
        let task = Arc::clone(&shared);
        match workers {
            Some(workers) => workers.submit(task, 1),
            None => {
                if spawn_signals_blocked("spinio-batch", STACK_SIZE, move || task.run()).is_err() {
                    shared.run();
                }
            }
        }
        BatchHandle { shared, process: std::process::id() }
    }

    /// ESRCH in a forked child.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::kernel(Errno::SRCH, "wait for a batch that the parent process has submitted", 0, 0))
    }

    /// Whether every operation has its result. ESRCH in a forked child.
    pub fn is_done(&self) -> Result<bool, Error> {
        self.check_process()?;
        Ok(matches!(*lock(&self.shared.state), State::Done(_)))
    }

    /// Waits until every operation has arrived or failed. ESRCH in a forked child, at once.
    pub fn wait(self) -> Result<BatchResult, Error> {
        self.finish()
    }

    fn finish(&self) -> Result<BatchResult, Error> {
        // If no worker has begun it, this thread runs it.
        if !self.is_done()? && self.shared.can_run_here() {
            self.shared.run();
        }
        let mut state = lock(&self.shared.state);
        loop {
            match *state {
                State::Done(done) => return Ok(done),
                _ => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Drop for BatchHandle {
    fn drop(&mut self) {
        if self.finish().is_err() {
            // A reference that is never released: what the batch has is the parent's, and its locks may be held here.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

impl std::fmt::Debug for BatchHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BatchHandle {{ done: {} }}", self.is_done().unwrap_or(false))
    }
}
