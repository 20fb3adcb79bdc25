//! What a runtime keeps beside files: one object, made of the parts that its modules are.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use spinio_device::Device;
use spinio_host::Settings;
use spinio_host::pool::{IdleTask, WorkerPool, Workers};
use spinio_host::syscalls::Syscalls;
use spinio_plan::Reason;
use spinio_plan::geometry::BlockStack;
use spinio_stats::Stats;
use spinio_sys::Errno;
use spinio_sys::linux::{Advice, Fd, FileKind, Stat};

use spinio_transfer::DeferredUnpin;

use crate::block_stack::BlockStackCache;
use crate::cost::{CostEntry, CostModels};
use crate::ctx::FilesCtx;
use crate::lease_watcher::WriteLeases;
use crate::p2p_trust::P2pTrustMap;
use crate::readahead::ReadaheadCache;
use crate::shadow_file::ShadowFiles;
use crate::state::FileState;
use crate::streams::SequentialDetector;
use crate::table::FileTable;

/// The state beside files, of one runtime.
pub struct Files {
    /// The host.
    pub ctx: Arc<FilesCtx>,
    /// The files that are remembered.
    pub kept: Arc<FileTable>,
    /// Which descriptors read in sequence.
    pub streams: Arc<SequentialDetector>,
    /// What reads brought into the page cache.
    pub ahead: Arc<ReadaheadCache>,
    /// What each route costs.
    pub models: CostModels,
    /// Where storage may DMA into devices.
    pub p2p: P2pTrustMap,
    /// Files that SPIN opened itself.
    pub shadow: Arc<ShadowFiles>,
    nonce: AtomicU64,
}

/// What idle shadow workers do: let files go.
struct FileReaper(Weak<FileTable>);

impl IdleTask for FileReaper {
    fn sleep_timeout(&self) -> Option<Duration> {
        let kept = self.0.upgrade()?;
        (!kept.is_empty()).then_some(Duration::from_secs(1))
    }

    fn reap_idle(&self) {
        if let Some(kept) = self.0.upgrade() {
            kept.tidy();
        }
    }
}

impl Files {
    /// Nothing is remembered yet.
    pub fn new(ctx: Arc<FilesCtx>, settings: &Settings) -> Files {
        let (kept, streams) = (Arc::<FileTable>::default(), Arc::new(SequentialDetector::new(settings)));
        ctx.workers.set_shadow_idle(FileReaper(Arc::downgrade(&kept)));
        Files {
            ahead: ReadaheadCache::new(settings, &ctx, &kept, &streams),
            models: CostModels::new(settings),
            p2p: P2pTrustMap::default(),
            shadow: Arc::new(ShadowFiles {
                ctx: Arc::clone(&ctx),
                kept: Arc::clone(&kept),
                leases: Arc::<WriteLeases>::default(),
            }),
            ctx,
            kept,
            streams,
            nonce: AtomicU64::new(0),
        }
    }

    /// The system calls.
    pub fn sys(&self) -> &'static dyn Syscalls {
        self.ctx.sys
    }

    /// The worker pools.
    pub fn workers(&self) -> &Workers {
        &self.ctx.workers
    }

    /// The threads with the shadow table.
    pub fn shadow_workers(&self) -> Option<&WorkerPool> {
        self.ctx.workers.shadow()
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        self.ctx.stats()
    }

    /// Pages that wait to be unpinned.
    pub fn unpin(&self) -> &DeferredUnpin {
        &self.ctx.unpin
    }

    /// The file behind a descriptor of the calling thread; the reason if it cannot be opened again.
    pub fn get(&self, fd: Fd, stat: Stat) -> Result<Arc<FileState>, Reason> {
        let workers = self.ctx.workers.shadow().ok_or(Reason::NoWorkers)?;
        self.kept.get(self.ctx.sys, workers, fd, stat)
    }

    /// What each route costs for a file and a device. On the program's thread, which may ask the device for its name.
    pub fn costs(&self, file: &FileState, device: &'static dyn Device) -> Arc<CostEntry> {
        self.models.get(&self.ctx, file, device)
    }

    /// Another number at every call, so that two surveys probe different places.
    pub fn probe_nonce(&self) -> u64 {
        self.nonce.fetch_add(1, Relaxed)
    }

    /// Forgets a file; if it was remembered, waits a little until what was kept beside it is released.
    pub fn forget(&self, (dev, ino): (u64, u64)) {
        if self.kept.forget(dev, ino) {
            self.ctx.drain_for_close();
        }
    }

    /// What follows from advice about a range for what is kept beside the file.
    pub fn advised(&self, stat: Stat, range: Range<u64>, advice: Advice) {
        self.ahead.on_advice(stat, range, advice);
    }

    /// The block devices under what `fd` names: a file, a directory or a device.
    pub fn storage(&self, fd: Fd) -> Result<Arc<BlockStack>, Errno> {
        let sys = self.ctx.sys;
        let stat = sys.fstat(fd)?;
        if stat.kind != FileKind::Other
            && let Ok(file) = self.get(fd, stat)
        {
            return Ok(Arc::clone(file.block_stack()));
        }
        Ok(BlockStackCache::default().get(sys, fd, stat, sys.file_system(fd).unwrap_or(0)))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // What a file has done before its descriptor is closed leads back to the read-ahead set, and from there here.
        self.kept.forget_all();
    }
}
