//! Decides the route of a write: for the write itself, and for `spinio explain --write`.

use std::sync::Arc;

use spinio_device::Device;
use spinio_plan::{Extent, Prediction, Reason, Residency, Route, Schedule, Segment};
use spinio_plan::{WriteConstraints, WriteDecision, decide_write, split_aligned};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::max_single_call;
use crate::ctx::Writer;
use crate::decide::Buffer;
use crate::explain::Explanation;
use crate::explain::stat_seekable;
use spinio_files::FileState;
use spinio_transfer::Error;

/// Smallest writes, in bytes, for which a route other than the page cache is considered: for device memory that storage
/// can DMA from, and for other memory.
pub(super) const MIN_P2P: u64 = 64 << 10;
pub(super) const MIN_DIRECT: u64 = 1 << 20;

/// O_SYNC and O_DSYNC. They share a bit, which either of them sets.
pub(super) const SYNC_FLAGS: u32 = linux::O_SYNC | linux::O_DSYNC;

/// A write whose route is to be decided.
pub(super) struct WriteQuery<'a> {
    pub(super) ctx: &'a Writer,
    pub(super) file: &'a Arc<FileState>,
    pub(super) device: &'static dyn Device,
    pub(super) fd: Fd,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Status flags of the descriptor.
    pub(super) flags: u32,
    /// The route into the page cache.
    pub(super) cache_route: Route,
    /// Larger than the staging memory, so that it may be cut.
    pub(super) chunked: bool,
    /// Whether storage may DMA from this memory, apart from the alignment in the file.
    pub(super) p2p: Result<(), Reason>,
    /// Whether a shadow descriptor may write this range.
    pub(super) shadow: Result<(), Reason>,
}

impl WriteQuery<'_> {
    /// The alignment of direct I/O, in bytes.
    pub(super) fn alignment(&self) -> u64 {
        u64::from(self.file.direct_align.offset).max(512)
    }

    /// The route and the reason for it.
    pub(super) fn decide(&self) -> WriteDecision {
        let aligned = (self.offset | self.len).is_multiple_of(self.alignment());
        let single_call = if aligned { Ok(()) } else { Err(Reason::NotAtomic) };
        if self.flags & linux::O_DIRECT != 0 {
            let refused = single_call.and(self.p2p).err();
            let route = if refused.is_some() { Route::Direct } else { Route::P2p };
            return WriteDecision { route, reason: Reason::AppODirect, refused };
        }
        let aligned_or_chunked = if self.chunked { Ok(()) } else { single_call };
        let direct = if self.ctx.policy.allows(Route::Direct) { self.shadow } else { Err(Reason::BySetting) };
        // A buffered write is atomic with respect to other writers. Direct writes of allocated blocks run concurrently
        // (ext4, xfs), and two of them were seen to mix.
        let atomic = if self.chunked { Ok(()) } else { Err(Reason::NotAtomic) };
        let constraints = WriteConstraints {
            len: self.len,
            cache_route: self.cache_route,
            synchronous: self.flags & SYNC_FLAGS != 0,
            cached: self.cached_bytes() > 0,
            direct: aligned_or_chunked.and(atomic).and(direct),
            p2p: aligned_or_chunked.and(self.p2p).and(self.shadow),
        };
        let model =
            self.ctx.files.cost_entry(self.file, self.device).model(&self.ctx.files.ctx, self.file, Route::Direct);
        decide_write(&constraints, &model)
    }

    /// Bytes of the range in the page cache; the whole range if cachestat fails.
    fn cached_bytes(&self) -> u64 {
        let cached = self.ctx.files.sys().cachestat(self.fd, self.offset, self.len);
        cached.map_or(self.len, |c| (c.cached * linux::PAGE as u64).min(self.len))
    }
}

