//! Who helps: the threads that are called, and the blocks that are lent to those who call no device.
//!
//! ```text
//!   caller ── lends empty blocks ──> keepers: storage          who finds nothing to do goes, and is called
//!          <── gets filled ones ───  one mate: copies beside   again when something has come up
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Job, LENT};
use spinio_transfer::Error;
use spinio_host::pool::SHADOW_WORKERS as KEEPERS;
use spinio_host::pool::Task;
use spinio_host::lock;
use crate::read::beside;
use crate::read::engine::Hands;
use crate::read::work::{Filled, Queues, Who};
use spinio_transfer::bounce::Block;

impl Job {
    /// How many mates would find something to copy, to look at or to make ready, beside the caller.
    fn mates_wanted(&self) -> usize {
        let queues = lock(&self.queues);
        let windows = if self.may_survey() { queues.windows.iter().map(|w| w.1).sum() } else { 0 };
        let bytes = queues.cache.iter().map(|p| p.len).sum::<u64>() + windows;
        (bytes.div_ceil(self.copy_piece) as usize).saturating_sub(1).max(self.populate.mates(&queues.dma))
    }

    /// Lends blocks to helpers without a device, as long as there is something to fill them with, and calls them. The first
    /// for storage is waited for.
    pub(super) fn provide(self: &Arc<Self>) -> Result<(), Error> {
        loop {
            let (lent, direct, beside) = {
                let queues = lock(&self.queues);
                let left = LENT - queues.lent.min(LENT);
                let direct = queues.empty.len() < queues.direct_pieces(self.direct_piece).min(left);
                (queues.lent, direct, queues.lent < beside::blocks(self.len) && self.is_beside(&queues))
            };
            let block = match (direct, beside) {
                (true, _) if lent == 0 => Some(self.staging.take()),
                (true, _) => self.staging.try_take_warm().transpose(),
                // A helper that gets none is missed by nobody.
                (false, true) => self.staging.try_take_within(beside::RING).unwrap_or(None).map(Ok),
                (false, false) => None,
            };
            let Some(block) = block else { break };
            let block = block.map_err(|e| Error::device(e, "read", self.offset, self.len))?;
            let mut queues = lock(&self.queues);
            queues.lent += 1;
            queues.empty.push(block);
        }
        self.call_keepers();
        self.call_beside();
        Ok(())
    }

    /// Filling page tables takes long: that is more worth to the caller than what is copied beside him.
    pub(crate) fn fill_tables_ahead(self: &Arc<Self>) {
        if self.ctx.files.workers().threads() < 4 {
            self.beside.store(false, Relaxed);
        }
        self.call_helpers();
    }

    /// Whether somebody may copy beside the caller now. Callers that work side by side keep the processors busy by themselves.
    fn is_beside(&self, queues: &Queues) -> bool {
        self.beside.load(Relaxed) && beside::is_worth(&queues.dma) && self.ctx.files.unpin().requests() <= 1
    }

    fn call_beside(self: &Arc<Self>) {
        let wanted = {
            let mut queues = lock(&self.queues);
            let wanted = !queues.beside && !queues.empty.is_empty() && self.is_beside(&queues);
            queues.beside |= wanted;
            wanted
        };
        if wanted && let Some(crew) = self.ctx.files.workers().copy() {
            crew.post(Arc::new(Helping { job: Arc::clone(self), who: Who::Beside }), 1);
        }
    }

    /// Takes an empty block back from the keepers.
    pub(crate) fn reclaim(&self) -> Option<Block> {
        let mut queues = lock(&self.queues);
        let block = queues.empty.pop()?;
        queues.lent -= 1;
        Some(block)
    }

    /// A block that a keeper filled.
    pub(crate) fn filled(&self) -> Option<Filled> {
        lock(&self.queues).filled.pop_front()
    }

    /// A keeper filled a block.
    pub(crate) fn hand_in(&self, filled: Filled) {
        lock(&self.queues).filled.push_back(filled);
        self.stir();
    }

    /// A lent block has left for the ring.
    pub(crate) fn block_gone(&self) {
        let mut queues = lock(&self.queues);
        queues.lent -= 1;
        let starved = queues.is_starved();
        drop(queues);
        if starved {
            self.stir();
        }
    }

    /// Calls the helpers that can be of use now.
    pub(crate) fn call_helpers(self: &Arc<Self>) {
        self.call_keepers();
        // Callers that work side by side keep the processors busy by themselves.
        let crowded = self.ctx.files.unpin().requests() > self.ctx.files.workers().threads();
        let free = if crowded || !self.seen { 0 } else { self.ctx.files.workers().threads() - 1 };
        let mates = self.mates_wanted().min(free);
        if mates > 0
            && let Some(crew) = self.ctx.files.workers().copy()
        {
            crew.post(Arc::new(Helping { job: Arc::clone(self), who: Who::Mate }), mates);
        }
    }

    fn call_keepers(self: &Arc<Self>) {
        let more = {
            let mut queues = lock(&self.queues);
            let wanted = queues.keepers_wanted(self.direct_piece, !self.may_survey()).min(KEEPERS);
            let more = wanted.saturating_sub(queues.keepers);
            queues.keepers += more;
            more
        };
        if more > 0
            && let Some(crew) = self.ctx.files.shadow_workers()
        {
            crew.post(Arc::new(Helping { job: Arc::clone(self), who: Who::Keeper }), more);
        }
    }
}

/// A helper's part in a job.
struct Helping {
    job: Arc<Job>,
    who: Who,
}

impl Task for Helping {
    fn help(&self) {
        let Some(_inside) = self.job.gate.enter() else { return };
        let mut hands = Hands::new(&self.job, self.who);
        while let Some(work) = self.job.take(self.who) {
            hands.work(work);
        }
        hands.settle();
    }
}
