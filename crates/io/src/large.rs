//! Large reads of files: twins, residency, plan, engines.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use crate::canary;
use crate::core::Core;
use crate::file::File;
use crate::job::{Job, Request};
use crate::plain::Plain;
use crate::settings::SMALL;
use crate::{Error, Target};

/// A `pread` or `read` of more than [`SMALL`] bytes, all of them inside the allocation.
pub(crate) fn read(core: &Arc<Core>, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize, Error> {
    let fail = |e| Error::kernel(e, "read", at.unwrap_or(0), len as u64);
    let stat = core.kernel.fstat(fd).map_err(fail)?;
    let flags = core.kernel.flags(fd).map_err(fail)?;
    let plain = |reason, once| Plain { fd, at, to, len, once, reason, queue: None };
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
    let offset = match at {
        Some(offset) => offset,
        None => core.kernel.lseek(fd, len as i64, SEEK_CUR).map_err(fail)? - len as u64,
    };
    let read = at_offset(core, fd, offset, to, len, stat, flags);
    if at.is_none() {
        let used = *read.as_ref().unwrap_or(&0);
        if used < len {
            // The offset was moved for all of it; what was not read is given back, relatively, because others may
            // have moved it too.
            let _ = core.kernel.lseek(fd, used as i64 - len as i64, SEEK_CUR);
        }
    }
    read
}

const SEEK_CUR: i32 = 1;

fn at_offset(
    core: &Arc<Core>,
    fd: Fd,
    offset: u64,
    to: Target,
    len: usize,
    stat: linux::Stat,
    flags: i32,
) -> Result<usize, Error> {
    let plain = |reason, len| Plain { fd, at: Some(offset), to, len, once: false, reason, queue: None };
    let Some(crew) = core.crew() else { return plain(Reason::NoHelpers, len).read(core) };
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
    let direct_descriptor = flags & linux::O_DIRECT as i32 != 0;
    if direct_descriptor && !(offset | len as u64).is_multiple_of(u64::from(file.align.offset)) {
        // A host buffer would be refused, or not, by this file system: let it say.
        return plain(Reason::Edge, len).read(core);
    }
    let within = match stat.kind {
        FileKind::Regular => within,
        _ => (len as u64).min(file.size.saturating_sub(offset)),
    };
    if within == 0 {
        return Ok(0);
    }
    let device = to.allocation.device;
    let device_fail = |e| Error::device(e, "read", offset, len as u64);
    let (queue, ours) = device.program_queue();
    let _request = core.begin_request();
    let order = if ours { None } else { Some(device.fence(queue).map_err(device_fail)?) };
    let job = Arc::new(Job::new(Request {
        core: Arc::clone(core),
        file: Arc::clone(&file),
        staging: core.staging(device),
        to,
        offset,
        len: within,
        order,
        p2p: p2p(core, &file, to, offset, within),
        dma: core.may_register(),
    }));
    job.plan_first(fd);
    job.call_helpers();
    let got = job.finish(fd);
    core.watch_pins();
    let got = got?;
    file.warm.store(!job.cold.load(Relaxed), Relaxed);
    // The file may have grown, or its size said too little: the rest, if any, is at the end and small.
    let grown = got == within && (within as usize) < len && stat.kind == FileKind::Regular;
    if grown {
        let at = offset + got;
        let now = core.kernel.fstat(fd).map_or(0, |s| s.size);
        if now > at {
            let to = Target { addr: to.addr.offset(got), ..to };
            let rest = Plain {
                fd,
                at: Some(at),
                to,
                len: len - got as usize,
                once: false,
                reason: Reason::Small,
                queue: None,
            };
            return Ok(got as usize + rest.read(core).unwrap_or(0));
        }
    }
    Ok(got as usize)
}

/// Whether storage of this file may DMA into this buffer for this request.
fn p2p(core: &Arc<Core>, file: &Arc<File>, to: Target, offset: u64, len: u64) -> Result<(), Reason> {
    if !to.allocation.p2p_mapped {
        return Err(Reason::NoP2pMapping);
    }
    if !core.settings.allows(Route::P2p) {
        return Err(Reason::Forced);
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
        None => match canary::sing(core, file, to, offset, len, unit) {
            Some(verdict) => {
                core.set_verdict(file, device, verdict);
                verdict
            }
            None => return Err(Reason::P2pUntrusted),
        },
    };
    verdict.allows()
}

/// Moves the offset of a descriptor forward by `len` for a read to come; where it stood.
pub(crate) fn reserve(core: &Core, fd: Fd, len: u64) -> Result<u64, Errno> {
    Ok(core.kernel.lseek(fd, len as i64, SEEK_CUR)? - len)
}
