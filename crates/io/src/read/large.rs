//! Large reads of files: twins, residency, plan, engines.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::Wait;
use spinio_plan::{Reason, Route, readahead};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd, FileKind};

use crate::core::Core;
use crate::file::File;
use crate::file::canary;
use crate::file::streams;
use crate::file::tables;
use crate::lock::lock;
use crate::read::blocking;
use crate::read::engine::LONG;
use crate::read::job::{Job, Request};
use crate::read::plain::Plain;
use crate::read::window::page_cache;
use crate::settings::SMALL;
use crate::stats::Watch;
use crate::{Error, Target};

/// A `pread` or `read` of more than [`SMALL`] bytes, all of them inside the allocation.
pub(crate) fn read(
    core: &Arc<Core>,
    watch: &Watch,
    fd: Fd,
    at: Option<u64>,
    to: Target,
    len: usize,
) -> Result<usize, Error> {
    let fail = |e| Error::kernel(e, "read", at.unwrap_or(0), len as u64);
    let stat = core.kernel.fstat(fd).map_err(fail)?;
    let flags = core.kernel.flags(fd).map_err(fail)?;
    let waits = blocking::may_wait(&stat);
    let plain = |reason, once| Plain { watch: *watch, fd, at, to, len, done: 0, once, reason, queue: None, waits };
    if stat.kind == FileKind::Stream {
        // A character device fills the whole buffer; a pipe or socket gives what there is.
        let once = at.is_none() && stat.mode & 0o170_000 != 0o020_000;
        return plain(Reason::Stream, once).read(core);
    }
    // What these descriptors answer is the kernel's to say.
    let unreadable = flags & linux::O_ACCMODE as i32 == linux::O_WRONLY as i32 || flags & linux::O_PATH as i32 != 0;
    if unreadable || at.is_some_and(|at| i64::try_from(at).is_err()) {
        return plain(Reason::Small, true).read(core);
    }
    if flags & linux::O_DIRECT as i32 != 0 {
        // The program wants its own descriptor read, with all that this file system says of alignment: and at once, not
        // when the last block turns out to be misaligned.
        refuse_misaligned(core, fd, at, len).map_err(fail)?;
        return plain(Reason::OwnDirect, false).read(core);
    }
    let (offset, len) = match at {
        Some(offset) => (offset, len),
        // Files whose size says nothing (procfs) make their contents anew at every seek.
        None if stat.kind == FileKind::Regular && stat.size == 0 => return plain(Reason::Small, true).read(core),
        None => match reserve(core, fd, len as u64) {
            Ok(offset) => {
                // What the file does not have is given back at once, not after the read: whoever shares the offset goes on
                // at the end of the file, not behind it. What is appended from here on is for the next read.
                let left = match stat.kind {
                    FileKind::Regular => stat.size.saturating_sub(offset).min(len as u64) as usize,
                    _ => len,
                };
                unreserve(core, fd, (len - left) as u64);
                if left == 0 {
                    // One call of the kernel at the offset itself: nobody can come in between.
                    return plain(Reason::Small, true).read(core);
                }
                (offset, left)
            }
            // No offset to move (FUSE streams), or not that far (the end of a block device).
            Err(e) => {
                let once = e == Errno::SPIPE;
                return Plain { waits: waits || once, ..plain(Reason::Stream, once) }.read(core);
            }
        },
    };
    let read = at_offset(core, watch, fd, offset, to, len, stat);
    if at.is_none() {
        unreserve(core, fd, (len - *read.as_ref().unwrap_or(&0)) as u64);
    }
    read
}

const SEEK_CUR: i32 = 1;