impl Writer {
    /// Explains a `pwrite` of `len` bytes at `offset` out of a buffer, through a descriptor with the status flags of
    /// `fd`.
    pub fn explain_write(
        self: &Arc<Self>,
        fd: Fd,
        offset: u64,
        len: u64,
        buffer: Buffer,
    ) -> Result<Explanation, Error> {
        let ctx = self;
        let fail = |e| Error::kernel(e, "explain", offset, len);
        let stat = stat_seekable(ctx.files.sys(), fd, offset, len)?;
        // As pwrite does.
        let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or_else(|| fail(Errno::INVAL))?;
        let flags = ctx.files.sys().status_flags(fd).map_err(fail)? as u32;
        let cache_route = if buffer.abilities.has_dma_engine { Route::Copy } else { Route::Store };
        let chunked = len > max_single_call(ctx, stat.kind);
        let via_app_fd = match flags & linux::O_DIRECT != 0 {
            true => WriteDecision { route: Route::Direct, reason: Reason::AppODirect, refused: None },
            false => {
                let reason = if chunked { Reason::Chunked } else { Reason::IntoCache };
                WriteDecision { route: cache_route, reason, refused: None }
            }
        };
        let file = ctx.files.get(fd, stat).ok();
        let query = file.as_ref().map(|file| WriteQuery {
            ctx,
            file,
            device: buffer.device,
            fd,
            offset,
            len,
            flags,
            cache_route,
            chunked,
            p2p: match buffer.p2p_mapped {
                false => Err(Reason::NoP2pMapping),
                true if !ctx.policy.allows(Route::P2p) => Err(Reason::BySetting),
                true => {
                    ctx.files.p2p_trust.p2p_trust(file.storage, buffer.device).map_or(Ok(()), |trust| trust.allows())
                }
            }
            .and(file.direct_fd.as_ref().map(drop).map_err(|reason| *reason)),
            shadow: file.direct_fd.as_ref().map(drop).map_err(|reason| *reason),
        });
        let min = if buffer.p2p_mapped { MIN_P2P } else { MIN_DIRECT };
        let eligible = query.as_ref().filter(|_| len >= min && flags & linux::O_APPEND == 0);
        let decision = eligible.map_or(via_app_fd, |query| match query.decide() {
            decision if decision.route.from_cache() => WriteDecision { refused: decision.refused, ..via_app_fd },
            decision => decision,
        });
        let (front, middle) = match decision.route.from_cache() || !chunked {
            true => (0, len),
            false => split_aligned(offset, len, query.as_ref().map_or(512, WriteQuery::alignment)),
        };
        let edge = |offset, len| Segment { offset, len, route: cache_route, reason: Reason::Edge, refused: None };
        let WriteDecision { route, reason, refused } = decision;
        let mut segments = vec![
            edge(0, front),
            Segment { offset: front, len: middle, route, reason, refused },
            edge(front + middle, len - front - middle),
        ];
        segments.retain(|s| s.len > 0);
        let advice = file.iter().filter(|_| chunked && route == Route::Direct);
        let advice = advice
            .filter_map(|file| {
                file.stripes.unknown_reason(&ctx.files.ctx, (&file.cached, file.size), &stat, offset..end)
            })
            .map(|why| format!("chunks of it end inside stripes, so that the array reads old parity: {why}"));
        let cached = query.as_ref().map_or(0, WriteQuery::cached_bytes);
        let residency = match cached {
            0 => Residency::Absent,
            all if all >= len => Residency::Clean,
            _ => Residency::Unknown,
        };
        Ok(Explanation {
            offset,
            len,
            residency_source: "cachestat, for the range as a whole",
            extents: if len > 0 { vec![Extent { len, residency }] } else { vec![] },
            schedule: Schedule::from(segments),
            prediction: Prediction::default(),
            model: file
                .as_ref()
                .map_or_else(|| "none".to_owned(), |file| ctx.files.cost_entry(file, buffer.device).describe(file)),
            storage: self.files.storage(fd).unwrap_or_default(),
            advice: advice.collect(),
        })
    }
}
