//! Reads that only the program's own descriptor can make: of pipes and sockets (blocking.rs), of files that cannot be
//! reopened, and in processes without workers. Buffer by buffer through bounce buffers, on the caller's thread.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::time::Instant;

use spinio_device::{Device, DeviceError, FenceGuard, StreamId, StreamOrder, Target, WaitMode};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, Fd};

use crate::ctx::Reader;
use crate::read::app_fd_calls::{hold_signals, read_fd, release_offset, share_key_unless};
use crate::read::cpu_store;
use spinio_files::SameFile;
use spinio_host::{deliver_now, is_cancelled};
use spinio_stats::RequestSpan;
use spinio_transfer::Error;
use spinio_transfer::bounce::{BUFFER_SIZE, Policy};

/// What to read.
pub(crate) struct AppFdRead {
    /// The request that it is part of, and how many of that one's bytes came before.
    pub(crate) span: RequestSpan,
    pub(crate) done: u64,
    pub(crate) fd: Fd,
    /// `None`: at the descriptor's own offset.
    pub(crate) at: Option<u64>,
    pub(crate) to: Target,
    pub(crate) len: usize,
    /// One kernel call only, as for a pipe, where a second one could block.
    pub(crate) single_call: bool,
    pub(crate) reason: Reason,
    /// The stream of the copies, which are not waited for; `None`: after what the program has queued, and waited for.
    pub(crate) stream: Option<StreamId>,
    /// The kernel may make the reader wait without bound.
    pub(crate) waits: bool,
}

impl AppFdRead {
    /// Reads; the bytes delivered.
    pub(crate) fn read(&self, ctx: &Reader) -> Result<usize, Error> {
        let device = self.to.allocation.device;
        if !device.capabilities().has_dma_engine {
            return self.store(ctx);
        }
        if self.waits {
            deliver_now();
            return self.blocking(ctx);
        }
        // Declared first, released last, as in large.rs.
        let held = hold_signals(ctx, self.fd);
        let share_key = share_key_unless(ctx, self.fd, held.is_some());
        let fail = |e| Error::device(e, "read", self.at.unwrap_or(0), self.len as u64);
        let staging = match self.stream {
            Some(_) => ctx.bounce.stream(device),
            None => ctx.bounce.sync(device),
        };
        let order = match self.stream {
            Some(_) => None,
            None => device.app_stream().fence(device).map_err(fail)?,
        };
        // Acquired when there is something to copy: there are few, and a server may not answer.
        let mut stream = None;
        let mut done = 0;
        let mut ended = Ok(());
        let file = SameFile::of(ctx.files.sys(), self.fd);
        while done < self.len {
            linux::deliver_default_signals();
            let started = Instant::now();
            let want = (self.len - done).min(BUFFER_SIZE);
            let share = share_key.map(|key| staging.share(key));
            let buffer = match self.stream.map_or(Ok(None), |_| staging.try_acquire(Policy::UpToTwiceLimit)) {
                Ok(Some(buffer)) => Ok(buffer),
                _ => staging.acquire(),
            };
            let buffer = match buffer {
                Ok(buffer) => buffer,
                Err(e) => {
                    ended = Err(fail(e));
                    break;
                }
            };
            let at = self.at.map(|at| at + done as u64);
            // SAFETY: a bounce buffer has `BUFFER_SIZE` bytes.
            let got = unsafe { read_fd(ctx, Route::Copy, self.fd, at, buffer.ptr(), want) };
            drop(share);
            let got = match got {
                Ok(got) => got,
                Err(e) => {
                    staging.release(buffer);
                    ended = Err(Error::kernel(e, "read", self.at.unwrap_or(0) + done as u64, want as u64));
                    break;
                }
            };
            let more = got == want && !self.single_call && done + got < self.len;
            // Another thread may have closed the descriptor since the last buffer, and opened another file as the same
            // number; a host read would have continued with the first one. The first buffer has bytes of one file.
            let same = (done == 0 && !more) || file.is_same(ctx.files.sys());
            if got == 0 || (done > 0 && !same) {
                staging.release(buffer);
                break;
            }
            let reason = if buffer.pinned { self.reason } else { Reason::NoPinnedMemory };
            let copied = self.open_stream(device, &mut stream, order.as_ref()).and_then(|id| {
                // SAFETY: the buffer is released after the copy; the bytes lie inside the allocation.
                unsafe { device.copy_in(id, self.to.addr.offset(done as u64), buffer.ptr(), got) }.map(|()| id)
            });
            match copied {
                Ok(id) => staging.release_after(buffer, id),
                Err(e) => {
                    // Earlier copies are waited for below, and reported.
                    staging.release(buffer);
                    self.release_offset(ctx, got);
                    ended = Err(fail(e));
                    break;
                }
            }
            done += got;
            ctx.files.stats().record_piece(
                &self.span,
                Route::Copy,
                reason,
                self.done + (done - got) as u64,
                got as u64,
                started,
            );
            if !more || !same || is_cancelled() {
                break;
            }
        }
        if self.stream.is_none()
            && done > 0
            && let Some(stream) = &stream
            && let Err(e) = stream.synchronize(WaitMode::Context)
        {
            self.release_offset(ctx, done);
            return Err(fail(e));
        }
        match ended {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }

    /// The stream of the copies.
    fn open_stream(
        &self,
        device: &'static dyn Device,
        opened: &mut Option<StreamOrder>,
        order: Option<&FenceGuard>,
    ) -> Result<StreamId, DeviceError> {
        if let Some(stream) = opened {
            return Ok(stream.id());
        }
        let stream = match self.stream {
            Some(stream) => StreamOrder::explicit(device, stream),
            None => StreamOrder::after(device, order)?,
        };
        Ok(opened.insert(stream).id())
    }

    /// The kernel has moved the descriptor's own offset for bytes that the program does not get.
    fn release_offset(&self, ctx: &Reader, unused: usize) {
        if self.at.is_none() {
            release_offset(ctx.files.sys(), self.fd, unused as u64);
        }
    }

    /// Without a DMA engine the kernel stores into the device's memory itself.
    fn store(&self, ctx: &Reader) -> Result<usize, Error> {
        let started = Instant::now();
        // SAFETY: host-mapped device memory inside its allocation.
        let got = unsafe { cpu_store::read(ctx, self.fd, self.at, self.to, self.len) }?;
        ctx.files.stats().record_piece(&self.span, Route::Store, self.reason, self.done, got as u64, started);
        Ok(got)
    }
}
