//! Reads: file to device.
//!
//! ```text
//!   Runtime::read ── decide.rs: which of these
//!     │ up to 64 KiB                           small.rs             one page-cache read into a bounce slice, one queued copy
//!     │ sequential and absent, up to 1 MiB     sequential_small.rs  the same, and wait for the copy
//!     │ unseekable files, app's O_DIRECT ...   app_fd.rs            buffer by buffer through the program's descriptor
//!     │   of these, what may wait unbounded    blocking.rs          into memory of its own (wait_buffer.rs)
//!     │   of these, host-mapped destinations   cpu_store.rs
//!     │ the rest                               large.rs
//!     │   of these, absent and P2P all of it   by_caller.rs         one system call of the caller
//!     ▼
//!   params.rs        one large read, as it came
//!   request/         its state and completion; queue.rs: pieces in, work out; dispatch.rs: loops and wake-ups
//!   plan_range.rs    residency ─> plan ─> pieces, one range at a time
//!   work.rs          what a thread takes from the queues, and what came of it
//!   engine/          moves a piece: cache (copy, store), dma, storage (direct, p2p)
//!   prefault.rs      page tables filled ahead of the thread that registers
//!   app_fd_calls.rs  system calls on the program's descriptor that several of these share
//! ```
//!
//! Known flaw: one large read may be served in pieces, so it is not atomic against a concurrent write.

pub(crate) mod app_fd;
pub(crate) mod app_fd_calls;
mod blocking;
pub(crate) mod by_caller;
mod cpu_store;
mod engine;
pub(crate) mod large;
pub(crate) mod params;
pub(crate) mod plan_range;
mod prefault;
pub(crate) mod request;
mod sequential_small;
mod small;
mod wait_buffer;
pub(crate) mod work;

pub(crate) use self::wait_buffer::WaitBuffers;

use std::sync::Arc;

use spinio_device::StreamId;
use spinio_plan::Reason;
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, FileKind};

use self::app_fd::AppFdRead;
use crate::ctx::Reader;
use crate::decide::unsurveyed;
use spinio_device::Target;
use spinio_files::FileState;
use spinio_stats::Direction;
use spinio_transfer::Error;

type Result<T> = core::result::Result<T, Error>;

/// A read of any size.
pub(crate) fn read(ctx: &Arc<Reader>, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize> {
    let available = to.allocation.bytes_left(to.addr);
    if available == 0 && len > 0 {
        return Err(Error::kernel(Errno::FAULT, "read", at.unwrap_or(0), len as u64));
    }
    let len = len.min(usize::try_from(available).unwrap_or(usize::MAX));
    let absent = match unsurveyed(ctx, fd, at, len, to.allocation.p2p_mapped) {
        Ok(Reason::ReadAhead) => {
            if let Some(got) = sequential_small::read(ctx, fd, at, to, len) {
                return got;
            }
            None
        }
        Ok(_) => return small::read(ctx, fd, at, to, len),
        Err(absent) => absent,
    };
    let stats = ctx.files.stats();
    let span = stats.begin(Direction::Read, fd, at, len as u64).with_device(to.allocation.device);
    let got = large::read(ctx, &span, fd, at, to, len, absent);
    stats.end(&span, &Error::outcome(&got));
    got
}

impl Reader {
    /// `pread` (with an offset) or `read` (at the descriptor's own) into device memory.
    /// Returns what POSIX says: bytes read, short at the end of the file or of the allocation.
    pub fn read(self: &Arc<Self>, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize> {
        read(self, fd, at, to, len)
    }

    /// Reads the file now and queues the copies on a stream; returns the bytes that will be there once the stream gets
    /// that far. Waits only for bounce buffers of stream-ordered requests, and up to twice the limit: beyond it the
    /// stream has to move.
    pub fn read_async(self: &Arc<Self>, fd: Fd, at: u64, to: Target, len: usize, stream: StreamId) -> Result<usize> {
        let len = len.min(usize::try_from(to.allocation.bytes_left(to.addr)).unwrap_or(usize::MAX));
        if to.allocation.device.is_capturing(stream) {
            // Captured copies would read staging memory again at every launch of the graph, when it holds other bytes.
            return Err(Error::kernel(Errno::BUSY, "read into a captured queue", at, len as u64));
        }
        let stats = self.files.stats();
        let span = stats.begin(Direction::Read, fd, Some(at), len as u64).with_device(to.allocation.device);
        let app_fd_read = AppFdRead {
            span,
            fd,
            at: Some(at),
            to,
            len,
            done: 0,
            single_call: false,
            reason: Reason::BySetting,
            stream: Some(stream),
            waits: false,
        };
        let got = app_fd_read.read(self);
        stats.end(&span, &Error::outcome(&got));
        got
    }

    /// Whether storage of this file may DMA into this buffer for this request. `captured`: the stream of the program
    /// is, so that nothing can be ordered after what it has queued.
    pub fn p2p(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        to: Target,
        offset: u64,
        len: u64,
        captured: bool,
    ) -> core::result::Result<(), Reason> {
        large::check_p2p(self, file, to, offset, len, captured)
    }

    /// Whether a read fills the whole buffer while the file has bytes: a device, or a file whose size says nothing (procfs)
    /// or whose offset cannot be moved. A second call after a full one waits for nothing that one call would not have
    /// waited for.
    pub fn fills_buffers(&self, fd: Fd) -> core::result::Result<bool, Errno> {
        const KIND: u32 = 0o170_000;
        const CHARACTERS: u32 = 0o020_000;
        let stat = self.files.sys().fstat(fd)?;
        Ok(stat.kind != FileKind::Other || stat.mode & KIND == CHARACTERS)
    }

    /// Whether what `fd` names can only be read as it comes: it has no offset, or its size says nothing.
    pub fn is_stream(&self, fd: Fd) -> core::result::Result<bool, Errno> {
        let stat = self.files.sys().fstat(fd)?;
        Ok(match stat.kind {
            FileKind::Other => true,
            FileKind::Regular => stat.size == 0 || self.files.sys().lseek(fd, 0, 1).is_err(),
            FileKind::Block => false,
        })
    }
}
