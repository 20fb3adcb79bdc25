//! Who helps: the threads that are called, and the blocks that are lent to those who call no device.
//!
//! ```text
//!   caller ── lends empty blocks ──> keepers: storage          who finds nothing to do goes, and is called
//!          <── gets filled ones ───                            again when something has come up
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use super::{MAX_LENT, PLAN_RANGE, ReadRequest};
use crate::read::engine::EngineCtx;
use crate::read::plan_range;
use crate::read::work::{FilledBuffer, Role, WorkQueues};
use spinio_host::lock;
use spinio_host::pool::SHADOW_WORKERS as KEEPERS;
use spinio_host::pool::Task;
use spinio_sys::Errno;
use spinio_transfer::Error;
use spinio_transfer::bounce::BounceBuffer;

impl ReadRequest {
    /// Plans what is small enough to plan at once, so that helpers find segments; leaves the rest as windows.
    pub(crate) fn plan_initial(self: &Arc<Self>) {
        self.unpin_range();
        if self.len <= PLAN_RANGE {
            plan_range::plan_range(self, Role::Caller, 0, self.len, false);
        } else {
            self.queue_ranges();
        }
    }

    /// Works as the program's thread until everything has arrived; the bytes of the unbroken prefix. Where that panics, the
    /// panic leaves when the helpers have: they write into memory of the program, through its descriptors.
    pub(crate) fn finish(self: &Arc<Self>) -> Result<u64, Error> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_caller()));
        let incomplete = self.bytes_left.load(Acquire) > 0;
        if incomplete {
            lock(&self.queues).closed = true;
            self.scope.close_and_wait();
        }
        let mut queues = lock(&self.queues);
        let WorkQueues { empty, filled, .. } = &mut *queues;
        // Filled ones only of a request that did not come to its end.
        for block in empty.drain(..).chain(filled.drain(..).map(|filled| filled.block)) {
            self.staging.release(block);
        }
        self.staging.end_lending(self.file.storage, std::mem::take(&mut queues.lent_out));
        drop(queues);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        let mut completion = lock(&self.completion);
        match completion.error.take() {
            _ if incomplete => Err(Error::kernel(Errno::IO, "read", self.offset, self.len)),
            Some(error) if completion.prefix_end == 0 => Err(error),
            _ => Ok(completion.prefix_end),
        }
    }

    fn run_caller(self: &Arc<Self>) {
        loop {
            let mut engine = EngineCtx::new(self, Role::Caller);
            loop {
                if self.is_cancelled() {
                    self.cancel_pending();
                }
                if let Err(error) = self.lend_buffers() {
                    self.fail_pending(&error);
                }
                let Some(work) = self.next_work(Role::Caller) else { break };
                engine.run_work(work);
            }
            engine.drain();
            if self.wait_for_work() {
                break;
            }
        }
    }

    /// How many mates would find something to copy, to look at or to make ready, beside the caller.
    fn copy_workers_needed(&self) -> usize {
        let queues = lock(&self.queues);
        let range_bytes = if self.can_survey() { queues.ranges.iter().map(|w| w.1).sum() } else { 0 };
        let bytes = queues.cache.iter().map(|p| p.len).sum::<u64>() + range_bytes;
        (bytes.div_ceil(self.copy_piece) as usize).saturating_sub(1).max(self.prefault.useful_workers(&queues.dma))
    }

    /// Lends blocks to helpers without a device, as long as there is something to fill them with, and calls them. The first
    /// for storage is waited for.
    pub(super) fn lend_buffers(self: &Arc<Self>) -> Result<(), Error> {
        loop {
            let lent_out = {
                let queues = lock(&self.queues);
                let can_lend = MAX_LENT - queues.lent_out.min(MAX_LENT);
                if queues.empty.len() >= queues.direct_pieces(self.direct_piece).min(can_lend) {
                    break;
                }
                queues.lent_out
            };
            if !self.staging.begin_lending(self.file.storage, lent_out == 0) {
                break;
            }
            let block =
                if lent_out == 0 { Some(self.staging.acquire()) } else { self.staging.try_acquire_warm().transpose() };
            if !matches!(block, Some(Ok(_))) {
                self.staging.end_lending(self.file.storage, 1);
            }
            let Some(block) = block else { break };
            let block = block.map_err(|e| Error::device(e, "read", self.offset, self.len))?;
            let mut queues = lock(&self.queues);
            queues.lent_out += 1;
            queues.empty.push(block);
        }
        self.wake_shadow();
        Ok(())
    }

    /// Takes an empty block back from the keepers.
    pub(crate) fn take_back(&self) -> Option<BounceBuffer> {
        let mut queues = lock(&self.queues);
        let block = queues.empty.pop()?;
        queues.lent_out -= 1;
        self.staging.end_lending(self.file.storage, 1);
        Some(block)
    }

    /// A block that a keeper filled.
    pub(crate) fn take_filled(&self) -> Option<FilledBuffer> {
        lock(&self.queues).filled.pop_front()
    }

    /// A keeper filled a block.
    pub(crate) fn submit_filled(&self, filled: FilledBuffer) {
        lock(&self.queues).filled.push_back(filled);
        self.notify_caller();
    }

    /// A lent block has left for the ring.
    pub(crate) fn buffer_returned(&self) {
        let mut queues = lock(&self.queues);
        queues.lent_out -= 1;
        let starved = queues.is_starved();
        drop(queues);
        self.staging.end_lending(self.file.storage, 1);
        if starved {
            self.notify_caller();
        }
    }

    /// Calls the helpers that can be of use now.
    pub(crate) fn wake_workers(self: &Arc<Self>) {
        self.wake_shadow();
        // Callers that work side by side keep the processors busy by themselves.
        let busy = self.ctx.files.unpin().in_flight() > self.ctx.files.workers().copy_threads();
        let free = if busy || !self.workers_share_fd { 0 } else { self.ctx.files.workers().copy_threads() - 1 };
        let needed = self.copy_workers_needed().min(free);
        if needed > 0
            && let Some(crew) = self.ctx.files.workers().copy()
        {
            crew.submit(Arc::new(WorkerTask { request: Arc::clone(self), role: Role::CopyWorker }), needed);
        }
    }

    fn wake_shadow(self: &Arc<Self>) {
        let more = {
            let mut queues = lock(&self.queues);
            let wanted = queues.shadow_workers_needed(self.direct_piece, !self.can_survey()).min(KEEPERS);
            let more = wanted.saturating_sub(queues.shadow_workers);
            queues.shadow_workers += more;
            more
        };
        if more > 0
            && let Some(crew) = self.ctx.files.shadow_workers()
        {
            let task = Arc::new(WorkerTask { request: Arc::clone(self), role: Role::ShadowWorker });
            crew.for_key(self.file.storage).submit(task, more);
        }
    }
}

/// A helper's part in a job.
struct WorkerTask {
    request: Arc<ReadRequest>,
    role: Role,
}

impl Task for WorkerTask {
    fn execute(&self) {
        let Some(_scope) = self.request.scope.enter() else { return };
        let mut engine = EngineCtx::new(&self.request, self.role);
        while let Some(work) = self.request.next_work(self.role) {
            engine.run_work(work);
        }
        engine.drain();
    }
}
