//! A write in the order of a stream: queued now, made when the stream gets there.
//!
//! ```text
//!   stream     ... work | copies into staging | host function: ask a keeper, wait for it | later work ...
//!   keeper                                                       └ pwrite ┘
//! ```
//!
//! The program may close its descriptor meanwhile, or give the number to another file. So a keeper takes the very
//! descriptor into its own table (`pidfd_getfd`) when the write is queued: the same open file, with its O_APPEND and all.
//!
//! What cannot be done later is done at once, and waited for: a write larger than the staging bound, a kernel without
//! `pidfd_getfd`, a device without host functions.
//!
//! Its memory is of a ring that only such moves use: the queue may wait for the program, and the program for a read. What
//! that ring has not it gets beyond its bound, up to twice as much. The rest is ordinary memory, into which CUDA copies
//! only while the caller waits: such a write waits for its stream.
//!
//! Known flaws: a keeper takes no signals, so a write beyond RLIMIT_FSIZE says EFBIG without SIGXFSZ. If the context of
//! the device dies before the stream gets there, the driver never calls: the memory is lost and the result never comes.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering::Release};
use std::time::Instant;

use spinio_device::{StreamId, StreamOrder, Target};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use super::gather::{BufferSource, StagedWrite};
use super::{Part, Result, WriteRequest, clip, pinned_reason, staging_limit};
use crate::ctx::Writer;
use spinio_host::shadow_fd::ShadowFd;
use spinio_stats::{Direction, RequestSpan};
use spinio_transfer::Error;

/// Where a result goes: bytes written, or an errno below zero.
#[derive(Clone, Copy)]
struct ResultPtr(*const AtomicIsize);

// SAFETY: an atomic word; who asked for the write keeps it until the result is there.
unsafe impl Send for ResultPtr {}

impl ResultPtr {
    fn store(self, result: core::result::Result<usize, Errno>) {
        if !self.0.is_null() {
            let value = result.map_or_else(|e| -(e.raw_os_error() as isize), |wrote| wrote as isize);
            // SAFETY: not null, and kept by the caller's promise.
            unsafe { &*self.0 }.store(value, Release);
        }
    }
}

/// A write that waits for its stream.
struct StreamWrite {
    ctx: Arc<Writer>,
    shadow_fd: ShadowFd,
    staged: StagedWrite,
    offset: u64,
    result: ResultPtr,
    span: RequestSpan,
}

// SAFETY: the vectors hold addresses of staging memory, which has one owner: this.
unsafe impl Send for StreamWrite {}

impl StreamWrite {
    /// On the driver's thread, once the bytes are there.
    fn write(mut self) {
        self.staged.mark_complete();
        let started = Instant::now();
        let (kernel, fd, offset) = (self.ctx.files.sys(), self.shadow_fd.get(), self.offset);
        let key = self.shadow_fd.share_key();
        let vectors = core::mem::take(&mut self.staged.vectors);
        // SAFETY: the memory of the vectors is ours until this function ends, which waits for the answer.
        let call = move || unsafe { kernel.pwritev(Route::Copy, fd, &vectors, Some(offset), 0) };
        let wrote = self
            .ctx
            .files
            .shadow_workers()
            .and_then(|shadow| shadow.for_key(key).run_blocking(call))
            .unwrap_or(Err(Errno::IO));
        let stats = self.ctx.files.stats();
        if let Ok(wrote) = wrote {
            let why = pinned_reason(self.staged.is_pinned(), Reason::IntoCache);
            stats.record_piece(&self.span, Route::Copy, why, 0, wrote as u64, started);
        }
        let outcome = wrote.map_err(|e| Error::kernel(e, "write", offset, self.staged.len as u64));
        stats.end(&self.span, &Error::outcome(&outcome));
        self.result.store(wrote);
    }
}

