//! A stream-ordered write: queued now, done when the stream gets there.
//!
//! ```text
//!   stream          ... work | copies into staging | host function: submit, wait | later work ...
//!   shadow worker                                                  └ pwrite ┘
//! ```
//!
//! The program may close its descriptor meanwhile, or reuse the number for another file. So when the write is queued, a
//! shadow worker duplicates the descriptor into the shadow fd table (`pidfd_getfd`): the same open file, with its
//! O_APPEND and other flags.
//!
//! A write that cannot be queued is done at once, and waited for: a write larger than the staging limit, a kernel
//! without `pidfd_getfd`, a device without host functions.
//!
//! Its memory comes from a pool that only stream-ordered transfers use: the stream may wait for the program, and the
//! program for a read. If that pool has no free buffers, it grows over its limit, up to twice of it. The rest is
//! ordinary memory, into which CUDA copies only while the caller waits: such a write waits for its stream.
//!
//! Known flaws:
//! - A shadow worker receives no signals, so a write past RLIMIT_FSIZE fails with EFBIG without SIGXFSZ.
//! - If the context of the device is lost before the stream gets there, the driver never calls the host function: the
//!   memory is lost and the result is never stored.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering::Release};
use std::time::Instant;

use spinio_device::{StreamId, StreamOrder, Target};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKey, FileKind};

use super::gather::{BufferSource, StagedWrite};
use super::scatter::advance;
use super::{Part, Result, WriteRequest, clip, pinned_reason, staging_limit};
use crate::ctx::Writer;
use spinio_host::is_cancelled;
use spinio_host::shadow_fd::ShadowFd;
use spinio_stats::{Direction, RequestSpan};
use spinio_transfer::Error;

/// Where to store the result: bytes written, or a negative errno.
#[derive(Clone, Copy)]
struct ResultPtr(*const AtomicIsize);

// SAFETY: it points to an atomic word, which the caller of the write keeps until the result is stored.
unsafe impl Send for ResultPtr {}

impl ResultPtr {
    fn store(self, result: core::result::Result<usize, Errno>) {
        if !self.0.is_null() {
            let value = result.map_or_else(|e| -(e.raw_os_error() as isize), |wrote| wrote as isize);
            // SAFETY: not null, and the caller of the write keeps the word.
            unsafe { &*self.0 }.store(value, Release);
        }
    }
}

/// A queued write.
struct StreamWrite {
    ctx: Arc<Writer>,
    shadow_fd: ShadowFd,
    staged: StagedWrite,
    offset: u64,
    /// A short write is continued, until all is written or the kernel says why not.
    all: bool,
    result: ResultPtr,
    span: RequestSpan,
}

// SAFETY: the vectors hold addresses of staging memory, which has one owner: this.
unsafe impl Send for StreamWrite {}

impl StreamWrite {
    /// Does the write. Runs on the driver's thread, after the copies.
    fn write(mut self) {
        self.staged.mark_complete();
        let started = Instant::now();
        let (kernel, fd, offset) = (self.ctx.files.sys(), self.shadow_fd.get(), self.offset);
        let key = self.shadow_fd.share_key();
        let (all, mut vectors) = (self.all, core::mem::take(&mut self.staged.vectors));
        // SAFETY: `self` owns the memory of the vectors until this function ends, which waits for the calls.
        let call = move |vectors: &[[usize; 2]], at| unsafe { kernel.pwritev(Route::Copy, fd, vectors, Some(at), 0) };
        let write = move || {
            let mut done = call(&vectors, offset)?;
            advance(&mut vectors, done);
            while all && !vectors.is_empty() {
                let wrote = call(&vectors, offset + done as u64)?;
                if wrote == 0 {
                    return Err(Errno::IO);
                }
                done += wrote;
                advance(&mut vectors, wrote);
            }
            Ok(done)
        };
        let wrote = self
            .ctx
            .files
            .shadow_workers()
            .and_then(|shadow| shadow.for_key(key).run_blocking(write))
            .unwrap_or(Err(Errno::IO));
        let stats = self.ctx.files.stats();
        if let Ok(wrote) = wrote {
            let reason = pinned_reason(self.staged.is_pinned(), Reason::IntoCache);
            stats.record_piece(&self.span, Route::Copy, reason, 0, wrote as u64, started);
        }
        let outcome = wrote.map_err(|e| Error::kernel(e, "write", offset, self.staged.len as u64));
        stats.end(&self.span, &Error::outcome(&outcome));
        self.result.store(wrote);
    }
}

