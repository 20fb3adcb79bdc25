//! A read by a given schedule, for measuring. It uses the same request, engines and workers as any large read.
//!
//! ```text
//!   one transfer at a time    one segment of s bytes
//!   commands in flight        n segments of s bytes, end to end, in any order
//! ```
//!
//! So the measured time is the cost of a plan when it runs, not what the device could do otherwise.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spinio_plan::{Calibration, Model, Reason, Route, Segment};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use crate::ctx::Reader;
use crate::read::params::ReadParams;
use crate::read::request::ReadRequest;
use crate::read::work::pieces_of;
use crate::read::{by_caller, large};
use spinio_device::Target;
use spinio_files::FileState;
use spinio_files::cost::ModelKey;
use spinio_host::HeldSignals;
use spinio_stats::Direction;
use spinio_transfer::Error;

type Result<T> = core::result::Result<T, Error>;

/// A file and a device buffer, for reads by given schedules.
pub struct MeasuredRead<'a> {
    ctx: &'a Arc<Reader>,
    file: Arc<FileState>,
    fd: Fd,
    to: Target,
    size: u64,
}

impl Reader {
    /// Prepares measured reads of `fd` into `to`.
    pub fn measured_read(self: &Arc<Self>, fd: Fd, to: Target) -> Result<MeasuredRead<'_>> {
        let ctx = self;
        let fail = |e| Error::kernel(e, "measure", 0, 0);
        let stat = ctx.files.sys().fstat(fd).map_err(fail)?;
        if stat.kind == FileKind::Other {
            return Err(fail(Errno::SPIPE));
        }
        ctx.files.shadow_workers().ok_or(fail(Errno::NOSYS))?;
        let file = ctx.files.get(fd, stat).map_err(|_| fail(Errno::OPNOTSUPP))?;
        let size = if stat.kind == FileKind::Regular { stat.size } else { file.size };
        Ok(MeasuredRead { ctx: self, file, fd, to, size })
    }
}

impl MeasuredRead<'_> {
    /// The key of the cost model of this file and device.
    pub fn key(&self) -> ModelKey {
        self.cost_entry().key().clone()
    }

    fn cost_entry(&self) -> Arc<spinio_files::cost::CostEntry> {
        let ctx = self.ctx;
        ctx.files.cost_entry(&self.file, self.to.allocation.device)
    }

    /// The stored calibration in use, if there is one.
    pub fn calibration(&self) -> Option<Calibration> {
        self.cost_entry().calibration().cloned()
    }

    /// The cost model in use. `storage`: the route to storage.
    pub fn model(&self, storage: Route) -> Model {
        self.cost_entry().model(&self.ctx.files.ctx, &self.file, storage)
    }

    /// The number of threads that copy for one request.
    pub fn threads(&self) -> usize {
        self.ctx.files.workers().copy_threads().few()
    }

    /// The same, restricted to the first `len` bytes of the file.
    #[must_use]
    pub fn within(&self, len: u64) -> MeasuredRead<'_> {
        let MeasuredRead { ctx, fd, to, size, .. } = *self;
        MeasuredRead { ctx, file: Arc::clone(&self.file), fd, to, size: size.min(len) }
    }

    /// Size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The alignment of reads from storage, in bytes.
    pub fn align(&self) -> u64 {
        u64::from(self.file.direct_align.offset).max(512)
    }

    /// Whether a route can be measured, or the reason why not.
    pub fn allows(&self, route: Route) -> core::result::Result<(), Reason> {
        let ctx = self.ctx;
        let capabilities = self.to.allocation.device.capabilities();
        if !ctx.policy.allows(route) {
            return Err(Reason::BySetting);
        }
        match route {
            Route::Copy if capabilities.has_dma_engine => Ok(()),
            Route::Store if self.to.allocation.host_mapped => Ok(()),
            Route::Dma if capabilities.can_pin && self.file.is_mappable() => {
                if self.file.pin_refused.load(Relaxed) {
                    Err(Reason::PinRefused)
                } else {
                    Ok(())
                }
            }
            Route::Direct if capabilities.has_dma_engine => {
                self.file.direct_fd.as_ref().map(drop).map_err(|reason| *reason)
            }
            Route::P2p => large::check_p2p(ctx, &self.file, self.to, 0, self.size.min(1 << 20), false),
            Route::Dma => Err(Reason::PinRefused),
            // Stores need a mapping, copies a DMA engine.
            Route::Copy | Route::Direct | Route::Store | Route::Gather => Err(Reason::NoP2pMapping),
        }
    }

    /// Reads by these segments, in the order given. They must begin at 0 and cover a range without gaps. Returns the
    /// time from the start of the first piece to the arrival of the last byte.
    pub fn run(&self, offset: u64, segments: &[Segment]) -> Result<Duration> {
        let ctx = self.ctx;
        let len: u64 = segments.iter().map(|s| s.len).sum();
        let fail = |e| Error::kernel(e, "measure", offset, len);
        let available = self.to.allocation.bytes_left(self.to.addr);
        let covered = segments.iter().all(|s| s.len > 0 && s.offset.checked_add(s.len).is_some_and(|end| end <= len));
        if len == 0 || len > available || offset.checked_add(len).is_none_or(|end| end > self.size) || !covered {
            return Err(fail(Errno::INVAL));
        }
        let device = self.to.allocation.device;
        ctx.files.workers().copy();
        let device_fail = |e| Error::device(e, "measure", offset, len);
        let order = device.app_stream().fence(device).map_err(device_fail)?;
        let in_flight = ctx.files.unpin().begin_request();
        let started = Instant::now();
        let span = ctx.files.stats().begin(Direction::Read, self.fd, Some(offset), len);
        let params = ReadParams {
            is_absent: false,
            span,
            ctx: Arc::clone(ctx),
            file: Arc::clone(&self.file),
            staging: Arc::clone(ctx.bounce.sync(device)),
            dest: self.to,
            fd: self.fd,
            offset,
            len,
            order,
            p2p: Ok(()),
            dma: Ok(()),
            copy_threads: self.threads(),
            readahead_limit: 0,
            costs: self.cost_entry(),
        };
        params.unpin_range();
        let held = self.file.is_local().then(HeldSignals::hold);
        let by_caller = by_caller::read(&params, &pieces_of(segments));
        drop(held);
        let (got, rerouted) = match by_caller {
            Some(got) => (Ok(got), false),
            None => {
                let request = Arc::new(ReadRequest::new(params));
                request.queue_segments(segments);
                request.wake_workers();
                let got = request.finish();
                (got, request.rerouted.load(Relaxed))
            }
        };
        ctx.files.stats().end(&span, &got.as_ref().map(|n| *n as usize).map_err(Error::errno));
        let elapsed = started.elapsed();
        drop(in_flight);
        ctx.files.unpin().watch();
        if got? < len {
            return Err(fail(Errno::IO));
        }
        // A piece that fell back to another route was not measured.
        if rerouted { Err(fail(Errno::OPNOTSUPP)) } else { Ok(elapsed) }
    }

    /// Drops the cached pages of a range.
    pub fn evict(&self, offset: u64, len: u64) {
        let _ = linux::fadvise(self.fd, offset, len, linux::Advice::DontNeed);
    }
}
