//! The decision: which path a read takes, and how its bytes are routed. A read executes it, `explain` prints it.
//!
//! ```text
//!   unsurveyed        up to 64 KiB, or part of a cold sequential stream      one read of the page cache
//!                     (not: absent and at random, into P2P-mapped memory)
//!   by_descriptor     pipes, devices, O_DIRECT, files without a size         through the descriptor of the program
//!   by_file           no shadow descriptor, or little left of the file       the same
//!                     else ──> pinned pages, or surveyed and planned in ranges:
//!   constraints, readahead_limit, plan_extents       extents ──> segments, each with its route and reason
//! ```
//!
//! Nothing here moves bytes or keeps state, so that `explain` can call it at any time.
//!
//! Known flaw: three facts show only while a read runs, and change its reasons: a driver that refuses pinned memory, an
//! assumption from former reads that a file is cached, and a check of P2P that has not been made yet.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::{Allocation, Capabilities, Device, DeviceAddr, Target};
use spinio_files::FileState;
use spinio_files::cost::CostEntry;
use spinio_host::settings::SMALL_REQUEST_MAX;
use spinio_plan::{
    Extent, Model, Objective, Reason, Residency, Route, RouteConstraints, Schedule, Segment, plan, readahead,
};
use spinio_sys::linux::{Advice, Fd, FileKind, O_ACCMODE, O_DIRECT, O_PATH, O_WRONLY, Stat};

use crate::ctx::Reader;
use spinio_transfer::bounce::BUFFER_SIZE;

/// The buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Its device.
    pub device: &'static dyn Device,
    /// Of its device.
    pub abilities: Capabilities,
    /// The kernel can make a storage device DMA into it.
    pub p2p_mapped: bool,
    /// Its first byte; `None`: aligned for any storage.
    pub addr: Option<DeviceAddr>,
}

impl Buffer {
    /// One in this allocation, aligned for any storage.
    pub fn of(allocation: &Allocation) -> Buffer {
        let Allocation { device, p2p_mapped, .. } = *allocation;
        Buffer { device, abilities: device.capabilities(), p2p_mapped, addr: None }
    }

    /// The target of a request.
    pub fn at(to: Target) -> Buffer {
        Buffer { addr: Some(to.addr), ..Buffer::of(&to.allocation) }
    }
}

/// The route of cached bytes that is always there.
pub(crate) fn cache_route(abilities: Capabilities) -> Route {
    if abilities.has_dma_engine { Route::Copy } else { Route::Store }
}

/// Bytes from which a read of up to [`SMALL_REQUEST_MAX`] may take P2P: what it takes to find that out costs about what a
/// shorter one gains.
const SMALL_P2P_MIN: usize = 16 << 10;

/// What was found out about a short read that may go past the page cache. It is not asked again: each question is a system
/// call, and so is the read. Should the number name another file by now, its bytes are read all the same, and are right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AbsentShort {
    /// The status flags of the descriptor.
    pub(crate) flags: i32,
}

/// Whether a short read may go past the page cache: into P2P-mapped memory, part of no stream that the kernel reads ahead,
/// and nothing of it is cached. One system call if something is, else two.
fn may_pass_cache(ctx: &Reader, fd: Fd, at: Option<u64>, len: usize) -> Option<AbsentShort> {
    // A stream begins at 0.
    let at = at.filter(|&at| at > 0)?;
    let may = len >= SMALL_P2P_MIN
        && ctx.policy.allows(Route::P2p)
        && !ctx.files.sequential.follows(fd, at)
        && !ctx.files.no_p2p_fds.is_known(fd)
        && ctx.files.sys().cachestat(fd, at, len as u64).is_ok_and(|pages| pages.cached == 0);
    let flags = if may { ctx.files.sys().status_flags(fd).ok()? } else { return None };
    // The program bypasses the page cache itself.
    if flags & O_DIRECT as i32 != 0 {
        ctx.files.no_p2p_fds.add(fd);
        return None;
    }
    Some(AbsentShort { flags })
}

