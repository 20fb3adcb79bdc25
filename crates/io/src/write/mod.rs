//! Writes: device to file.
//!
//! A `pwrite` is atomic with respect to other writers: two writes that overlap leave the bytes of one or of the other,
//! and the bytes of an O_APPEND write stay together. The kernel guarantees that for each call, under the lock of the
//! inode. So a device write is gathered first and then done by **one** system call, through the program's own
//! descriptor and on its own thread:
//!
//! ```text
//!   device ──DMA──> buffer ┐                  program's descriptor
//!   device ──DMA──> buffer ├── wait ── one writev / pwritev2 ──> page cache, or storage if it is O_DIRECT
//!   host part (as it is) ──┘
//! ```
//!
//! Offset, O_APPEND, O_SYNC, RLIMIT_FSIZE with its signal, quota, locks and errors are then the kernel's own, the count
//! is the kernel's, and SPIN keeps no state for the file. Copying while the kernel already writes would save a tenth of
//! the time. But it needs either two calls, between which another writer can write, or a way to know that there is no
//! other writer, which does not exist: a lease does not count threads and children that share the descriptor. Block
//! devices do not guarantee atomicity; from 16 MiB on their writes are done in chunks, and the next chunk is copied
//! while one is written.
//!
//! ```text
//!   Runtime::write, write_parts
//!     │ files, up to the bounce limit      write_once.rs   gather, one call
//!     │ larger                             chunked.rs      the same in chunks; the next is copied while one is written
//!     │                                    window.rs       several chunks in flight, over allocated bytes (O_DIRECT)
//!     │ pipes, sockets, devices            unseekable.rs   the same, from private memory
//!     │ stripes of SPIN's shadow files     scatter.rs      several ranges, each one call, several at a time
//!     ▼
//!   gather.rs        parts ─> bounce buffers, in the program's order on the device
//!   stream_write.rs  in the order of a stream, when it gets there
//!   decide.rs        the route and the reason for it; also for `spinio explain --write`
//!   bypass.rs        bypasses the page cache: peer-to-peer and very long writes, where it is faster
//! ```
//!
//! Order on the device: as `cudaMemcpy` out of the device. A write starts after all work that was queued before it, and
//! returns when its bytes are in the file; work that is queued later cannot change them.
//!
//! Known flaws:
//! - A write larger than the bounce limit (`SPINIO_BOUNCE_LIMIT`, 128 MiB) is done in chunks, between which other
//!   writes can be done. docs/semantics.md says so.
//! - A vector of host and device parts that needs more than 1024 kernel vectors is written short, as far as 1024 reach.
//! - While the write of a file waits for a server (FUSE, NFS), it holds its bounce buffers. Other writes then wait
//!   10 ms for buffers and use ordinary memory instead; but large reads wait until buffers are released.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

mod bypass;
mod chunked;
mod decide;
mod gather;
mod scatter;
mod stream_write;
mod unseekable;
mod window;
mod write_once;

use std::sync::Arc;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind, Stat};

pub(crate) use self::stream_write::StreamLen;
use crate::ctx::Writer;
use spinio_device::Target;
use spinio_files::is_shadow;
use spinio_stats::{Direction, RequestSpan};
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Largest write of a block device, in bytes, that is a single call.
const BLOCK_DEVICE_MAX: u64 = 16 << 20;

type Result<T> = core::result::Result<T, Error>;

/// A part of a write, in the order of the file.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// Host memory. The kernel validates it.
    Host(*const u8, usize),
    /// Device memory.
    Device(Target, usize),
}

impl Part {
    /// Its length.
    pub fn len(&self) -> usize {
        match *self {
            Part::Host(_, len) | Part::Device(_, len) => len,
        }
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `len` bytes from `skip` on.
    fn slice(self, skip: usize, len: usize) -> Part {
        match self {
            Part::Host(at, _) => Part::Host(at.wrapping_add(skip), len),
            Part::Device(from, _) => Part::Device(Target { addr: from.addr.offset(skip as u64), ..from }, len),
        }
    }
}

/// A write in progress.
#[derive(Clone, Copy)]
struct WriteRequest<'a> {
    ctx: &'a Arc<Writer>,
    fd: Fd,
    /// `None`: at the descriptor's own offset.
    at: Option<u64>,
    /// `RWF_*`
    flags: u32,
    parts: &'a [Part],
    len: usize,
    stat: Stat,
    span: RequestSpan,
}

