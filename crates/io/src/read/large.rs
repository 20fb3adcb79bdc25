//! Large reads of files: decide, then read through the program's descriptor, out of pinned pages, or by a plan.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::WaitMode;
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind, Stat};

use crate::ctx::Reader;
use crate::decide::{
    AbsentShort, Buffer, ByFile, by_descriptor, by_file, note_no_p2p, p2p_possible, readahead_limit, worth_planning,
};
use crate::read::app_fd::AppFdRead;
use crate::read::app_fd_calls::{ReservedOffset, SEEK_CUR, hold_signals};
use crate::read::params::ReadParams;
use crate::read::plan_range::{PLAN_RANGE, plan_range};
use crate::read::request::ReadRequest;
use crate::read::work::{LONG_REQUEST, PlanRange, Role};
use crate::read::{blocking, by_caller};
use spinio_device::Target;
use spinio_files::FdIdentity;
use spinio_files::FileState;
use spinio_files::p2p_probe;
use spinio_files::prefault;
use spinio_files::sequential;
use spinio_host::{deliver_now, lock};
use spinio_stats::RequestSpan;
use spinio_transfer::AlignedBuf;
use spinio_transfer::Error;

/// A `pread` or `read` of more than [`spinio_host::settings::SMALL_REQUEST_MAX`] bytes, or a short one that is `absent`; all
/// of it inside the allocation.
pub(crate) fn read(
    ctx: &Arc<Reader>,
    span: &RequestSpan,
    fd: Fd,
    at: Option<u64>,
    to: Target,
    len: usize,
    absent: Option<AbsentShort>,
) -> Result<usize, Error> {
    // Declared first, released last: a handler that jumps out of here leaves nothing of this read in use, and no lock locked.
    let held = hold_signals(ctx, fd);
    let fail = |e| Error::kernel(e, "read", at.unwrap_or(0), len as u64);
    let stat = ctx.files.sys().fstat(fd).map_err(fail)?;
    let flags = absent.map_or_else(|| ctx.files.sys().status_flags(fd), |absent| Ok(absent.flags)).map_err(fail)?;
    let waits = blocking::may_wait(&stat);
    if waits {
        // A FIFO is on a disk, too, and its reader waits for a writer.
        drop(held);
        deliver_now();
    }
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
    let by = by_descriptor(&stat, flags, at);
    let app_direct = by.is_some_and(|by| by.reason == Reason::AppODirect);
    if app_direct {
        // At once, not when the last buffer turns out to be misaligned.
        check_direct_alignment(ctx, fd, at, len).map_err(fail)?;
    }
    // One system call keeps the bytes together at the descriptor's own offset, which others may share; several calls of a
    // read through O_DIRECT do not.
    if let Some(by) = by.filter(|_| !app_direct || at.is_some()) {
        return app_fd_read(by.reason, by.single_call).read(ctx);
    }
    let (sys, asked) = (ctx.files.sys(), len);
    let (offset, len, reserved) = match at {
        Some(offset) => (offset, len, None),
        None => match ReservedOffset::new(sys, fd, len as u64, &stat) {
            Ok(reserved) => {
                let offset = reserved.start;
                // What the file does not have is given back at once, not after the read: another reader of this offset
                // continues at the end of the file, not past it. Bytes appended from here on are for the next read.
                let left = match stat.kind {
                    FileKind::Regular => stat.size.saturating_sub(offset).min(len as u64) as usize,
                    _ => len,
                };
                reserved.release(sys, fd, (len - left) as u64);
                if left == 0 {
                    // One system call at the descriptor's own offset: no other reader can come in between.
                    return app_fd_read(Reason::Small, true).read(ctx);
                }
                (offset, left, Some(reserved))
            }
            // No offset to move (FUSE streams), or not that far (the end of a block device).
            Err(e) => {
                let once = e == Errno::SPIPE;
                return AppFdRead { waits: waits || once, ..app_fd_read(Reason::Stream, once) }.read(ctx);
            }
        },
    };
    let read = if app_direct {
        // As aligned as the program's read, which was longer if the file ends before it.
        let aligned = len.next_multiple_of(linux::PAGE).min(asked);
        let read = AppFdRead { at: Some(offset), len: aligned, ..app_fd_read(Reason::AppODirect, false) }.read(ctx);
        read.map(|got| got.min(len))
    } else {
        read_at(ctx, span, fd, offset, to, len, Known { stat, is_absent: absent.is_some() })
    };
    if let Some(reserved) = reserved {
        reserved.release(sys, fd, (len - *read.as_ref().unwrap_or(&0)) as u64);
    }
    read
}

/// What is known of a read's file.
struct Known {
    stat: Stat,
    is_absent: bool,
}