fn at_offset(
    core: &Arc<Core>,
    watch: &Watch,
    fd: Fd,
    offset: u64,
    to: Target,
    len: usize,
    stat: linux::Stat,
) -> Result<usize, Error> {
    let watch = *watch;
    let waits = blocking::may_wait(&stat);
    let (at, done, once, queue) = (Some(offset), 0, false, None);
    let plain = |reason, len| Plain { watch, fd, at, to, len, done, once, reason, queue, waits };
    let Some(crew) = core.keepers() else { return plain(Reason::NoHelpers, len).read(core) };
    let within = match stat.kind {
        FileKind::Regular => (len as u64).min(stat.size.saturating_sub(offset)),
        _ => len as u64,
    };
    // At the end, and in files whose size says nothing (procfs), only reading tells.
    if within <= SMALL as u64 {
        return plain(Reason::Small, len).read(core);
    }
    let file = match core.files.get(core.kernel, crew, fd, stat) {
        Ok(file) => file,
        Err(reason) => return plain(reason, len).read(core),
    };
    let within = match stat.kind {
        FileKind::Regular => within,
        _ => (len as u64).min(file.size.saturating_sub(offset)),
    };
    if within == 0 {
        return plain(Reason::Small, len).read(core);
    }
    let device = to.allocation.device;
    let device_fail = |e| Error::device(e, "read", offset, len as u64);
    let (queue, ours) = device.program_queue();
    let _request = core.begin_request();
    core.mates();
    let order = if ours { None } else { Some(device.fence(queue).map_err(device_fail)?) };
    if to.allocation.p2p_mapped
        && let Some(fence) = &order
        // Storage and the CPU keep no order with the device's queues: what was queued before has to be done.
        && let Err(e) = device.wait(fence, Wait::Context)
    {
        order.into_iter().for_each(|fence| device.release_fence(fence));
        return Err(device_fail(e));
    }
    if let Some(using) = core.holds.enter(core, fd, file.key(), device)
        && using.size() == stat.size
    {
        let read = using.read(core, &watch, fd, to, offset, within, order.as_ref());
        if read.as_ref().is_ok_and(|good| *good) {
            order.into_iter().for_each(|fence| device.release_fence(fence));
            return Ok(within as usize);
        }
    }
    let p2p = p2p(core, &file, to, offset, within, ours);
    let known = core.models.of(core, &file, device);
    let follows = core.streams.follows(fd, offset, offset + within);
    let advice = streams::advice(fd, &stat);
    let most = readahead::largest(file.geometry().read_ahead(), advice == Advice::Sequential);
    let in_stream = advice == Advice::Sequential || (advice == Advice::Normal && follows);
    let ahead = if in_stream && within <= most {
        let model = known.model(core, &file, if p2p.is_ok() { Route::P2p } else { Route::Direct });
        let most = readahead::largest_that_pays(most, &model, page_cache(device.abilities()));
        core.streams.bound(fd, most);
        if within <= most { most } else { 0 }
    } else {
        0
    };
    if follows && within <= LONG {
        tables::fill_ahead(core, &file, offset + within, within);
    }
    let job = Arc::new(Job::new(Request {
        core: Arc::clone(core),
        watch,
        file: Arc::clone(&file),
        staging: core.staging(device),
        to,
        fd,
        offset,
        len: within,
        order,
        p2p,
        dma: core.may_register(),
        ahead,
        known,
    }));
    job.plan_first();
    job.call_helpers();
    let got = job.finish();
    if let Some(expected) = lock(&job.expected).take()
        && got.as_ref().is_ok_and(|got| *got == within)
        && !job.strayed.load(Relaxed)
        && core.requests() == 1
    {
        job.known.learn(expected);
    }
    core.watch_pins();
    core.publish();
    let got = got?;
    core.ahead.claim(core, &file, std::mem::take(&mut *lock(&job.brought)));
    if ahead > 0 && core.streams.passed(fd, got) {
        core.ahead.look(core, fd, Some(offset + got));
    }
    file.learn(within, !job.cold.load(Relaxed));
    if got < within || within == len as u64 {
        return Ok(got as usize);
    }
    // The file may have grown, or its size said too little: what is left, if anything, is at the end.
    let rest = Plain {
        at: Some(offset + got),
        done: got,
        to: Target { addr: to.addr.offset(got), ..to },
        ..plain(Reason::Small, len - got as usize)
    };
    Ok(got as usize + rest.read(core).unwrap_or(0))
}

/// Whether storage of this file may DMA into this buffer for this request. `captured`: the program's queue is, so that
/// nothing can be ordered behind it.
pub(crate) fn p2p(
    core: &Arc<Core>,
    file: &Arc<File>,
    to: Target,
    offset: u64,
    len: u64,
    captured: bool,
) -> Result<(), Reason> {
    if !to.allocation.p2p_mapped {
        return Err(Reason::NoP2pMapping);
    }
    if !core.settings.allows(Route::P2p) {
        return Err(Reason::Forced);
    }
    if captured {
        return Err(Reason::Capturing);
    }
    file.direct.as_ref().map_err(|reason| *reason).map(drop)?;
    // Segments begin on whole blocks of the file; there the address must be one that the disk takes. A disk that takes
    // any word (NVMe: 4 bytes) so serves a buffer that begins with the payload behind a file's odd-sized header.
    let (unit, memory) = (u64::from(file.align.offset).max(512), u64::from(file.align.memory).max(1));
    if to.addr.0 % memory != offset % memory {
        return Err(Reason::P2pMisaligned);
    }
    let device = to.allocation.device;
    let verdict = match core.verdict(file, device) {
        Some(verdict) => verdict,
        None => match canary::sing(core, file, to, offset, len, unit.max(memory)) {
            Some(verdict) => {
                core.set_verdict(file, device, verdict);
                verdict
            }
            None => return Err(Reason::P2pUntrusted),
        },
    };
    verdict.allows()
}

/// What the kernel says of a read through an O_DIRECT descriptor whose offset or length is not aligned.
fn refuse_misaligned(core: &Core, fd: Fd, at: Option<u64>, len: usize) -> Result<(), Errno> {
    let unit = core.kernel.direct_align(fd)?.map_or(0, |a| u64::from(a.offset));
    let offset = match at {
        Some(at) => at,
        None => core.kernel.lseek(fd, 0, SEEK_CUR)?,
    };
    if unit == 0 || unit > 4096 || (offset | len as u64).is_multiple_of(unit) {
        return Ok(());
    }
    let mut bytes = [0u8; 4096];
    let odd = match len as u64 % unit {
        0 => unit,
        odd => odd,
    } as usize;
    // SAFETY: at most a page is read into a local.
    unsafe { core.kernel.pread(Route::Copy, fd, bytes.as_mut_ptr(), odd, offset, 0) }.map(drop)
}

/// Moves the offset of a descriptor forward by `len` for a read to come; where it stood.
pub(crate) fn reserve(core: &Core, fd: Fd, len: u64) -> Result<u64, Errno> {
    Ok(core.kernel.lseek(fd, len as i64, SEEK_CUR)? - len)
}

/// Gives back what a reserved read did not use: relatively, because others may have moved the offset too.
pub(crate) fn unreserve(core: &Core, fd: Fd, unused: u64) {
    if unused > 0 {
        let _ = core.kernel.lseek(fd, -(unused as i64), SEEK_CUR);
    }
}
