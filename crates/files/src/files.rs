//! The state for files of one runtime, as one object.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use spinio_device::Device;
use spinio_host::Settings;
use spinio_host::pool::{IdleTask, WorkerPool, Workers};
use spinio_host::storage_ring::StorageRing;
use spinio_host::storage_rings::NoRing;
use spinio_host::syscalls::Syscalls;
use spinio_host::thread_rings::ThreadRing;
use spinio_plan::Reason;
use spinio_plan::geometry::BlockStack;
use spinio_stats::Stats;
use spinio_sys::Errno;
use spinio_sys::linux::{Advice, Fd, FileKey, FileKind, RingFile, Stat};

use spinio_transfer::DeferredUnpin;

use crate::block_stack::BlockStackCache;
use crate::cost::{CostEntry, CostModels};
use crate::ctx::FilesCtx;
use crate::known_fds::KnownFds;
use crate::no_p2p_fds::NoP2pFds;
use crate::p2p_trust::P2pTrustMap;
use crate::readahead::ReadaheadCache;
use crate::ring_slot::is_issued_at_once;
use crate::sequential::SequentialDetector;
use crate::shadow_file::ShadowFiles;
use crate::state::{FileState, is_memory};
use crate::table::FileTable;

/// The state for files of one runtime.
pub struct Files {
    /// The host.
    pub ctx: Arc<FilesCtx>,
    /// The remembered files.
    pub table: Arc<FileTable>,
    /// Which descriptors read sequentially.
    pub sequential: Arc<SequentialDetector>,
    /// Which descriptors have reads that end by themselves.
    pub prompt_fds: KnownFds,
    /// Which descriptors are of files on a disk of this machine.
    local_fds: KnownFds,
    /// Which descriptors have storage that reaches no device.
    pub no_p2p_fds: NoP2pFds,
    /// Pages that reads added to the page cache.
    pub readahead: Arc<ReadaheadCache>,
    /// What each route costs.
    pub costs: CostModels,
    /// Where storage may DMA into devices.
    pub p2p_trust: P2pTrustMap,
    /// Files that SPIN opened itself.
    pub shadow: Arc<ShadowFiles>,
    nonce: AtomicU64,
}

/// The idle task of shadow workers: drops closed files, and unused ones.
struct FileReaper(Weak<FileTable>);

impl IdleTask for FileReaper {
    fn sleep_timeout(&self) -> Option<Duration> {
        let table = self.0.upgrade()?;
        match table.has_closed() {
            true => Some(Duration::ZERO),
            false => (!table.is_empty()).then_some(Duration::from_secs(1)),
        }
    }

    fn reap_idle(&self) {
        if let Some(table) = self.0.upgrade() {
            table.drop_closed();
            table.expire();
        }
    }
}

