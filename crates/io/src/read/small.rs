//! Small reads: one kernel call into staging, one queued copy, return.
//!
//! ```text
//!   pread(program's descriptor) ──> slot of this processor's lane ──> copy queued ──> return
//! ```
//!
//! The program's own descriptor is read, so whatever the kernel says about it, its offset,
//! its locks, its read-ahead and its errors is what the program hears; nothing is kept
//! about the file but a hint (files/src/streams.rs), and nothing needs validating. The bytes are safe when the call returns
//! (CUDA's rule for pageable memory), not yet in the device.
//!
//! A slot keeps its block from being lent again, so what may wait without bound (a pipe, a socket) is read into other memory
//! first (blocking.rs). Positioned reads cannot be of those: the kernel refuses them with ESPIPE.
//!
//! Known flaw: a positioned read of a character device that keeps its reader waiting holds its slot meanwhile.

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

/// A `read` or `pread` of at most [`spinio_host::settings::SMALL`] bytes, all of them inside the allocation.
pub(crate) fn read(ctx: &Reader, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize, Error> {
    let stats = ctx.files.stats();
    let span = stats.begin_small(Direction::Read, fd, at, len as u64).with_device(to.allocation.device);
    let mut decision = (Route::Copy, Reason::Small);
    let got = read_staged(ctx, fd, at, to, len, &mut decision);
    stats.end_small(&span, decision.0, decision.1, &Error::outcome(&got));
    if span.is_timed() {
        ctx.files.ctx.home.update_gauges();
    }
    record_app_fd_read(ctx, fd, at, &got);
    got
}

/// How many bytes came; `way`: how, and why so, if not as most do.
fn read_staged(
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
        // SAFETY: host-mapped device memory inside its allocation.
        let got = unsafe { cpu_store::read(ctx, fd, at, to, len) }?;
        *decision = (Route::Store, Reason::HostMapped);
        return Ok(got);
    }
    if at.is_none() && blocking::descriptor_may_wait(ctx, fd) {
        return blocking::small(ctx, fd, to, len, &mut decision.1);
    }
    let app = device.app_stream();
    let stream = app.id();
    let staging = ctx.bounce.sync(device);
    let slice = staging.acquire_slice(len, stream).map_err(device_error)?;
    if !slice.pinned {
        decision.1 = Reason::NoPinnedMemory;
    }
    // SAFETY: the slot has `len` bytes.
    let got = match unsafe { read_fd(ctx, fd, at, slice.ptr, len) } {
        Ok(got) => got,
        Err(e) => {
            staging.release_slice(slice);
            return Err(kernel_error(e));
        }
    };
    if got > 0 {
        // SAFETY: the slot's block is retired behind this copy and not lent before it is done.
        let copied = unsafe { device.copy_in(stream, to.addr, slice.ptr, got) };
        staging.release_slice(slice);
        if copied.is_err() && at.is_none() {
            // The kernel has moved the offset for bytes that nobody gets.
            release_offset(ctx.files.sys(), fd, got as u64);
        }
        copied.map_err(device_error)?;
        if ctx.policy.must_wait(app) {
            device.synchronize(stream, WaitMode::Context).map_err(device_error)?;
        }
    } else {
        staging.release_slice(slice);
    }
    Ok(got)
}
