//! From a range of a request to pieces: survey the residency, plan, and note what the kernel's read-ahead will bring.

use std::ops::Range;
use std::sync::Arc;

use spinio_plan::{Extent, Residency, Segment};
use spinio_sys::linux::{self, Fd};

use super::params::ReadParams;
use super::work::{Piece, PlanRange, Role};
use crate::decide::{constraints, plan_extents};
use spinio_files::residency::{Survey, absent_runs};
use spinio_files::{FdIdentity, FileState, Files, ResidencyAccess};
use spinio_transfer::Mapping;

/// Bytes that are surveyed and planned together; a multiple of a bounce buffer.
pub(crate) const PLAN_RANGE: u64 = 128 << 20;

/// Bytes of the first range of a request that has several.
const FIRST_RANGE: u64 = 16 << 20;

/// How many bytes one probe of another owner's file stands for.
const PROBE_SPAN: u64 = 64 << 10;

/// From here on a range that is assumed to be cached is checked at a few places instead of everywhere.
const SPOT_CHECK_MIN: u64 = 8 << 20;

/// The ranges of a request, cut at multiples in the file.
pub(crate) fn plan_ranges(offset: u64, len: u64) -> impl Iterator<Item = PlanRange> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        // A short one first: nothing moves before it is surveyed.
        let unit = if start > 0 || len <= PLAN_RANGE { PLAN_RANGE } else { FIRST_RANGE };
        at = match len <= PLAN_RANGE {
            true => len,
            false => len.min((offset + start) / unit * unit + unit - offset),
        };
        (start < len).then_some(PlanRange { offset: start, len: at - start, recheck: false })
    })
}

/// What came of planning a range.
pub(crate) struct PlannedRange {
    pub(crate) pieces: Vec<Piece>,
    /// Some bytes were absent.
    pub(crate) absent: bool,
    /// Absent pages of the file that the page cache fetches because of this request.
    pub(crate) readahead_pages: Vec<Range<u64>>,
}

/// Surveys and plans a range; `None` if a thread of this role cannot survey it.
pub(crate) fn plan_range(request: &ReadParams, role: Role, range: PlanRange) -> Option<PlannedRange> {
    let PlanRange { offset, len, recheck } = range;
    let (ctx, file, fd) = (&request.ctx, &request.file, request.cached_fd(role));
    let access = file.residency_access;
    let is_absent = !recheck && request.is_absent;
    let assumed_cached = !recheck && !is_absent && file.likely_cached() && access != ResidencyAccess::InMemory;
    let skip_survey = assumed_cached && (len < SPOT_CHECK_MIN || spot_check(request, fd, offset, len));
    let extents = if skip_survey {
        vec![Extent { len, residency: Residency::Clean }]
    } else if request.can_survey(role) {
        let mapping = || request.mapping(role);
        let found = if is_absent {
            vec![Extent { len, residency: Residency::Absent }]
        } else {
            survey(&ctx.files, file, fd, mapping, request.offset + offset, len)
        };
        if access != ResidencyAccess::InMemory {
            found.iter().for_each(|e| ctx.files.stats().residency_probed(e.residency, e.len));
        }
        found
    } else {
        return None;
    };
    let absent = extents.iter().any(|e| e.residency == Residency::Absent);
    let abilities = request.device().capabilities();
    let constraints = constraints(ctx, file, abilities, request.p2p, request.dma, request.offset + offset);
    let costs = |storage| request.costs.model(&ctx.files.ctx, file, storage);
    let (schedule, uses_readahead) = plan_extents(&extents, constraints, request.readahead_limit > 0, costs);
    if uses_readahead {
        ctx.files.sequential.mark_cold(request.fd, request.readahead_limit);
    }
    let fetches = absent && schedule.segments.iter().any(|s| s.route.from_cache());
    let note_pages = fetches && access == ResidencyAccess::Permitted && ctx.files.readahead.is_enabled();
    let readahead_pages =
        if note_pages { pages_to_fetch(request, fd, offset, &extents, &schedule.segments) } else { vec![] };
    for segment in &schedule.segments {
        if let Some(reason) = segment.refused {
            ctx.files.stats().record_refusal(reason, segment.len);
        }
    }
    // A probe stands for a run of pages: within it the read itself finds out.
    let assumed_cached = assumed_cached || (access == ResidencyAccess::NotPermitted && !recheck);
    let piece =
        |s: &Segment| Piece { offset: offset + s.offset, len: s.len, route: s.route, reason: s.reason, assumed_cached };
    Some(PlannedRange { pieces: schedule.segments.iter().map(piece).collect(), absent, readahead_pages })
}

