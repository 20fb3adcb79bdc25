//! From a window of a request to segments in the job's queues: ask the residency, plan.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::Capabilities;
use spinio_plan::{Extent, Objective, Reason, Residency, Route, RouteConstraints, Schedule, Segment, plan};
use spinio_sys::linux;

use crate::ctx::Reader;
use crate::read::request::ReadRequest;
use crate::read::work::Role;
use spinio_files::FdIdentity;
use spinio_files::residency::{Survey, absent_runs};
use spinio_files::{FileState, ResidencyAccess};
use spinio_host::lock;

/// How many bytes one probe of a stranger speaks for.
pub(crate) const PROBE_SPAN: u64 = 64 << 10;

/// From here on a window that is believed cached is checked at a few places instead of everywhere.
const SPOT_CHECK_MIN: u64 = 8 << 20;

/// Surveys and plans `len` bytes at `offset` of the request. `again`: a presumption failed here.
pub(crate) fn plan_range(request: &Arc<ReadRequest>, role: Role, offset: u64, len: u64, recheck: bool) {
    let file = &request.file;
    let fd = match role {
        Role::Caller | Role::CopyWorker => request.fd,
        Role::ShadowWorker => file.cached.get(),
    };
    let access = file.residency_access;
    let cached = |len| vec![Extent { len, residency: Residency::Clean }];
    let assumed_cached = !recheck && file.likely_cached() && access != ResidencyAccess::InMemory;
    let skip_survey = assumed_cached && (len < SPOT_CHECK_MIN || spot_check(request, fd, access, offset, len));
    let extents = if skip_survey || access == ResidencyAccess::InMemory {
        cached(len)
    } else if access == ResidencyAccess::NotPermitted && role != Role::ShadowWorker {
        // The question needs a twin under FADV_RANDOM; a keeper has one.
        request.defer_survey(offset, len, recheck);
        return;
    } else {
        let found = survey(request, role, fd, access, offset, len);
        found.iter().for_each(|e| request.ctx.files.stats().residency_probed(e.residency, e.len));
        found
    };
    let mut constraints = constraints(
        &request.ctx,
        file,
        request.device().capabilities(),
        request.p2p,
        request.dma,
        request.offset + offset,
    );
    let absent = extents.iter().any(|e| e.residency == Residency::Absent);
    if absent {
        request.missed_cache.store(true, Relaxed);
    }
    let use_readahead = absent && request.readahead_limit > 0 && constraints.storage.is_some();
    if use_readahead {
        request.ctx.files.sequential.mark_cold(request.fd, request.readahead_limit);
        (constraints.storage, constraints.refused) = (None, Some(Reason::ReadAhead));
    }
    let mut schedule = Schedule::default();
    let model = request.costs.model(&request.ctx.files.ctx, file, constraints.storage.unwrap_or(Route::Direct));
    plan(Objective::Concurrent, &extents, &model, &constraints, &mut schedule);
    if use_readahead {
        let is_absent = |s: &&mut Segment| s.reason == Reason::Absent;
        schedule.segments.iter_mut().filter(is_absent).for_each(|s| (s.reason, s.refused) = (Reason::ReadAhead, None));
    }
    if absent && access == ResidencyAccess::Permitted && request.ctx.files.readahead.is_enabled() {
        record_readahead(request, fd, offset, &extents, &schedule.segments);
    }
    // A stranger's probe speaks for a run: within it the read itself finds out.
    let stats = request.ctx.files.stats();
    for segment in &schedule.segments {
        if let Some(reason) = segment.refused {
            stats.record_refusal(reason, segment.len);
        }
    }
    request.queue_segments(
        offset,
        &schedule.segments,
        assumed_cached || (access == ResidencyAccess::NotPermitted && !recheck),
    );
}