/// What the driver calls.
///
/// # Safety
/// `later` must come from `Box::into_raw`, once.
unsafe extern "C" fn on_stream_reached(write: *mut c_void) {
    // SAFETY: the caller's promise.
    let write = unsafe { Box::from_raw(write.cast::<StreamWrite>()) };
    let (ctx, watch, result) = (Arc::clone(&write.ctx), write.span, write.result);
    if catch_unwind(AssertUnwindSafe(|| write.write())).is_err() {
        ctx.files.stats().end(&watch, &Err(Errno::IO));
        result.store(Err(Errno::IO));
    }
}

impl Writer {
    /// Queues a `pwrite` of device memory on `queue` (CUDA: a stream). `result` is set when the stream has got there:
    /// the bytes written, or an errno below zero. What is queued behind it sees both.
    ///
    /// # Safety
    /// `result` must be null, or stay until it is set.
    pub unsafe fn write_async(
        self: &Arc<Self>,
        fd: Fd,
        at: u64,
        from: Target,
        len: usize,
        stream: StreamId,
        result: *const AtomicIsize,
    ) -> Result<()> {
        let ctx = self;
        let device = from.allocation.device;
        let fail = |e| Error::kernel(e, "write", at, len as u64);
        let stat = ctx.files.sys().fstat(fd).map_err(fail)?;
        if i64::try_from(at).is_err() {
            return Err(fail(Errno::INVAL));
        }
        if stat.kind == FileKind::Other {
            return Err(fail(Errno::SPIPE));
        }
        if device.is_capturing(stream) {
            // A graph would write its staging memory at each launch, when it holds other bytes.
            return Err(Error::kernel(Errno::BUSY, "write from a captured queue", at, len as u64));
        }
        let status = ctx.files.sys().status_flags(fd).map_err(fail)?;
        if status & linux::O_ACCMODE as i32 == linux::O_RDONLY as i32 {
            return Err(fail(Errno::BADF));
        }
        let parts = clip(&[Part::Device(from, len)]).map_err(fail)?;
        let span = ctx.files.stats().begin(Direction::Write, fd, Some(at), len as u64).with_device(device);
        let streams = [StreamOrder::explicit(device, stream)];
        let result_ptr = ResultPtr(result);
        let len: usize = parts.iter().map(Part::len).sum();
        let shadow_fd = if len as u64 <= staging_limit(ctx) { dup_app_fd(ctx, fd, (stat.dev, stat.ino)) } else { None };
        if let Some(twin) = shadow_fd {
            let staged = StagedWrite::start(ctx, &streams, &parts, BufferSource::StreamPool, at)
                .inspect_err(|error| ctx.files.stats().end(&span, &Err(error.errno())))?;
            let write = Box::into_raw(Box::new(StreamWrite {
                ctx: Arc::clone(ctx),
                shadow_fd: twin,
                staged,
                offset: at,
                result: result_ptr,
                span,
            }));
            // SAFETY: `called` takes the box, once.
            if unsafe { device.launch_host_func(stream, on_stream_reached, write.cast()) }.is_ok() {
                return Ok(());
            }
            // SAFETY: the device did not take it.
            drop(unsafe { Box::from_raw(write) });
        }
        // At once, behind what is on the queue.
        let write = WriteRequest { ctx, fd, at: Some(at), flags: 0, parts: &parts, len, stat, span };
        let wrote = write.after_stream(&streams);
        ctx.files.stats().end(&span, &Error::outcome(&wrote));
        result_ptr.store(wrote.as_ref().copied().map_err(|e| e.kind.errno()));
        wrote.map(drop)
    }
}

/// The program's own descriptor, in the keepers' table.
pub(super) fn dup_app_fd(ctx: &Arc<Writer>, fd: Fd, key: (u64, u64)) -> Option<ShadowFd> {
    let shadow = ctx.files.shadow_workers()?.for_key(key.0);
    let (kernel, tid, close_queue) = (ctx.files.sys(), linux::gettid(), shadow.close_queue());
    shadow.run_blocking(move || {
        let shadow_fd = ShadowFd::new(kernel.dup_from_thread(tid, fd).ok()?, close_queue);
        kernel.is_file(shadow_fd.get(), key).then_some(shadow_fd)
    })?
}
