//! Reads of a stream that storage serves, up to the read-ahead window: one kernel call, one copy, and wait for it.
//!
//! ```text
//!   pread(program's descriptor) ──> a block of staging ──> copied ──> arrived ──> return
//!        │
//!        └─ the kernel reads ahead:  ──[ read ]──[ on its way ]──[ asked for when the reader gets here ]──>
//! ```
//!
//! The disk is the slowest of all here, and the kernel asks it for the next window when the reader comes to the last one.
//! All that a large read does besides, asking for size and residency, planning, sharing the work out, would keep the
//! reader from getting there. So such a read is made as a small one is: through the program's own descriptor, whatever
//! that names by now, with nothing to validate. That the stream is cold is a hint (files/src/streams.rs), which a check
//! every 512 KiB renews.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_device::WaitMode;
use spinio_plan::{Reason, Route};
use spinio_sys::linux::Fd;

use crate::ctx::Reader;
use crate::read::app_fd_calls::{read_fd, record_app_fd_read, release_offset};
use crate::read::{blocking, cpu_store};
use spinio_device::Target;
use spinio_stats::Direction;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// A `read` or `pread` of a cold stream, all of it inside the allocation; `None` if it is none, or too long.
pub(crate) fn read(ctx: &Reader, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Option<Result<usize, Error>> {
    if len > BUFFER_SIZE || !ctx.files.sequential.uses_kernel_readahead(fd, at, len as u64) {
        return None;
    }
    // The hint is about the number: by now it may be that of a socket, which keeps its reader waiting.
    if at.is_none() && blocking::descriptor_may_wait(ctx, fd) {
        return None;
    }
    let stats = ctx.files.stats();
    let span = stats.begin(Direction::Read, fd, at, len as u64).with_device(to.allocation.device);
    let mut decision = (Route::Copy, Reason::ReadAhead);
    let got = read_and_wait(ctx, fd, at, to, len, &mut decision);
    if let Ok(got @ 1..) = got {
        stats.record_piece(&span, decision.0, decision.1, 0, got as u64, span.start());
    }
    stats.end(&span, &Error::outcome(&got));
    ctx.files.ctx.home.update_gauges();
    record_app_fd_read(ctx, fd, at, &got);
    Some(got)
}

/// How many bytes came; `way`: how, and why so, if not as most do.
fn read_and_wait(
    ctx: &Reader,
    fd: Fd,
    at: Option<u64>,
    to: Target,
    len: usize,
    decision: &mut (Route, Reason),
) -> Result<usize, Error> {
    let device = to.allocation.device;
    let offset = at.unwrap_or(0);
    let kernel_error = |e| Error::kernel(e, "read", offset, len as u64);
    let device_error = |e| Error::device(e, "read", offset, len as u64);
    if !device.capabilities().has_dma_engine {
        decision.0 = Route::Store;
        // SAFETY: host-mapped device memory inside its allocation.
        return unsafe { cpu_store::read(ctx, fd, at, to, len) };
    }
    let stream = device.app_stream().id();
    let staging = ctx.bounce.sync(device);
    let block = staging.acquire().map_err(device_error)?;
    if !block.pinned {
        decision.1 = Reason::NoPinnedMemory;
    }
    // SAFETY: the block has at least `len` bytes.
    let got = match unsafe { read_fd(ctx, fd, at, block.ptr(), len) } {
        Ok(got @ 1..) => got,
        other => {
            staging.release(block);
            return other.map_err(kernel_error);
        }
    };
    // SAFETY: the block is kept until the copy is done, or retired behind it.
    let copied = unsafe { device.copy_in(stream, to.addr, block.ptr(), got) };
    match copied.and_then(|()| device.synchronize(stream, WaitMode::Context)) {
        Ok(()) => {
            staging.release(block);
            Ok(got)
        }
        Err(e) => {
            staging.release_after(block, stream);
            if at.is_none() {
                // The kernel has moved the offset for bytes that nobody gets.
                release_offset(ctx.files.sys(), fd, got as u64);
            }
            Err(device_error(e))
        }
    }
}