/// Absent bytes that take the page cache all the same will be there because of this request.
fn record_readahead(request: &ReadRequest, fd: i32, offset: u64, extents: &[Extent], segments: &[Segment]) {
    const PAGE: u64 = linux::PAGE as u64;
    let number = FdIdentity::of(fd);
    let mut brought = Vec::new();
    let mut at = 0;
    for extent in extents {
        let end = at + extent.len;
        let cached = segments.iter().filter(|s| s.route.from_cache() && s.offset < end && at < s.offset + s.len);
        for s in cached.filter(|_| extent.residency == Residency::Absent) {
            let base = request.offset + offset;
            let (from, to) = (base + s.offset.max(at), base + end.min(s.offset + s.len));
            // Asked once more: a survey may call a run absent of which it only knows that it is not whole.
            let range = from / PAGE * PAGE..to.next_multiple_of(PAGE);
            brought.extend(absent_runs(request.ctx.files.sys(), fd, range));
        }
        at = end;
    }
    // Pages that are absent of another file are not this request's.
    if number.is_still(request.ctx.files.sys(), request.file.key()) {
        lock(&request.readahead_pages).append(&mut brought);
    }
}

/// The exact extents.
fn survey(
    request: &Arc<ReadRequest>,
    role: Role,
    fd: i32,
    access: ResidencyAccess,
    offset: u64,
    len: u64,
) -> Vec<Extent> {
    let kernel = request.ctx.files.sys();
    let at = request.offset + offset;
    match access {
        ResidencyAccess::NotPermitted => {
            Survey { sys: kernel, fd, mapping: None }.by_probes(at, len, PROBE_SPAN, request.ctx.files.probe_nonce())
        }
        _ => {
            let mapping = request.mapping(role);
            Survey { sys: kernel, fd, mapping: mapping.as_deref() }.by_cachestat(at, len)
        }
    }
}

/// Whether a window that is believed cached looks so at a few places. Asked through the program's descriptor too: if the
/// belief is wrong, the kernel begins the read-ahead that a host read would have begun.
fn spot_check(request: &Arc<ReadRequest>, fd: i32, access: ResidencyAccess, offset: u64, len: u64) -> bool {
    let kernel = request.ctx.files.sys();
    let (at, interval) = (request.offset + offset, 2 << 20);
    if access == ResidencyAccess::NotPermitted {
        let found =
            Survey { sys: kernel, fd, mapping: None }.by_probes(at, len, interval, request.ctx.files.probe_nonce());
        return found.iter().all(|e| e.residency.is_cached());
    }
    (at..at + len).step_by(interval as usize).all(|at| kernel.cachestat(fd, at, 1).is_ok_and(|c| c.cached > 0))
}

/// The way out of the page cache that is always there.
pub(crate) fn cache_route(abilities: Capabilities) -> Route {
    if abilities.has_dma_engine { Route::Copy } else { Route::Store }
}

/// What a request may use, and why not more. `p2p`: whether storage may DMA into its buffer; `dma`: whether pages
/// may be registered for it.
pub(crate) fn constraints(
    ctx: &Reader,
    file: &FileState,
    abilities: Capabilities,
    p2p: Result<(), Reason>,
    dma: Result<(), Reason>,
    file_offset: u64,
) -> RouteConstraints {
    let settings = &ctx.policy;
    let refused_pin = if file.pin_refused.load(Relaxed) { Err(Reason::PinRefused) } else { Ok(()) };
    let dma = dma.and(refused_pin);
    let may_pin = abilities.can_pin && file.is_mappable();
    let may_direct = settings.allows(Route::Direct) && abilities.has_dma_engine;
    let (storage, refused) = match (&file.direct_fd, p2p) {
        (Err(reason), _) => (None, Some(*reason)),
        (Ok(_), Ok(())) => (Some(Route::P2p), None),
        (Ok(_), Err(reason)) => (may_direct.then_some(Route::Direct), Some(reason)),
    };
    RouteConstraints {
        file_offset,
        cache: cache_route(abilities),
        cache_large: (may_pin && dma.is_ok()).then_some((Route::Dma, settings.dma_min)),
        storage,
        storage_align: u64::from(file.direct_align.offset).max(4096),
        refused,
        cache_refused: if may_pin { dma.err() } else { None },
    }
}