/// Whether a read whose file is known is planned: a short one only to take P2P.
pub(crate) fn worth_planning(len: u64, p2p: Result<(), Reason>) -> bool {
    len > SMALL_REQUEST_MAX as u64 || p2p.is_ok()
}

/// Remembers that a descriptor's file cannot be read peer to peer, so that short reads of it are not looked into again.
pub(crate) fn note_no_p2p(ctx: &Reader, fd: Fd, why: Reason) {
    if matches!(why, Reason::NoDirectIo | Reason::P2pUnreachable | Reason::NoShadowFd | Reason::NoWorkers) {
        ctx.files.no_p2p_fds.add(fd);
    }
}

/// Why a read is made without looking at its file: it is small, or the next of a cold sequential stream. `Err`: it has to be
/// looked into; what is known of it.
#[inline]
pub(crate) fn unsurveyed(
    ctx: &Reader,
    fd: Fd,
    at: Option<u64>,
    len: usize,
    p2p_mapped: bool,
) -> Result<Reason, Option<AbsentShort>> {
    if len <= SMALL_REQUEST_MAX {
        let absent = if p2p_mapped { may_pass_cache(ctx, fd, at, len) } else { None };
        return absent.map_or(Ok(Reason::Small), |absent| Err(Some(absent)));
    }
    let in_stream = len <= BUFFER_SIZE && ctx.files.sequential.uses_kernel_readahead(fd, at, len as u64);
    if in_stream { Ok(Reason::ReadAhead) } else { Err(None) }
}

/// The route of such a read, and the reason to report.
#[inline]
pub(crate) fn unsurveyed_route(abilities: Capabilities, reason: Reason) -> (Route, Reason) {
    match cache_route(abilities) {
        Route::Store if reason == Reason::Small => (Route::Store, Reason::HostMapped),
        route => (route, reason),
    }
}

/// Why only the descriptor of the program can make a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByDescriptor {
    pub(crate) reason: Reason,
    /// One system call only: a second one could block, or the kernel shall report the error of this one.
    pub(crate) single_call: bool,
}

/// Whether only the descriptor of the program can make a read. `flags`: its status flags. `at`: `None` for its own
/// offset.
pub(crate) fn by_descriptor(stat: &Stat, flags: i32, at: Option<u64>) -> Option<ByDescriptor> {
    const S_IFMT: u32 = 0o170_000;
    const S_IFCHR: u32 = 0o020_000;
    let only = |reason, single_call| Some(ByDescriptor { reason, single_call });
    if stat.kind == FileKind::Other {
        // A character device fills the whole buffer; a pipe or socket gives what there is.
        return only(Reason::Stream, at.is_none() && stat.mode & S_IFMT != S_IFCHR);
    }
    // The kernel reports the errors of these.
    if flags & O_ACCMODE as i32 == O_WRONLY as i32
        || flags & O_PATH as i32 != 0
        || at.is_some_and(|at| i64::try_from(at).is_err())
    {
        return only(Reason::Small, true);
    }
    // The program wants its own descriptor read, with the alignment that this file system demands.
    if flags & O_DIRECT as i32 != 0 {
        return only(Reason::AppODirect, false);
    }
    // Files whose size says nothing (procfs) make their contents anew at every seek: read without one.
    if at.is_none() && stat.kind == FileKind::Regular && stat.size == 0 {
        return only(Reason::Small, false);
    }
    None
}

/// The way of a read whose descriptor has offsets.
pub(crate) enum ByFile {
    /// Through the descriptor of the program.
    AppFd(Reason),
    /// Out of pinned pages, or by a plan: the file, and how many bytes it has of the range.
    Planned(Arc<FileState>, u64),
}