/// The host function that the driver calls.
///
/// # Safety
/// `write` must come from `Box::into_raw`, and be passed once.
unsafe extern "C" fn on_stream_reached(write: *mut c_void) {
    // SAFETY: the caller's promise.
    let write = unsafe { Box::from_raw(write.cast::<StreamWrite>()) };
    let (ctx, span, result) = (Arc::clone(&write.ctx), write.span, write.result);
    if catch_unwind(AssertUnwindSafe(|| write.write())).is_err() {
        ctx.files.stats().end(&span, &Err(Errno::IO));
        result.store(Err(Errno::IO));
    }
}

/// The length of a stream-ordered write.
#[derive(Clone, Copy)]
pub(crate) enum StreamLen {
    /// The result may be less, as that of a `pwrite`.
    UpTo(usize),
    /// The result is all of the bytes, or an error: a short write is continued.
    All(usize),
}

impl Writer {
    /// Queues a write of device memory on `stream`. `result` is set when the stream has got there: the bytes written, or a
    /// negative errno. Work queued after it sees the file and the result.
    ///
    /// # Safety
    /// `result` must be null, or stay valid until it is set.
    pub(crate) unsafe fn write_async(
        self: &Arc<Self>,
        fd: Fd,
        at: u64,
        from: Target,
        len: StreamLen,
        stream: StreamId,
        result: *const AtomicIsize,
    ) -> Result<()> {
        let (len, all) = match len {
            StreamLen::UpTo(len) => (len, false),
            StreamLen::All(len) => (len, true),
        };
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
            // A graph would write its staging memory at each launch, when that holds other bytes.
            return Err(Error::kernel(Errno::BUSY, "write from a captured stream", at, len as u64));
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
        let shadow_fd = if len as u64 <= staging_limit(ctx) { dup_app_fd(ctx, fd, stat.key()) } else { None };
        if let Some(shadow_fd) = shadow_fd {
            let staged = StagedWrite::start(ctx, &streams, &parts, BufferSource::StreamPool, at)
                .inspect_err(|error| ctx.files.stats().end(&span, &Err(error.errno())))?;
            let write = Box::into_raw(Box::new(StreamWrite {
                ctx: Arc::clone(ctx),
                shadow_fd,
                staged,
                offset: at,
                all,
                result: result_ptr,
                span,
            }));
            // SAFETY: `on_stream_reached` takes the box, once.
            if unsafe { device.launch_host_func(stream, on_stream_reached, write.cast()) }.is_ok() {
                return Ok(());
            }
            // SAFETY: the device refused the box, so it is still owned here.
            drop(unsafe { Box::from_raw(write) });
        }
        // At once, after the work on the stream.
        let write = WriteRequest { ctx, fd, at: Some(at), flags: 0, parts: &parts, len, stat, span };
        let mut wrote = write.after_stream(&streams);
        while all
            && let Ok(done) = wrote
            && done < len
        {
            if is_cancelled() {
                wrote = Err(fail(Errno::INTR));
                break;
            }
            // Nothing is left of the work on the stream that this part would have to wait for.
            let rest = Target { addr: from.addr.offset(done as u64), ..from };
            wrote = match ctx.write(fd, Some(at + done as u64), rest, len - done) {
                Ok(0) => Err(fail(Errno::IO)),
                Ok(more) => Ok(done + more),
                Err(error) => Err(error),
            };
        }
        ctx.files.stats().end(&span, &Error::outcome(&wrote));
        result_ptr.store(wrote.as_ref().copied().map_err(|e| e.kind.errno()));
        wrote.map(drop)
    }
}

/// A duplicate of the program's descriptor, in the shadow fd table.
pub(super) fn dup_app_fd(ctx: &Arc<Writer>, fd: Fd, key: FileKey) -> Option<ShadowFd> {
    let workers = ctx.files.shadow_workers()?.for_key(key.dev);
    let (kernel, tid, close_queue) = (ctx.files.sys(), linux::gettid(), workers.close_queue());
    workers.run_blocking(move || {
        let shadow_fd = ShadowFd::new(kernel.dup_from_thread(tid, fd).ok()?, close_queue);
        kernel.is_file(shadow_fd.get(), key).then_some(shadow_fd)
    })?
}
