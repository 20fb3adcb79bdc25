//! From a window of a request to segments in the job's queues: ask the residency, plan.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::Abilities;
use spinio_plan::{Extent, Objective, Possible, Reason, Residency, Route, Schedule, Segment, plan};
use spinio_sys::linux;

use crate::ctx::Reader;
use spinio_files::residency::{Survey, absent_runs};
use spinio_files::{File, Rights};
use spinio_host::lock;
use spinio_files::FdIdentity;
use crate::read::job::Job;
use crate::read::work::Who;

/// How many bytes one probe of a stranger speaks for.
pub(crate) const RUN: u64 = 64 << 10;

/// From here on a window that is believed cached is checked at a few places instead of everywhere.
const COARSE: u64 = 8 << 20;

/// Surveys and plans `len` bytes at `offset` of the request. `again`: a presumption failed here.
pub(crate) fn window(job: &Arc<Job>, who: Who, offset: u64, len: u64, again: bool) {
    let file = &job.file;
    let fd = match who {
        Who::Caller | Who::Mate | Who::Beside => job.fd,
        Who::Keeper => file.cached.get(),
    };
    let rights = file.rights;
    let cached = |len| vec![Extent { len, residency: Residency::Clean }];
    let presumed = !again && file.is_warm() && rights != Rights::Resident;
    let believed = presumed && (len < COARSE || coarse(job, fd, rights, offset, len));
    let extents = if believed || rights == Rights::Resident {
        cached(len)
    } else if rights == Rights::Stranger && who != Who::Keeper {
        // The question needs a twin under FADV_RANDOM; a keeper has one.
        job.hand_over(offset, len, again);
        return;
    } else {
        let found = survey(job, who, fd, rights, offset, len);
        found.iter().for_each(|e| job.ctx.files.stats().seen(e.residency, e.len));
        found
    };
    let mut possible = possible(&job.ctx, file, job.device().abilities(), job.p2p, job.dma, job.offset + offset);
    let absent = extents.iter().any(|e| e.residency == Residency::Absent);
    if absent {
        job.cold.store(true, Relaxed);
    }
    let read_ahead = absent && job.ahead > 0 && possible.storage.is_some();
    if read_ahead {
        job.ctx.files.streams.is_absent(job.fd, job.ahead);
        (possible.storage, possible.refused) = (None, Some(Reason::ReadAhead));
    }
    let mut schedule = Schedule::default();
    let model = job.known.model(&job.ctx.files.ctx, file, possible.storage.unwrap_or(Route::Direct));
    plan(Objective::Concurrent, &extents, &model, &possible, &mut schedule);
    if read_ahead {
        let waiting = |s: &&mut Segment| s.reason == Reason::Absent;
        schedule.segments.iter_mut().filter(waiting).for_each(|s| (s.reason, s.refused) = (Reason::ReadAhead, None));
    } else if len == job.len && !again {
        job.expect(&extents, &schedule.segments);
    }
    if absent && rights == Rights::Owner && job.ctx.files.ahead.is_on() {
        note_brought(job, fd, offset, &extents, &schedule.segments);
    }
    // A stranger's probe speaks for a run: within it the read itself finds out.
    let stats = job.ctx.files.stats();
    for segment in &schedule.segments {
        if let Some(reason) = segment.refused {
            stats.refused(reason, segment.len);
        }
    }
    job.add(offset, &schedule.segments, presumed || (rights == Rights::Stranger && !again));
}

/// Absent bytes that take the page cache all the same will be there because of this request.
fn note_brought(job: &Job, fd: i32, offset: u64, extents: &[Extent], segments: &[Segment]) {
    const PAGE: u64 = linux::PAGE as u64;
    let number = FdIdentity::of(fd);
    let mut brought = Vec::new();
    let mut at = 0;
    for extent in extents {
        let end = at + extent.len;
        let cached = segments.iter().filter(|s| s.route.from_cache() && s.offset < end && at < s.offset + s.len);
        for s in cached.filter(|_| extent.residency == Residency::Absent) {
            let base = job.offset + offset;
            let (from, to) = (base + s.offset.max(at), base + end.min(s.offset + s.len));
            // Asked once more: a survey may call a run absent of which it only knows that it is not whole.
            let range = from / PAGE * PAGE..to.next_multiple_of(PAGE);
            brought.extend(absent_runs(job.ctx.files.sys(), fd, range));
        }
        at = end;
    }
    // Pages that are absent of another file are not this request's.
    if number.is_still(job.ctx.files.sys(), job.file.key()) {
        lock(&job.brought).append(&mut brought);
    }
}

/// The exact extents.
fn survey(job: &Arc<Job>, who: Who, fd: i32, rights: Rights, offset: u64, len: u64) -> Vec<Extent> {
    let kernel = job.ctx.files.sys();
    let at = job.offset + offset;
    match rights {
        Rights::Stranger => Survey { kernel, fd, mapping: None }.stranger(at, len, RUN, job.ctx.files.probe_nonce()),
        _ => {
            let mapping = job.mapping(who);
            Survey { kernel, fd, mapping: mapping.as_deref() }.owner(at, len)
        }
    }
}

/// Whether a window that is believed cached looks so at a few places. Asked through the program's descriptor too: if the
/// belief is wrong, the kernel begins the read-ahead that a host read would have begun.
fn coarse(job: &Arc<Job>, fd: i32, rights: Rights, offset: u64, len: u64) -> bool {
    let kernel = job.ctx.files.sys();
    let (at, every) = (job.offset + offset, 2 << 20);
    if rights == Rights::Stranger {
        let found = Survey { kernel, fd, mapping: None }.stranger(at, len, every, job.ctx.files.probe_nonce());
        return found.iter().all(|e| e.residency.is_cached());
    }
    (at..at + len).step_by(every as usize).all(|at| kernel.cachestat(fd, at, 1).is_ok_and(|c| c.cached > 0))
}

/// The way out of the page cache that is always there.
pub(crate) fn page_cache(abilities: Abilities) -> Route {
    if abilities.copies { Route::Copy } else { Route::Store }
}

/// What a request may use, and why not more. `p2p`: whether storage may DMA into its buffer; `dma`: whether pages
/// may be registered for it.
pub(crate) fn possible(
    ctx: &Reader,
    file: &File,
    abilities: Abilities,
    p2p: Result<(), Reason>,
    dma: Result<(), Reason>,
    file_offset: u64,
) -> Possible {
    let settings = &ctx.policy;
    let refused_pin = if file.pins_refused.load(Relaxed) { Err(Reason::PinRefused) } else { Ok(()) };
    let dma = dma.and(refused_pin);
    let may_pin = abilities.pins && file.is_mappable();
    let may_direct = settings.allows(Route::Direct) && abilities.copies;
    let (storage, refused) = match (&file.direct, p2p) {
        (Err(reason), _) => (None, Some(*reason)),
        (Ok(_), Ok(())) => (Some(Route::P2p), None),
        (Ok(_), Err(reason)) => (may_direct.then_some(Route::Direct), Some(reason)),
    };
    Possible {
        file_offset,
        cache: page_cache(abilities),
        cache_large: (may_pin && dma.is_ok()).then_some((Route::Dma, settings.dma_min)),
        storage,
        storage_align: u64::from(file.align.offset).max(4096),
        refused,
        cache_refused: if may_pin { dma.err() } else { None },
    }
}