/// `p2p_mapped`: so is the buffer.
pub(crate) fn by_file(ctx: &Reader, fd: Fd, stat: &Stat, (offset, len): (u64, u64), p2p_mapped: bool) -> ByFile {
    if ctx.files.shadow_workers().is_none() {
        return ByFile::AppFd(Reason::NoWorkers);
    }
    let regular = stat.kind == FileKind::Regular;
    let within = if regular { len.min(stat.size.saturating_sub(offset)) } else { len };
    // Of the end of a file, and of files whose size says nothing (procfs), only a read finds out.
    let small = if p2p_mapped { SMALL_P2P_MIN - 1 } else { SMALL_REQUEST_MAX };
    if within <= small as u64 {
        return ByFile::AppFd(Reason::Small);
    }
    let file = match ctx.files.get(fd, *stat) {
        Ok(file) => file,
        Err(reason) => return ByFile::AppFd(reason),
    };
    let within = if regular { within } else { len.min(file.size.saturating_sub(offset)) };
    if within == 0 { ByFile::AppFd(Reason::Small) } else { ByFile::Planned(file, within) }
}

/// Whether storage of this file may DMA into a buffer, for a request at `offset`, if it can be trusted to.
pub(crate) fn p2p_possible(ctx: &Reader, file: &FileState, buffer: &Buffer, offset: u64) -> Result<(), Reason> {
    if !buffer.p2p_mapped {
        return Err(Reason::NoP2pMapping);
    }
    if !ctx.policy.allows(Route::P2p) {
        return Err(Reason::BySetting);
    }
    file.direct_fd.as_ref().map_err(|reason| *reason).map(drop)?;
    // Segments begin on whole blocks of the file; there the address must be one that the disk takes. A disk that takes
    // any word (NVMe: 4 bytes) so serves a buffer that begins with the payload after a file's odd-sized header.
    let memory = u64::from(file.direct_align.memory).max(1);
    match buffer.addr {
        Some(addr) if addr.0 % memory != offset % memory => Err(Reason::P2pMisaligned),
        _ => Ok(()),
    }
}

/// Up to which length the kernel's read-ahead serves the requests of this sequential stream best; `None` if the request
/// is no part of one, or too long. `follows`: it begins where the last one of this descriptor ended.
pub(crate) fn readahead_limit(
    ctx: &Reader,
    file: &Arc<FileState>,
    (advice, follows): (Advice, bool),
    len: u64,
    costs: &CostEntry,
    storage: Route,
    abilities: Capabilities,
) -> Option<u64> {
    let in_stream = advice == Advice::Sequential || (advice == Advice::Normal && follows);
    let max_window = readahead::max_buffered_request(file.block_stack().read_ahead(), advice == Advice::Sequential);
    (in_stream && len <= max_window).then(|| {
        let model = costs.model(&ctx.files.ctx, file, storage);
        readahead::max_profitable_request(max_window, &model, cache_route(abilities))
    })
}

/// What a request may use, and why not more. `p2p`: whether storage may DMA into its buffer; `dma`: whether pages may
/// be registered for it.
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

/// The segments of a surveyed range, and whether its absent bytes are left to the kernel's read-ahead. `readahead`: it
/// serves this stream.
pub(crate) fn plan_extents(
    extents: &[Extent],
    mut constraints: RouteConstraints,
    readahead: bool,
    model: impl FnOnce(Route) -> Model,
) -> (Schedule, bool) {
    let absent = || extents.iter().any(|e| e.residency == Residency::Absent);
    let use_readahead = readahead && constraints.storage.is_some() && absent();
    if use_readahead {
        (constraints.storage, constraints.refused) = (None, Some(Reason::ReadAhead));
    }
    let mut schedule = Schedule::default();
    let model = model(constraints.storage.unwrap_or(Route::Direct));
    plan(Objective::Concurrent, extents, &model, &constraints, &mut schedule);
    if use_readahead {
        let is_absent = |s: &&mut Segment| s.reason == Reason::Absent;
        schedule.segments.iter_mut().filter(is_absent).for_each(|s| (s.reason, s.refused) = (Reason::ReadAhead, None));
    }
    (schedule, use_readahead)
}
