//! Reads that may wait without bound: of pipes, sockets, terminals, devices, and of files whose size says nothing.
//!
//! ```text
//!   read(socket) ──> memory of this read alone ── waits for the peer ──> bytes
//!        up to 64 KiB   ──> slice of a bounce buffer, copy queued, return
//!        more           ──> copied on the program's stream, and waited for
//! ```
//!
//! Nothing that other reads need is in use while the kernel waits (wait_buffer.rs). The copy is ordered after what the
//! program has queued by the time the bytes are there, as if it read into host memory and called `cudaMemcpy`.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::time::Instant;

use spinio_device::{DeviceError, ErrorKind, StreamOrder, Target, WaitMode};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{Fd, FileKind, Stat};

use super::app_fd::AppFdRead;
use super::app_fd_calls::read_fd;
use crate::ctx::Reader;
use spinio_files::SameFile;
use spinio_host::is_cancelled;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Whether the kernel may make a reader of this file wait without bound. A regular file without a size may be one of
/// procfs or tracefs, or a stream of FUSE.
pub(super) fn may_wait(stat: &Stat) -> bool {
    match stat.kind {
        FileKind::Other => true,
        FileKind::Regular => stat.size == 0,
        FileKind::Block => false,
    }
}

/// Whether a read at the descriptor's own offset may wait so. One system call, if the descriptor is not known.
pub(super) fn descriptor_may_wait(ctx: &Reader, fd: Fd) -> bool {
    let mut waits = false;
    ctx.files.prompt_fds.is_known(fd, || {
        let stat = ctx.files.sys().fstat(fd);
        waits = stat.as_ref().is_ok_and(may_wait);
        stat.is_ok() && !waits
    });
    waits
}

fn no_memory() -> DeviceError {
    DeviceError::new(ErrorKind::NoMemory, "memory for a read")
}

/// A small read at the descriptor's own offset; `reason` changes where there is no pinned memory.
pub(super) fn small(ctx: &Reader, fd: Fd, to: Target, len: usize, reason: &mut Reason) -> Result<usize, Error> {
    let device_error = |e| Error::device(e, "read", 0, len as u64);
    let device = to.allocation.device;
    let buffer = ctx.wait_buffers.acquire(len).ok_or_else(|| device_error(no_memory()))?;
    // SAFETY: the buffer has `len` bytes.
    let got = unsafe { read_fd(ctx, Route::Copy, fd, None, buffer.ptr(), len) };
    let got = got.map_err(|e| Error::kernel(e, "read", 0, len as u64))?;
    if got == 0 {
        return Ok(0);
    }
    let app = device.app_stream();
    let stream = app.id();
    let staging = ctx.bounce.sync(device);
    let slice = staging.acquire_slice(got, stream).map_err(device_error)?;
    if !slice.pinned {
        *reason = Reason::NoPinnedMemory;
    }
    // SAFETY: the kernel has filled `got` bytes of the buffer, and the slice has as many, elsewhere.
    unsafe { buffer.ptr().copy_to_nonoverlapping(slice.ptr, got) };
    // SAFETY: the buffer of the slice is released after this copy and not used again before it is done.
    let queued = unsafe { device.copy_in(stream, to.addr, slice.ptr, got) };
    staging.release_slice(slice);
    queued.map_err(device_error)?;
    if ctx.policy.must_wait(app) {
        device.synchronize(stream, WaitMode::Context).map_err(device_error)?;
    }
    Ok(got)
}

impl AppFdRead {
    /// Reads into memory of this read alone, and copies what came. At least one call of the kernel; the bytes
    /// delivered.
    pub(super) fn blocking(&self, ctx: &Reader) -> Result<usize, Error> {
        let device = self.to.allocation.device;
        let fail = |e| Error::device(e, "read", self.at.unwrap_or(0), self.len as u64);
        let buffer = ctx.wait_buffers.acquire(self.len.min(BUFFER_SIZE)).ok_or_else(|| fail(no_memory()))?;
        let file = SameFile::of(ctx.files.sys(), self.fd);
        let mut done = 0;
        let ended = loop {
            let begun = Instant::now();
            let want = (self.len - done).min(BUFFER_SIZE);
            let at = self.at.map(|at| at + done as u64);
            // SAFETY: the buffer has as many bytes as the longest piece.
            let got = match unsafe { read_fd(ctx, Route::Copy, self.fd, at, buffer.ptr(), want) } {
                Ok(got) => got,
                Err(e) => break Err(Error::kernel(e, "read", self.at.unwrap_or(0) + done as u64, want as u64)),
            };
            // Another thread may have closed the descriptor since the last piece, and opened another file as the same
            // number.
            if got == 0 || (done > 0 && !file.is_same(ctx.files.sys())) {
                break Ok(());
            }
            let stream = StreamOrder::app(device);
            // SAFETY: the buffer stays until the queue is drained, here or below; the bytes lie inside the allocation.
            let copied = unsafe { device.copy_in(stream.id(), self.to.addr.offset(done as u64), buffer.ptr(), got) };
            if let Err(e) = copied.and_then(|()| stream.synchronize(WaitMode::Context)) {
                // The device cannot say that it has read all.
                buffer.leak();
                return if done == 0 { Err(fail(e)) } else { Ok(done) };
            }
            ctx.files.stats().record_piece(
                &self.span,
                Route::Copy,
                self.reason,
                self.done + done as u64,
                got as u64,
                begun,
            );
            done += got;
            if got < want || self.single_call || done == self.len || is_cancelled() {
                break Ok(());
            }
        };
        match ended {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }
}
