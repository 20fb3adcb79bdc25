//! Which way a write goes: decided here for the write itself, and for `spinio explain --write`.

use std::sync::Arc;

use spinio_device::Device;
use spinio_plan::{Extent, Prediction, Reason, Residency, Route, Schedule, Segment};
use spinio_plan::{WriteConstraints, WriteDecision, decide_write, split_aligned};
use spinio_sys::linux::{self, Fd};

use super::max_single_call;
use crate::ctx::Writer;
use crate::decide::Buffer;
use crate::explain::Explanation;
use crate::explain::stat_seekable;
use spinio_files::FileState;
use spinio_transfer::Error;

/// Bytes from which another way than the page cache is looked into: for device memory that storage can fetch from, and
/// for other.
pub(super) const MIN_P2P: u64 = 64 << 10;
pub(super) const MIN_DIRECT: u64 = 1 << 20;

/// O_SYNC and O_DSYNC share a bit, which either sets.
pub(super) const SYNC_FLAGS: u32 = linux::O_SYNC | linux::O_DSYNC;

/// A write before it is made.
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
    /// Whether storage may fetch from this memory, alignment in the file aside.
    pub(super) p2p: Result<(), Reason>,
    /// Whether a descriptor of ours may write here.
    pub(super) shadow: Result<(), Reason>,
}

impl WriteQuery<'_> {
    /// What direct I/O counts in.
    pub(super) fn alignment(&self) -> u64 {
        u64::from(self.file.direct_align.offset).max(512)
    }

    /// The way it goes.
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
        // What goes into the page cache is one step for other writers. Direct writes of blocks that are there already go on
        // side by side (ext4, xfs), and two of them were seen to mix.
        let atomic = if self.chunked { Ok(()) } else { Err(Reason::NotAtomic) };
        let case = WriteConstraints {
            len: self.len,
            cache_route: self.cache_route,
            synchronous: self.flags & SYNC_FLAGS != 0,
            cached: self.cached_bytes() > 0,
            direct: aligned_or_chunked.and(atomic).and(direct),
            p2p: aligned_or_chunked.and(self.p2p).and(self.shadow),
        };
        let model =
            self.ctx.files.cost_entry(self.file, self.device).model(&self.ctx.files.ctx, self.file, Route::Direct);
        decide_write(&case, &model)
    }

    /// Bytes of the range in the page cache; all of it if the kernel will not say.
    fn cached_bytes(&self) -> u64 {
        let cached = self.ctx.files.sys().cachestat(self.fd, self.offset, self.len);
        cached.map_or(self.len, |c| (c.cached * linux::PAGE as u64).min(self.len))
    }
}

impl Writer {
    /// Explains a `pwrite` of `len` bytes at `offset` out of a buffer, through a descriptor with the status flags of `fd`.
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
                true => ctx
                    .files
                    .p2p_trust
                    .p2p_trust(file.storage, buffer.device)
                    .map_or(Ok(()), |verdict| verdict.allows()),
            }
            .and(file.direct_fd.as_ref().map(drop).map_err(|reason| *reason)),
            shadow: file.direct_fd.as_ref().map(drop).map_err(|reason| *reason),
        });
        let min = if buffer.p2p_mapped { MIN_P2P } else { MIN_DIRECT };
        let eligible = query.as_ref().filter(|_| len >= min && flags & linux::O_APPEND == 0);
        let decision = eligible.map_or(via_app_fd, |prospect| match prospect.decide() {
            way if way.route.from_cache() => WriteDecision { refused: way.refused, ..via_app_fd },
            way => way,
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
                file.stripes.unknown_reason(&ctx.files.ctx, (&file.cached, file.size), &stat, offset..offset + len)
            })
            .map(|why| format!("portions of it end anywhere in stripes, so that the array reads old parity: {why}"));
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