/// The residency of a range of the file. `fd`: of the calling thread's descriptor table, and for another owner's file a
/// shadow descriptor, which the kernel does not read ahead for.
pub(crate) fn survey(
    files: &Files,
    file: &FileState,
    fd: Fd,
    mapping: impl FnOnce() -> Option<Arc<Mapping>>,
    at: u64,
    len: u64,
) -> Vec<Extent> {
    let sys = files.sys();
    match file.residency_access {
        ResidencyAccess::InMemory => vec![Extent { len, residency: Residency::Clean }],
        ResidencyAccess::NotPermitted => {
            Survey { sys, fd, mapping: None }.by_probes(at, len, PROBE_SPAN, files.probe_nonce())
        }
        ResidencyAccess::Permitted => {
            let mapping = mapping();
            Survey { sys, fd, mapping: mapping.as_deref() }.by_cachestat(at, len)
        }
    }
}

/// Absent pages that are read through the page cache all the same: they will be there because of this request.
fn pages_to_fetch(
    request: &ReadParams,
    fd: Fd,
    offset: u64,
    extents: &[Extent],
    segments: &[Segment],
) -> Vec<Range<u64>> {
    const PAGE: u64 = linux::PAGE as u64;
    let number = FdIdentity::of(fd);
    if !number.is_still(request.sys(), request.file.key()) {
        return Vec::new();
    }
    let mut pages = Vec::new();
    let mut at = 0;
    for extent in extents {
        let end = at + extent.len;
        let cached = segments.iter().filter(|s| s.route.from_cache() && s.offset < end && at < s.offset + s.len);
        for s in cached.filter(|_| extent.residency == Residency::Absent) {
            let base = request.offset + offset;
            let (from, to) = (base + s.offset.max(at), base + end.min(s.offset + s.len));
            // Queried again: a survey may report a run as absent of which only some pages are.
            let range = from / PAGE * PAGE..to.next_multiple_of(PAGE);
            pages.extend(absent_runs(request.sys(), fd, range));
        }
        at = end;
    }
    // Pages that are absent of another file are not this request's.
    if number.is_still(request.sys(), request.file.key()) { pages } else { Vec::new() }
}

/// Checks a range that is assumed to be cached at a few places. Through the program's descriptor too: if the assumption
/// is wrong, the kernel begins the read-ahead that a host read would have begun.
fn spot_check(request: &ReadParams, fd: Fd, offset: u64, len: u64) -> bool {
    let (sys, at, interval) = (request.sys(), request.offset + offset, 2 << 20);
    if request.file.residency_access == ResidencyAccess::NotPermitted {
        let nonce = request.ctx.files.probe_nonce();
        let found = Survey { sys, fd, mapping: None }.by_probes(at, len, interval, nonce);
        return found.iter().all(|e| e.residency.is_cached());
    }
    (at..at + len).step_by(interval as usize).all(|at| sys.cachestat(fd, at, 1).is_ok_and(|c| c.cached > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_the_request_and_end_at_multiples() {
        for (offset, len) in [(0, 1), (777, PLAN_RANGE), (5 << 20, PLAN_RANGE + 1), ((1 << 30) + 5, (3 << 30) + 9)] {
            let ranges: Vec<PlanRange> = plan_ranges(offset, len).collect();
            assert_eq!(ranges.iter().map(|range| range.len).sum::<u64>(), len);
            assert!(ranges.windows(2).all(|w| w[0].offset + w[0].len == w[1].offset));
            let ends = ranges.iter().map(|range| offset + range.offset + range.len);
            assert!(ends.take(ranges.len() - 1).all(|end| end.is_multiple_of(FIRST_RANGE)));
            assert_eq!(ranges.len() == 1, len <= PLAN_RANGE);
        }
    }
}