impl WriteRequest<'_> {
    fn kernel_error(&self, errno: Errno, done: usize) -> Error {
        Error::kernel(errno, "write", self.at.unwrap_or(0) + done as u64, (self.len - done) as u64)
    }

    /// Bytes that have to be copied to bounce buffers.
    fn staged_bytes(&self) -> u64 {
        self.parts.iter().filter(|p| matches!(p, Part::Device(..))).map(|p| p.len() as u64).sum()
    }

    /// Writes through the program's own descriptor.
    fn write_app_fd(&self) -> Result<usize> {
        if self.needs_chunks() { self.write_chunked() } else { self.write_once(None) }
    }

    /// Whether it is too large for a single call.
    fn needs_chunks(&self) -> bool {
        self.staged_bytes() > max_single_call(self.ctx, self.stat.kind)
    }

    /// Bytes missing to the next multiple of the direct I/O alignment; 0 if the descriptor has no O_DIRECT.
    fn misalignment(&self, len: usize) -> usize {
        let kernel = self.ctx.files.sys();
        if kernel.status_flags(self.fd).is_ok_and(|flags| flags & linux::O_DIRECT as i32 == 0) {
            return 0;
        }
        let unit = kernel.direct_align(self.fd).ok().flatten().map_or(4096, |a| a.offset as usize);
        if unit == 0 { 0 } else { len.next_multiple_of(unit) - len }
    }

    /// The parts from byte `skip` on, up to `max` bytes.
    fn slice_parts(&self, mut skip: usize, mut max: usize) -> Vec<Part> {
        let mut out = Vec::new();
        for part in self.parts {
            let len = part.len().saturating_sub(skip).min(max);
            if len > 0 {
                out.push(part.slice(skip, len));
            }
            skip = skip.saturating_sub(part.len());
            max -= len;
        }
        out
    }

    /// Whether the descriptor still refers to the file that this write began with: another thread may have closed it
    /// and opened another file with the same number.
    fn verify_fd(&self) -> bool {
        // The program cannot close a shadow descriptor.
        is_shadow(self.fd) || self.ctx.files.sys().is_file(self.fd, self.stat.key())
    }
}

/// Most bytes of staging memory that a single system call may use.
fn staging_limit(ctx: &Writer) -> u64 {
    ctx.bounce.limit().max(2 * BUFFER_SIZE as u64)
}

/// Most bytes of a write that is a single call. The kernel itself mixes overlapping writes of a block device, so
/// splitting them to copy concurrently loses no guarantee.
fn max_single_call(ctx: &Writer, kind: FileKind) -> u64 {
    if kind == FileKind::Block { BLOCK_DEVICE_MAX.min(staging_limit(ctx)) } else { staging_limit(ctx) }
}

/// The parts without empty ones, cut where the first of them leaves its allocation, as the kernel cuts a write where
/// the program's memory ends.
fn clip(parts: &[Part]) -> core::result::Result<Vec<Part>, Errno> {
    let mut clipped = Vec::with_capacity(parts.len());
    for part in parts.iter().copied().filter(|p| !p.is_empty()) {
        let available = match part {
            Part::Host(..) => part.len(),
            Part::Device(from, _) => usize::try_from(from.allocation.bytes_left(from.addr)).unwrap_or(usize::MAX),
        };
        if available == 0 {
            return if clipped.is_empty() { Err(Errno::FAULT) } else { Ok(clipped) };
        }
        clipped.push(part.slice(0, part.len().min(available)));
        if available < part.len() {
            break;
        }
    }
    Ok(clipped)
}

impl Writer {
    /// `pwrite` (with an offset) or `write` (at the descriptor's own) out of device memory.
    /// Returns the number of bytes written to the file, as POSIX specifies.
    pub fn write(self: &Arc<Self>, fd: Fd, at: Option<u64>, from: Target, len: usize) -> Result<usize> {
        self.write_parts(fd, at, 0, &[Part::Device(from, len)])
    }

    /// `pwritev2`, with parts that may be host or device memory, and `RWF_*` flags.
    pub fn write_parts(self: &Arc<Self>, fd: Fd, at: Option<u64>, flags: u32, parts: &[Part]) -> Result<usize> {
        let requested: u64 = parts.iter().map(|p| p.len() as u64).sum();
        let stats = self.files.stats();
        let mut span = stats.begin(Direction::Write, fd, at, requested);
        let mut targets = parts.iter().filter_map(|p| if let Part::Device(from, _) = p { Some(from) } else { None });
        if let Some(from) = targets.next() {
            span = span.with_device(from.allocation.device);
        }
        let wrote = self.write_recorded(fd, at, flags, parts, requested, span);
        stats.end(&span, &Error::outcome(&wrote));
        wrote
    }

    fn write_recorded(
        self: &Arc<Self>,
        fd: Fd,
        at: Option<u64>,
        flags: u32,
        parts: &[Part],
        requested: u64,
        span: RequestSpan,
    ) -> Result<usize> {
        let ctx = self;
        let fail = |e| Error::kernel(e, "write", at.unwrap_or(0), requested);
        if at.is_some_and(|at| i64::try_from(at).is_err()) {
            return Err(fail(Errno::INVAL));
        }
        let stat = ctx.files.sys().fstat(fd).map_err(fail)?;
        let parts = clip(parts).map_err(fail)?;
        let len = parts.iter().map(Part::len).sum();
        let write = WriteRequest { ctx, fd, at, flags, parts: &parts, len, stat, span };
        if stat.kind == FileKind::Other {
            return write.write_unseekable();
        }
        let status = ctx.files.sys().status_flags(fd).map_err(fail)?;
        if status & linux::O_ACCMODE as i32 == linux::O_RDONLY as i32 || status & linux::O_PATH as i32 != 0 {
            // A write, with or without an offset as in the program's call, gets the kernel's error. Its byte cannot be
            // loaded: the number may be that of another file by now.
            let vector = [[0, 1]];
            // SAFETY: the Linux kernel returns EFAULT for a byte that it cannot load.
            let wrote = unsafe { ctx.files.sys().pwritev(Route::Copy, fd, &vector, at, flags) };
            return wrote.map_err(fail);
        }
        if write.may_bypass_cache(status) {
            write.with_offset(|write| write.bypass_cache(status))
        } else {
            write.write_app_fd()
        }
    }
}

/// The reason to record for a staged write.
fn pinned_reason(pinned: bool, otherwise: Reason) -> Reason {
    if pinned { otherwise } else { Reason::NoPinnedMemory }
}
