//! What a read would do, without doing it: the decision of decide.rs, printed.
//!
//! Known flaws: whether writers of a pinned file are still excluded shows only when its pages are used, so the file
//! counts as pinned here. A read may assume from former reads that a file is cached, and survey only what turns out
//! absent; here all of the range is surveyed.

use std::sync::Arc;

use spinio_plan::geometry::BlockStack;
use spinio_plan::{Extent, Objective, Prediction, Reason, Residency, Route, Schedule, Segment, predict};
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, FileKind, Stat};

use crate::ctx::Reader;
use crate::decide::{
    Buffer, ByFile, by_descriptor, by_file, cache_route, constraints, p2p_possible, plan_extents, readahead_limit,
    unsurveyed, unsurveyed_route, worth_planning,
};
use crate::read::plan_range::{plan_ranges, survey};
use spinio_files::residency::push_extent;
use spinio_files::{FileState, ResidencyAccess, sequential};
use spinio_host::settings::SMALL_REQUEST_MAX;
use spinio_host::syscalls::Syscalls;
use spinio_transfer::Error;

/// What a read of a range would do, and why.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// First byte.
    pub offset: u64,
    /// Bytes up to the end of the file.
    pub len: u64,
    /// How the residency was queried.
    pub residency_source: &'static str,
    /// Where the bytes are.
    pub extents: Vec<Extent>,
    /// How they would travel.
    pub schedule: Schedule,
    /// How long that should take; nanoseconds, by the cost model in use.
    pub prediction: Prediction,
    /// Which cost model that is.
    pub model: String,
    /// The block devices under the file.
    pub storage: Arc<BlockStack>,
    /// What would make it faster.
    pub advice: Vec<String>,
}

impl Reader {
    /// Explains a `pread` of `len` bytes at `offset` into a buffer.
    pub fn explain(self: &Arc<Self>, fd: Fd, offset: u64, len: u64, buffer: Buffer) -> Result<Explanation, Error> {
        let stat = stat_seekable(self.files.sys(), fd, offset, len)?;
        let flags = self.files.sys().status_flags(fd).map_err(|e| Error::kernel(e, "explain", offset, len))?;
        let size = match stat.kind {
            FileKind::Block => self.files.get(fd, stat).map_or(u64::MAX, |file| file.size),
            _ => stat.size,
        };
        let within = len.min(size.saturating_sub(offset));
        let whole = |len, route, reason| self.explain_unsurveyed(fd, (offset, len), route, reason);
        let wanted = usize::try_from(len).unwrap_or(usize::MAX);
        if let Ok(reason) = unsurveyed(self, fd, Some(offset), wanted, buffer.p2p_mapped) {
            let (route, reason) = unsurveyed_route(buffer.abilities, reason);
            return Ok(whole(within, route, reason).with_advice(&stat));
        }
        let by_app_fd = |len, reason| whole(len, cache_route(buffer.abilities), reason).with_advice(&stat);
        if let Some(by) = by_descriptor(&stat, flags, Some(offset)) {
            return Ok(by_app_fd(within, by.reason));
        }
        match by_file(self, fd, &stat, (offset, len), buffer.p2p_mapped) {
            ByFile::AppFd(reason) => Ok(by_app_fd(within, reason)),
            ByFile::Planned(file, within) if self.pinned.can_serve(file.key(), stat.size, buffer.device) => {
                Ok(Explanation {
                    residency_source: "not at all: the file is pinned, so all of it is in memory",
                    extents: vec![Extent { len: within, residency: Residency::Clean }],
                    ..whole(within, Route::Dma, Reason::Pinned)
                })
            }
            ByFile::Planned(file, within) => Ok(self
                .explain_planned((fd, &stat), &file, (offset, within), buffer)
                .unwrap_or_else(|reason| by_app_fd(within, reason))),
        }
    }

    /// A read that takes one route, whatever is cached.
    fn explain_unsurveyed(&self, fd: Fd, (offset, len): (u64, u64), route: Route, reason: Reason) -> Explanation {
        Explanation {
            offset,
            len,
            residency_source: "not at all: this read goes through the page cache whatever is there",
            extents: if len > 0 { vec![Extent { len, residency: Residency::Unknown }] } else { vec![] },
            schedule: if len > 0 { Schedule::single(len, route, reason) } else { Schedule::default() },
            prediction: Prediction::default(),
            model: "none".to_owned(),
            storage: self.files.storage(fd).unwrap_or_default(),
            advice: vec![],
        }
    }

