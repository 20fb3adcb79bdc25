//! What a large read is about: shared by the request, its planner and its engines.

use std::sync::Arc;

use spinio_device::{Device, DeviceAddr, FenceGuard, Target, WaitMode};
use spinio_files::cost::CostEntry;
use spinio_files::{FileState, ResidencyAccess};
use spinio_host::syscalls::Syscalls;
use spinio_plan::Reason;
use spinio_stats::RequestSpan;
use spinio_sys::linux::Fd;
use spinio_transfer::Mapping;
use spinio_transfer::bounce::BouncePool;

use super::work::Role;
use crate::ctx::Reader;

/// A large read as it came, and what was found out about it before it began.
pub(crate) struct ReadParams {
    pub(crate) span: RequestSpan,
    pub(crate) file: Arc<FileState>,
    pub(crate) staging: Arc<BouncePool>,
    pub(crate) dest: Target,
    /// The descriptor of the program, for threads with its descriptor table.
    pub(crate) fd: Fd,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Every copy of this request waits for it.
    pub(crate) order: Option<FenceGuard>,
    /// Whether P2P may be planned.
    pub(crate) p2p: Result<(), Reason>,
    /// Whether pages may be registered.
    pub(crate) dma: Result<(), Reason>,
    /// Threads that copy for this request, the caller included.
    pub(crate) copy_threads: usize,
    /// No page of it was cached a moment ago.
    pub(crate) is_absent: bool,
    /// Requests up to this length are served best by the kernel's read-ahead, as part of a sequential stream; 0 for
    /// none.
    pub(crate) readahead_limit: u64,
    /// What each route costs.
    pub(crate) costs: Arc<CostEntry>,
    /// The last field: dropping a file defers the close of its descriptors to workers that the runtime must still have.
    pub(crate) ctx: Arc<Reader>,
}

impl ReadParams {
    pub(crate) fn device(&self) -> &'static dyn Device {
        self.staging.device()
    }

    pub(crate) fn sys(&self) -> &'static dyn Syscalls {
        self.ctx.files.sys()
    }

    /// Unregisters what earlier requests registered of this range. Before anything moves: it waits for what moves.
    pub(crate) fn unpin_range(&self) {
        let Some(mapping) = self.file.cached_mapping(self.offset + self.len) else { return };
        let start = mapping.ptr.wrapping_add(self.offset as usize);
        self.ctx.files.unpin().unpin_overlapping(start, self.len as usize, || self.wait_for_program());
    }

    /// Waits for what the program had queued when the request began. Unregistering waits for it too, but in the driver, where
    /// no signal ends it.
    pub(crate) fn wait_for_program(&self) {
        // An error is reported when the stream is waited for.
        let _ = self.order.as_ref().map(|order| order.wait(WaitMode::Context));
    }

    /// The device address of a byte of the request.
    pub(crate) fn address(&self, offset: u64) -> DeviceAddr {
        self.dest.addr.offset(offset)
    }

    /// The descriptor through which a thread of this role reads the page cache.
    pub(crate) fn cached_fd(&self, role: Role) -> Fd {
        match role {
            Role::Caller | Role::CopyWorker => self.fd,
            Role::ShadowWorker => self.file.cached.get(),
        }
    }

    /// Whether a thread of this role can survey residency. Probes of another owner's file need a shadow descriptor.
    pub(crate) fn can_survey(&self, role: Role) -> bool {
        role == Role::ShadowWorker || self.file.residency_access != ResidencyAccess::NotPermitted
    }

    /// A mapping of the file. Only a shadow worker can make one.
    pub(crate) fn mapping(&self, role: Role) -> Option<Arc<Mapping>> {
        // A worker would only find out the same, at every read of a block device.
        if !self.file.is_mappable() {
            return None;
        }
        let (sys, end) = (self.sys(), self.offset + self.len);
        if role == Role::ShadowWorker {
            return self.file.mapping(sys, end);
        }
        self.file.cached_mapping(end).or_else(|| {
            let file = Arc::clone(&self.file);
            let workers = self.ctx.files.shadow_workers()?;
            workers.for_key(self.file.storage).run_blocking(move || file.mapping(sys, end))?
        })
    }
}
