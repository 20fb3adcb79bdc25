//! Large reads of files: twins, residency, plan, engines.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::WaitMode;
use spinio_plan::{Reason, Route, readahead};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd, FileKind};

use crate::ctx::Reader;
use crate::read::app_fd::AppFdRead;
use crate::read::app_fd_calls::{SEEK_CUR, release_offset, reserve_offset};
use crate::read::blocking;
use crate::read::plan_range::cache_route;
use crate::read::request::{ReadParams, ReadRequest};
use crate::read::work::LONG_REQUEST;
use spinio_device::Target;
use spinio_files::FdIdentity;
use spinio_files::FileState;
use spinio_files::p2p_probe;
use spinio_files::prefault;
use spinio_files::sequential;
use spinio_host::lock;
use spinio_host::settings::SMALL_REQUEST_MAX;
use spinio_stats::RequestSpan;
use spinio_transfer::AlignedBuf;
use spinio_transfer::Error;

/// A `pread` or `read` of more than [`SMALL`] bytes, all of them inside the allocation.
pub(crate) fn read(
    ctx: &Arc<Reader>,
    span: &RequestSpan,
    fd: Fd,
    at: Option<u64>,
    to: Target,
    len: usize,
) -> Result<usize, Error> {
    let fail = |e| Error::kernel(e, "read", at.unwrap_or(0), len as u64);
    let stat = ctx.files.sys().fstat(fd).map_err(fail)?;
    let flags = ctx.files.sys().status_flags(fd).map_err(fail)?;
    let waits = blocking::may_wait(&stat);
    let app_fd_read = |reason, single_call| AppFdRead {
        span: *span,
        fd,
        at,
        to,
        len,
        done: 0,
        single_call,
        reason,
        stream: None,
        waits,
    };
    if stat.kind == FileKind::Other {
        // A character device fills the whole buffer; a pipe or socket gives what there is.
        let single_call = at.is_none() && stat.mode & 0o170_000 != 0o020_000;
        return app_fd_read(Reason::Stream, single_call).read(ctx);
    }
    // What these descriptors answer is the kernel's to say.
    let unreadable = flags & linux::O_ACCMODE as i32 == linux::O_WRONLY as i32 || flags & linux::O_PATH as i32 != 0;
    if unreadable || at.is_some_and(|at| i64::try_from(at).is_err()) {
        return app_fd_read(Reason::Small, true).read(ctx);
    }
    if flags & linux::O_DIRECT as i32 != 0 {
        // The program wants its own descriptor read, with all that this file system says of alignment: and at once, not
        // when the last block turns out to be misaligned.
        check_direct_alignment(ctx, fd, at, len).map_err(fail)?;
        return app_fd_read(Reason::AppODirect, false).read(ctx);
    }
    let (offset, len) = match at {
        Some(offset) => (offset, len),
        // Files whose size says nothing (procfs) make their contents anew at every seek.
        // What is left is read without one.
        None if stat.kind == FileKind::Regular && stat.size == 0 => return app_fd_read(Reason::Small, false).read(ctx),
        None => match reserve_offset(ctx.files.sys(), fd, len as u64) {
            Ok(offset) => {
                // What the file does not have is given back at once, not after the read: whoever shares the offset goes on
                // at the end of the file, not behind it. What is appended from here on is for the next read.
                let left = match stat.kind {
                    FileKind::Regular => stat.size.saturating_sub(offset).min(len as u64) as usize,
                    _ => len,
                };
                release_offset(ctx.files.sys(), fd, (len - left) as u64);
                if left == 0 {
                    // One call of the kernel at the offset itself: nobody can come in between.
                    return app_fd_read(Reason::Small, true).read(ctx);
                }
                (offset, left)
            }
            // No offset to move (FUSE streams), or not that far (the end of a block device).
            Err(e) => {
                let once = e == Errno::SPIPE;
                return AppFdRead { waits: waits || once, ..app_fd_read(Reason::Stream, once) }.read(ctx);
            }
        },
    };
    let read = read_at(ctx, span, fd, offset, to, len, stat);
    if at.is_none() {
        release_offset(ctx.files.sys(), fd, (len - *read.as_ref().unwrap_or(&0)) as u64);
    }
    read
}