    /// A read that is surveyed and planned, in the ranges in which the read itself is.
    fn explain_planned(
        &self,
        (fd, stat): (Fd, &Stat),
        file: &Arc<FileState>,
        (offset, len): (u64, u64),
        buffer: Buffer,
    ) -> Result<Explanation, Reason> {
        let trust = || self.files.p2p_trust.known_refusal(file.storage).map_or(Ok(()), Err);
        let p2p = p2p_possible(self, file, &buffer, offset).and_then(|()| trust());
        if !worth_planning(len, p2p) {
            return Err(Reason::Small);
        }
        let dma = self.policy.may_register(self.files.workers().copy_threads().for_request(len));
        let costs = self.files.cost_entry(file, buffer.device);
        let model = |storage| costs.model(&self.files.ctx, file, storage);
        let storage = if p2p.is_ok() { Route::P2p } else { Route::Direct };
        let stream = (sequential::advice_for(fd, stat), self.files.sequential.follows(fd, offset));
        let limit = readahead_limit(self, file, stream, len, &costs, storage, buffer.abilities);
        let readahead = limit.is_some_and(|limit| len <= limit);
        let (mut extents, mut segments, mut refused) = (Vec::new(), Vec::new(), None);
        for range in plan_ranges(offset, len) {
            let at = offset + range.offset;
            let found = self.survey_by_worker(file, at, range.len).ok_or(Reason::NoWorkers)?;
            let constraints = constraints(self, file, buffer.abilities, p2p, dma, at);
            refused = constraints.refused;
            let mut planned = plan_extents(&found, constraints, readahead, model).0.segments;
            planned.iter_mut().for_each(|s| s.offset += range.offset);
            for segment in planned {
                push_segment(&mut segments, segment);
            }
            found.iter().for_each(|extent| push_extent(&mut extents, extent.len, extent.residency));
        }
        let schedule = Schedule::from(segments);
        let cost_model = model(if refused.is_none() { storage } else { Route::Direct });
        let size = if stat.kind == FileKind::Regular { stat.size } else { file.size };
        Ok(Explanation {
            offset,
            len,
            residency_source: match file.residency_access {
                ResidencyAccess::NotPermitted => "a byte every 64 KiB (RWF_NOWAIT): the file has another owner",
                ResidencyAccess::InMemory => "not at all: this file system keeps its files in memory",
                ResidencyAccess::Permitted => "cachestat, and mincore where a step is mixed",
            },
            prediction: predict(Objective::Concurrent, &extents, &schedule, &cost_model),
            model: costs.describe(file),
            storage: Arc::clone(file.block_stack()),
            advice: advice(&extents, &schedule, refused, file.residency_access, size > offset + len, len),
            extents,
            schedule,
        })
    }

    /// The exact residency, queried by a shadow worker: the same as the read does, but that the caller needs no rights.
    fn survey_by_worker(&self, file: &Arc<FileState>, at: u64, len: u64) -> Option<Vec<Extent>> {
        let (files, state) = (Arc::clone(&self.files), Arc::clone(file));
        let survey = move || {
            let mapping = || state.mapping(files.sys(), at + len);
            survey(&files, &state, state.cached.get(), mapping, at, len)
        };
        self.files.shadow_workers()?.for_key(file.storage).run_blocking(survey)
    }
}

/// Appends a segment, merged with the last one if only the range ends between them.
fn push_segment(segments: &mut Vec<Segment>, next: Segment) {
    match segments.last_mut() {
        Some(last) if (last.route, last.reason, last.refused) == (next.route, next.reason, next.refused) => {
            last.len += next.len;
        }
        _ => segments.push(next),
    }
}

impl Explanation {
    fn with_advice(self, stat: &Stat) -> Explanation {
        let more = stat.kind == FileKind::Regular && stat.size > self.offset + self.len;
        let advice = advice(&[], &self.schedule, None, ResidencyAccess::Permitted, more, self.len);
        Explanation { advice, ..self }
    }
}

/// The attributes of a file that has offsets.
pub(crate) fn stat_seekable(sys: &dyn Syscalls, fd: Fd, offset: u64, len: u64) -> Result<Stat, Error> {
    const S_IFMT: u32 = 0o170_000;
    const S_IFDIR: u32 = 0o040_000;
    let checked = sys.fstat(fd).and_then(|stat| match stat.kind {
        FileKind::Other => Err(if stat.mode & S_IFMT == S_IFDIR { Errno::ISDIR } else { Errno::SPIPE }),
        _ => Ok(stat),
    });
    checked.map_err(|e| Error::kernel(e, "explain", offset, len))
}

/// What would make it faster, most useful first. `more`: the file continues after these `len` bytes.
fn advice(
    extents: &[Extent],
    schedule: &Schedule,
    refused: Option<Reason>,
    access: ResidencyAccess,
    more: bool,
    len: u64,
) -> Vec<String> {
    let bytes = |r: Residency| extents.iter().filter(|e| e.residency == r).map(|e| e.len).sum::<u64>();
    let mut out = Vec::new();
    if len <= SMALL_REQUEST_MAX as u64 && more {
        out.push("read more at once: a call of a byte pays for as many driver calls as one of 64 KiB".to_owned());
    }
    let absent = bytes(Residency::Absent);
    if absent > 0 {
        out.push(format!(
            "{} must come from storage: reading the file ahead (cat, vmtouch, POSIX_FADV_WILLNEED) \
             would serve them from memory",
            match absent {
                n if n >= 10 << 30 => format!("{} GiB", n >> 30),
                n if n >= 1 << 20 => format!("{} MiB", n >> 20),
                n => format!("{} KiB", n.div_ceil(1 << 10)),
            }
        ));
        match refused {
            Some(Reason::NoP2pMapping) => {
                out.push("storage cannot write into this buffer itself: `spinio doctor` shows what P2P needs".into());
            }
            Some(reason) => out.push(format!("a faster way from storage was refused: {reason}")),
            None => {}
        }
    }
    if bytes(Residency::Dirty) > 0 && schedule.segments.iter().any(|s| !s.route.from_cache()) {
        out.push("dirty pages are written back before storage is read: fsync beforehand would spare it".into());
    }
    if access == ResidencyAccess::NotPermitted {
        out.push(
            "for the owner of the file, or a user who may write it, residency is exact and faster to query".into(),
        );
    }
    if schedule.segments.len() > 64 {
        out.push(format!("{} segments: the cached pages lie scattered among absent ones", schedule.segments.len()));
    }
    out
}
