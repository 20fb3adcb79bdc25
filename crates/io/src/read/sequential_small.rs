//! Reads of a sequential stream that storage serves, up to the read-ahead window: one system call, one copy, and wait
//! for it.
//!
//! ```text
//!   pread(program's descriptor) ──> bounce buffer ──> copied ──> arrived ──> return
//!        │
//!        └─ the kernel reads ahead:  ──[ read ]──[ in flight ]──[ requested when the reader gets here ]──>
//! ```
//!
//! The disk is the slowest part, and the kernel requests the next window when the reader comes to the last one. All
//! that a large read does besides (size, residency, plan, sharing the work) would delay the reader. So such a read is
//! made as a small one is: through the program's own descriptor, whatever that refers to by now, with nothing to
//! validate. That the stream is cold is a hint (files/src/sequential.rs), which a check every 512 KiB renews.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_device::WaitMode;
use spinio_plan::{Reason, Route};
use spinio_sys::linux::Fd;

use crate::ctx::Reader;
use crate::decide::unsurveyed_route;
use crate::read::app_fd_calls::{
    hold_signals_of_stream, read_fd, record_app_fd_read, release_offset, share_key_unless,
};
use crate::read::{blocking, cpu_store};
use spinio_device::Target;
use spinio_host::shares::ShareKey;
use spinio_stats::Direction;
use spinio_transfer::Error;

/// A `read` or `pread` of a cold stream, at most a bounce buffer, all of it inside the allocation; `None` if it may
/// wait without bound.
pub(crate) fn read(ctx: &Reader, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Option<Result<usize, Error>> {
    // The hint is about the number: by now it may be that of a socket, which makes its reader wait.
    if at.is_none() && blocking::descriptor_may_wait(ctx, fd) {
        return None;
    }
    // Declared first, released last: a handler that jumps out of here leaves nothing of this read in use.
    let held = hold_signals_of_stream(ctx, fd);
    let stats = ctx.files.stats();
    let span = stats.begin(Direction::Read, fd, at, len as u64).with_device(to.allocation.device);
    let (route, mut reason) = unsurveyed_route(to.allocation.device.capabilities(), Reason::ReadAhead);
    let got = match route {
        // SAFETY: host-mapped device memory inside its allocation.
        Route::Store => unsafe { cpu_store::read(ctx, fd, at, to, len) },
        _ => read_and_wait(ctx, fd, at, to, len, (share_key_unless(ctx, fd, held.is_some()), &mut reason)),
    };
    if let Ok(got @ 1..) = got {
        stats.record_piece(&span, route, reason, 0, got as u64, span.start());
    }
    stats.end(&span, &Error::outcome(&got));
    ctx.files.ctx.stats_region.update_gauges();
    record_app_fd_read(ctx, fd, at, &got);
    Some(got)
}

/// The bytes delivered. `share_key`: of the file system's share of bounce buffers. `reason` changes where there is no pinned
/// memory.
fn read_and_wait(
    ctx: &Reader,
    fd: Fd,
    at: Option<u64>,
    to: Target,
    len: usize,
    (share_key, reason): (Option<ShareKey>, &mut Reason),
) -> Result<usize, Error> {
    let device = to.allocation.device;
    let offset = at.unwrap_or(0);
    let kernel_error = |e| Error::kernel(e, "read", offset, len as u64);
    let device_error = |e| Error::device(e, "read", offset, len as u64);
    let stream = device.app_stream().id();
    let staging = ctx.bounce.sync(device);
    let share = share_key.map(|key| staging.share(key));
    let buffer = staging.acquire().map_err(device_error)?;
    if !buffer.pinned {
        *reason = Reason::NoPinnedMemory;
    }
    // SAFETY: the buffer has at least `len` bytes.
    let got = unsafe { read_fd(ctx, Route::Copy, fd, at, buffer.ptr(), len) };
    drop(share);
    let got = match got {
        Ok(got @ 1..) => got,
        other => {
            staging.release(buffer);
            return other.map_err(kernel_error);
        }
    };
    // SAFETY: the buffer is kept until the copy is done, or released after it.
    let copied = unsafe { device.copy_in(stream, to.addr, buffer.ptr(), got) };
    match copied.and_then(|()| device.synchronize(stream, WaitMode::Context)) {
        Ok(()) => {
            staging.release(buffer);
            Ok(got)
        }
        Err(e) => {
            staging.release_after(buffer, stream);
            if at.is_none() {
                // The kernel has moved the offset for bytes that the program does not get.
                release_offset(ctx.files.sys(), fd, got as u64);
            }
            Err(device_error(e))
        }
    }
}