fn read_at(
    ctx: &Arc<Reader>,
    span: &RequestSpan,
    fd: Fd,
    offset: u64,
    to: Target,
    len: usize,
    Known { stat, is_absent }: Known,
) -> Result<usize, Error> {
    let span = *span;
    let waits = blocking::may_wait(&stat);
    let (at, done, single_call, stream) = (Some(offset), 0, false, None);
    let app_fd_read = |reason, len| AppFdRead { span, fd, at, to, len, done, single_call, reason, stream, waits };
    let (file, within) = match by_file(ctx, fd, &stat, (offset, len as u64), to.allocation.p2p_mapped) {
        ByFile::AppFd(reason) => {
            note_no_p2p(ctx, fd, reason);
            return app_fd_read(reason, len).read(ctx);
        }
        ByFile::Planned(file, within) => (file, within),
    };
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
    if !worth_planning(within, p2p) {
        p2p.err().into_iter().for_each(|why| note_no_p2p(ctx, fd, why));
        return app_fd_read(Reason::Small, len).read(ctx);
    }
    let costs = ctx.files.cost_entry(&file, device);
    let follows = ctx.files.sequential.is_next(fd, offset, offset + within);
    let stream_of = (sequential::advice_for(fd, &stat), follows);
    let storage = if p2p.is_ok() { Route::P2p } else { Route::Direct };
    let limit = readahead_limit(ctx, &file, stream_of, within, &costs, storage, device.capabilities());
    if let Some(limit) = limit {
        ctx.files.sequential.set_cost_limit(fd, limit);
    }
    let readahead_limit = limit.filter(|limit| within <= *limit).unwrap_or(0);
    if follows && within <= LONG_REQUEST {
        prefault::prefault_next(&ctx.files.ctx, &file, offset + within, within);
    }
    let copy_threads = ctx.files.workers().copy_threads().for_request(within);
    let params = ReadParams {
        ctx: Arc::clone(ctx),
        span,
        file: Arc::clone(&file),
        staging: Arc::clone(ctx.bounce.sync(device)),
        dest: to,
        fd,
        offset,
        len: within,
        order,
        p2p,
        dma: ctx.policy.may_register(copy_threads),
        copy_threads,
        is_absent,
        readahead_limit,
        costs,
    };
    params.unpin_range();
    // What is short enough is planned at once, so that workers find pieces.
    let all = PlanRange { offset: 0, len: within, recheck: false };
    let planned = if within <= PLAN_RANGE { plan_range(&params, Role::Caller, all) } else { None };
    let pieces = planned.as_ref().map_or(&[][..], |planned| &planned.pieces);
    let by_caller = by_caller::read(&params, pieces);
    let (got, pages, missed) = match by_caller {
        Some(got) => (Ok(got), Vec::new(), true),
        None => {
            let request = Arc::new(ReadRequest::new(params));
            request.begin(planned);
            let got = request.finish();
            let pages = std::mem::take(&mut *lock(&request.readahead_pages));
            (got, pages, request.missed_cache.load(Relaxed))
        }
    };
    ctx.files.unpin().watch();
    ctx.files.ctx.stats_region.update_gauges();
    let got = got?;
    ctx.files.readahead.add_owned(&file, pages);
    if readahead_limit > 0 && ctx.files.sequential.advance(fd, got) {
        ctx.files.readahead.check_stream(fd, Some(offset + got));
    }
    file.record_residency(within, !missed);
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
    let (number, sys) = (FdIdentity::of(fd), ctx.files.sys());
    let same = number.is_still(sys, file.key());
    let more = if same { rest.read(ctx).unwrap_or(0) } else { 0 };
    // Bytes of another file past the end of this one are not part of it.
    Ok(got as usize + if number.is_still(sys, file.key()) { more } else { 0 })
}

/// Whether storage of this file may DMA into this buffer for this request. `capturing`: the stream of the program is,
/// so that nothing can be ordered after what it has queued.
pub(crate) fn check_p2p(
    ctx: &Arc<Reader>,
    file: &Arc<FileState>,
    to: Target,
    offset: u64,
    len: u64,
    capturing: bool,
) -> Result<(), Reason> {
    p2p_possible(ctx, file, &Buffer::at(to), offset)?;
    if capturing {
        return Err(Reason::Capturing);
    }
    let unit = u64::from(file.direct_align.offset.max(file.direct_align.memory)).max(512);
    let device = to.allocation.device;
    let trust = match ctx.files.p2p_trust.p2p_trust(file.storage, device) {
        Some(verdict) => verdict,
        None => match p2p_probe::verify(&ctx.files.ctx, file, to, offset, len, unit) {
            Some(verdict) => {
                ctx.files.p2p_trust.set(file.storage, device, verdict);
                verdict
            }
            None => return Err(Reason::P2pUntrusted),
        },
    };
    trust.allows()
}

/// The result of the kernel for a read through an O_DIRECT descriptor whose offset or length is not aligned.
fn check_direct_alignment(ctx: &Reader, fd: Fd, at: Option<u64>, len: usize) -> Result<(), Errno> {
    let unit = ctx.files.sys().direct_align(fd)?.map_or(0, |a| u64::from(a.offset));
    let offset = match at {
        Some(at) => at,
        None => ctx.files.sys().lseek(fd, 0, SEEK_CUR)?,
    };
    if unit == 0 || unit > 4096 || (offset | len as u64).is_multiple_of(unit) {
        return Ok(());
    }
    // The memory is aligned, so that what the kernel refuses is the range. A file system that reports larger blocks
    // than its reads need (XFS with reflinks: 4096, reads take 512) refuses nothing.
    let mut bytes = AlignedBuf::zeroed(unit as usize);
    let tail = match len as u64 % unit {
        0 => unit,
        odd => odd,
    } as usize;
    // SAFETY: `odd` is at most `unit`, the length of `bytes`.
    unsafe { ctx.files.sys().pread(Route::Copy, fd, bytes.as_mut_ptr(), tail, offset, 0) }.map(drop)
}