fn read_at(
    ctx: &Arc<Reader>,
    span: &RequestSpan,
    fd: Fd,
    offset: u64,
    to: Target,
    len: usize,
    stat: linux::Stat,
) -> Result<usize, Error> {
    let span = *span;
    let waits = blocking::may_wait(&stat);
    let (at, done, once, queue) = (Some(offset), 0, false, None);
    let app_fd_read =
        |reason, len| AppFdRead { span, fd, at, to, len, done, single_call: once, reason, stream: queue, waits };
    if ctx.files.shadow_workers().is_none() {
        return app_fd_read(Reason::NoWorkers, len).read(ctx);
    }
    let within = match stat.kind {
        FileKind::Regular => (len as u64).min(stat.size.saturating_sub(offset)),
        _ => len as u64,
    };
    // At the end, and in files whose size says nothing (procfs), only reading tells.
    if within <= SMALL_REQUEST_MAX as u64 {
        return app_fd_read(Reason::Small, len).read(ctx);
    }
    let file = match ctx.files.get(fd, stat) {
        Ok(file) => file,
        Err(reason) => return app_fd_read(reason, len).read(ctx),
    };
    let within = match stat.kind {
        FileKind::Regular => within,
        _ => (len as u64).min(file.size.saturating_sub(offset)),
    };
    if within == 0 {
        return app_fd_read(Reason::Small, len).read(ctx);
    }
    let device = to.allocation.device;
    let device_fail = |e| Error::device(e, "read", offset, len as u64);
    let _request = ctx.files.unpin().begin_request();
    ctx.files.workers().copy();
    let order = device.app_stream().fence(device).map_err(device_fail)?;
    if to.allocation.p2p_mapped
        && let Some(fence) = &order
    {
        // Storage and the CPU keep no order with the device's streams: what was queued before has to be done.
        fence.wait(WaitMode::Context).map_err(device_fail)?;
    }
    if let Some(pin_guard) = ctx.pinned.acquire(fd, file.key(), device)
        && pin_guard.size() == stat.size
        && pin_guard.read(&ctx.files, &span, fd, to, offset, within, order.as_ref())
    {
        return Ok(within as usize);
    }
    let p2p = check_p2p(ctx, &file, to, offset, within, order.is_none());
    let costs = ctx.files.cost_entry(&file, device);
    let sequential = ctx.files.sequential.is_next(fd, offset, offset + within);
    let advice = sequential::advice_for(fd, &stat);
    let max_window = readahead::max_buffered_request(file.block_stack().read_ahead(), advice == Advice::Sequential);
    let in_stream = advice == Advice::Sequential || (advice == Advice::Normal && sequential);
    let readahead_limit = if in_stream && within <= max_window {
        let model = costs.model(&ctx.files.ctx, &file, if p2p.is_ok() { Route::P2p } else { Route::Direct });
        let max_window = readahead::max_profitable_request(max_window, &model, cache_route(device.capabilities()));
        ctx.files.sequential.set_cost_limit(fd, max_window);
        if within <= max_window { max_window } else { 0 }
    } else {
        0
    };
    if sequential && within <= LONG_REQUEST {
        prefault::prefault_next(&ctx.files.ctx, &file, offset + within, within);
    }
    let request = Arc::new(ReadRequest::new(ReadParams {
        ctx: Arc::clone(ctx),
        span,
        file: Arc::clone(&file),
        staging: ctx.bounce.sync(device),
        dest: to,
        fd,
        offset,
        len: within,
        order,
        p2p,
        dma: ctx.policy.may_register(),
        readahead_limit,
        costs,
    }));
    request.plan_initial();
    request.wake_workers();
    let got = request.finish();
    ctx.files.unpin().watch();
    ctx.files.ctx.home.update_gauges();
    let got = got?;
    ctx.files.readahead.add_owned(&file, std::mem::take(&mut *lock(&request.readahead_pages)));
    if readahead_limit > 0 && ctx.files.sequential.advance(fd, got) {
        ctx.files.readahead.check_stream(fd, Some(offset + got));
    }
    file.record_residency(within, !request.missed_cache.load(Relaxed));
    if got < within || within == len as u64 {
        return Ok(got as usize);
    }
    // The file may have grown, or its size said too little: what is left, if anything, is at the end.
    let rest = AppFdRead {
        at: Some(offset + got),
        done: got,
        to: Target { addr: to.addr.offset(got), ..to },
        ..app_fd_read(Reason::Small, len - got as usize)
    };
    let number = FdIdentity::of(fd);
    let more = rest.read(ctx).unwrap_or(0);
    // What another file has behind the end of this one is not this one's.
    Ok(got as usize + if number.is_still(ctx.files.sys(), file.key()) { more } else { 0 })
}