impl Files {
    /// Nothing is remembered yet.
    pub fn new(ctx: Arc<FilesCtx>, settings: &Settings) -> Files {
        let (table, sequential) = (Arc::<FileTable>::default(), Arc::new(SequentialDetector::new(settings)));
        ctx.workers.set_shadow_idle(FileReaper(Arc::downgrade(&table)));
        Files {
            readahead: ReadaheadCache::new(settings, &ctx, &table, &sequential),
            prompt_fds: KnownFds::default(),
            local_fds: KnownFds::default(),
            no_p2p_fds: NoP2pFds::default(),
            costs: CostModels::new(settings),
            p2p_trust: P2pTrustMap::default(),
            shadow: Arc::new(ShadowFiles {
                ctx: Arc::clone(&ctx),
                table: Arc::clone(&table),
                lease_watcher: Arc::default(),
            }),
            ctx,
            table,
            sequential,
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

    /// The threads with the shadow descriptor table.
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

    /// The file of a descriptor of the calling thread; the reason if it cannot be reopened.
    pub fn get(&self, fd: Fd, stat: Stat) -> Result<Arc<FileState>, Reason> {
        let workers = self.ctx.workers.shadow().ok_or(Reason::NoWorkers)?;
        self.table.get(self.ctx.sys, workers, fd, stat)
    }

    /// What each route costs for a file and a device. Called on the program's thread, which may query the device's
    /// name.
    pub fn cost_entry(&self, file: &FileState, device: &'static dyn Device) -> Arc<CostEntry> {
        self.costs.get(&self.ctx, file, device)
    }

    /// The ring and the slot of a file in it, for a read of storage that begins now. Where there is none yet, shadow
    /// workers make one for later reads.
    pub fn ring_slot(&self, file: &Arc<FileState>) -> Result<(Arc<StorageRing>, u32), NoRing> {
        if !is_issued_at_once(file.file_system) {
            return Err(NoRing::FileSystem);
        }
        let ring = self.workers().storage_ring(file.storage)?;
        if let Some(slot) = file.ring_slot.get() {
            return Ok(slot);
        }
        if let (Ok(_), Some(shadow), true) =
            (&file.direct_fd, self.shadow_workers(), file.ring_slot.needs_registration())
        {
            let file = Arc::clone(file);
            shadow.for_key(file.storage).spawn_detached(move || {
                if let Ok(direct) = &file.direct_fd {
                    file.ring_slot.register(ring, direct.get());
                }
            });
        }
        Err(NoRing::NotRegistered)
    }

    /// The ring of the calling thread and a file in it, put there at the first call; `None`: only other threads can read its
    /// storage.
    pub fn thread_slot(&self, file: &Arc<FileState>) -> Option<(Arc<ThreadRing>, RingFile)> {
        if !is_issued_at_once(file.file_system) || file.direct_fd.is_err() {
            return None;
        }
        let ring = self.workers().thread_ring()?;
        let slot = file.ring_slot.in_thread_ring(&ring).unwrap_or_else(|| {
            let (state, ring) = (Arc::clone(file), Arc::clone(&ring));
            let register = move || state.ring_slot.register_with_thread(ring, state.direct_fd.as_ref().ok()?.get());
            self.shadow_workers()?.for_key(file.storage).run_blocking(register).flatten()
        })?;
        Some((ring, RingFile { slot, max_command: file.max_ring_read() }))
    }

    /// Whether reads of the file that a descriptor refers to end without a server's help: it is on a disk of this machine, or in
    /// memory. Up to two system calls, if the descriptor is not known.
    pub fn is_descriptor_local(&self, fd: Fd) -> bool {
        self.local_fds.is_known(fd, || {
            let file_system = self.sys().file_system(fd).ok();
            file_system.is_some_and(is_issued_at_once)
                || self.sys().fstat(fd).is_ok_and(|stat| match stat.kind {
                    FileKind::Block => true,
                    FileKind::Regular => file_system.is_some_and(is_memory),
                    _ => false,
                })
        })
    }

    /// Why reads of a file's storage would not take the ring; `None`: they would, once it is awake.
    pub fn ring_refusal(&self, file: &FileState) -> Option<NoRing> {
        match is_issued_at_once(file.file_system) {
            true => self.workers().ring_refusal(),
            false => Some(NoRing::FileSystem),
        }
    }

    /// A different number at every call, so that two surveys probe different offsets.
    pub fn probe_nonce(&self) -> u64 {
        self.nonce.fetch_add(1, Relaxed)
    }

    /// Forgets a file; if it was remembered, waits up to 20 ms until its state is released. For signal handlers too, if the
    /// thread holds no lock of SPIN's: it allocates and frees nothing.
    pub fn forget(&self, key: FileKey) {
        if let Some(storage) = self.table.close(key) {
            self.ctx.drain_for_close(|| self.table.has_dropped(key), Some(storage));
        }
    }

    /// As [`Files::forget`] of all files.
    pub fn forget_all(&self) {
        self.table.close_all();
        self.ctx.drain_for_close(|| self.table.has_dropped_closed(), None);
    }

    /// Applies the program's advice about a range to the state of the file.
    pub fn advised(&self, stat: Stat, range: Range<u64>, advice: Advice) {
        self.readahead.on_advice(stat, range, advice);
    }

    /// The block devices under `fd`: a file, a directory or a device.
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
        // The pre-close hook of a file refers to the read-ahead set, which refers to this table.
        self.table.forget_all();
    }
}
