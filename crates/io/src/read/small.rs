//! Small reads: one system call into a bounce buffer, one queued copy, return.
//!
//! ```text
//!   pread(program's descriptor) ──> slice of this processor's bounce buffer ──> copy queued ──> return
//! ```
//!
//! The program's own descriptor is read, so its offset, locks, read-ahead and errors are those of the kernel. Nothing
//! is kept about the file but a hint (files/src/sequential.rs), and nothing needs validating. When the call returns,
//! the bytes are in the bounce buffer and their copy is queued (CUDA's rule for pageable memory); they are not in the
//! device yet.
//!
//! A slice keeps its buffer from being used again, so files that may wait without bound (a pipe, a socket) are read
//! into other memory first (blocking.rs). Positioned reads cannot be of those: the kernel refuses them with ESPIPE.
//!
//! Known flaw: a positioned read of a character device that makes its reader wait keeps its slice meanwhile.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_device::WaitMode;
use spinio_plan::{Reason, Route};
use spinio_sys::linux::Fd;

use crate::ctx::Reader;
use crate::decide::unsurveyed_route;
use crate::read::app_fd_calls::{read_fd, record_app_fd_read, release_offset};
use crate::read::{blocking, cpu_store};
use spinio_device::Target;
use spinio_stats::Direction;
use spinio_transfer::Error;

/// A `read` or `pread` of at most [`spinio_host::settings::SMALL_REQUEST_MAX`] bytes, all of them inside the
/// allocation.
pub(crate) fn read(ctx: &Reader, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize, Error> {
    let stats = ctx.files.stats();
    let span = stats.begin_small(Direction::Read, Some(to.allocation.device), fd, at, len as u64);
    let (route, mut reason) = unsurveyed_route(to.allocation.device.capabilities(), Reason::Small);
    let got = match route {
        // SAFETY: host-mapped device memory inside its allocation.
        Route::Store => unsafe { cpu_store::read(ctx, fd, at, to, len) },
        _ => read_staged(ctx, fd, at, to, len, &mut reason),
    };
    stats.end_small(&span, route, reason, &Error::outcome(&got));
    if span.is_timed() {
        ctx.files.ctx.stats_region.update_gauges();
    }
    record_app_fd_read(ctx, fd, at, &got);
    got
}

/// The bytes delivered. `reason` changes where there is no pinned memory.
fn read_staged(
    ctx: &Reader,
    fd: Fd,
    at: Option<u64>,
    to: Target,
    len: usize,
    reason: &mut Reason,
) -> Result<usize, Error> {
    let device = to.allocation.device;
    let offset = at.unwrap_or(0);
    let kernel_error = |e| Error::kernel(e, "read", offset, len as u64);
    let device_error = |e| Error::device(e, "read", offset, len as u64);
    if at.is_none() && blocking::descriptor_may_wait(ctx, fd) {
        return blocking::small(ctx, fd, to, len, reason);
    }
    let app = device.app_stream();
    let stream = app.id();
    let staging = ctx.bounce.sync(device);
    let slice = staging.acquire_slice(len, stream).map_err(device_error)?;
    if !slice.pinned {
        *reason = Reason::NoPinnedMemory;
    }
    // SAFETY: the slice has `len` bytes.
    let got = match unsafe { read_fd(ctx, Route::Copy, fd, at, slice.ptr, len) } {
        Ok(got) => got,
        Err(e) => {
            staging.release_slice(slice);
            return Err(kernel_error(e));
        }
    };
    if got > 0 {
        // SAFETY: the buffer of the slice is released after this copy and not used again before it is done.
        let mut copied = unsafe { device.copy_in(stream, to.addr, slice.ptr, got) };
        staging.release_slice(slice);
        if copied.is_ok() && ctx.policy.must_wait(app) {
            copied = device.synchronize(stream, WaitMode::Context);
        }
        if copied.is_err() && at.is_none() {
            // The kernel has moved the offset for bytes that the program does not get.
            release_offset(ctx.files.sys(), fd, got as u64);
        }
        copied.map_err(device_error)?;
    } else {
        staging.release_slice(slice);
    }
    Ok(got)
}