/// Whether storage of this file may DMA into this buffer for this request. `captured`: the program's queue is, so that
/// nothing can be ordered behind it.
pub(crate) fn check_p2p(
    ctx: &Arc<Reader>,
    file: &Arc<FileState>,
    to: Target,
    offset: u64,
    len: u64,
    capturing: bool,
) -> Result<(), Reason> {
    if !to.allocation.p2p_mapped {
        return Err(Reason::NoP2pMapping);
    }
    if !ctx.policy.allows(Route::P2p) {
        return Err(Reason::BySetting);
    }
    if capturing {
        return Err(Reason::Capturing);
    }
    file.direct_fd.as_ref().map_err(|reason| *reason).map(drop)?;
    // Segments begin on whole blocks of the file; there the address must be one that the disk takes. A disk that takes
    // any word (NVMe: 4 bytes) so serves a buffer that begins with the payload behind a file's odd-sized header.
    let (unit, memory) = (u64::from(file.direct_align.offset).max(512), u64::from(file.direct_align.memory).max(1));
    if to.addr.0 % memory != offset % memory {
        return Err(Reason::P2pMisaligned);
    }
    let device = to.allocation.device;
    let trust = match ctx.files.p2p_trust.p2p_trust(file.storage, device) {
        Some(verdict) => verdict,
        None => match p2p_probe::verify(&ctx.files.ctx, file, to, offset, len, unit.max(memory)) {
            Some(verdict) => {
                ctx.files.p2p_trust.set(file.storage, device, verdict);
                verdict
            }
            None => return Err(Reason::P2pUntrusted),
        },
    };
    trust.allows()
}

/// What the kernel says of a read through an O_DIRECT descriptor whose offset or length is not aligned.
fn check_direct_alignment(ctx: &Reader, fd: Fd, at: Option<u64>, len: usize) -> Result<(), Errno> {
    let unit = ctx.files.sys().direct_align(fd)?.map_or(0, |a| u64::from(a.offset));
    let offset = match at {
        Some(at) => at,
        None => ctx.files.sys().lseek(fd, 0, SEEK_CUR)?,
    };
    if unit == 0 || unit > 4096 || (offset | len as u64).is_multiple_of(unit) {
        return Ok(());
    }
    // The memory is aligned, so that what the kernel refuses is the range. Where a file system tells of larger blocks than
    // its reads need (XFS with reflinks: 4096, reads take 512) it refuses nothing.
    let mut bytes = AlignedBuf::zeroed(unit as usize);
    let tail = match len as u64 % unit {
        0 => unit,
        odd => odd,
    } as usize;
    // SAFETY: `odd` is at most `unit`, the length of `bytes`.
    unsafe { ctx.files.sys().pread(Route::Copy, fd, bytes.as_mut_ptr(), tail, offset, 0) }.map(drop)
}
