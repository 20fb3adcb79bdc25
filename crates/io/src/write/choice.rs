//! Which way a write goes: decided here for the write itself, and for `spinio explain --write`.

use std::sync::Arc;

use spinio_device::Device;
use spinio_plan::{Extent, Prediction, Reason, Residency, Route, Schedule, Segment};
use spinio_plan::{WriteCase, WriteWay, write_cut, write_way};
use spinio_sys::linux::{self, Fd};

use super::one_call;
use crate::ctx::Writer;
use crate::explain::subject;
use spinio_files::File;
use crate::explain::{Buffer, Explanation};
use spinio_transfer::Error;

/// Bytes from which another way than the page cache is looked into: for device memory that storage can fetch from, and
/// for other.
pub(super) const LEAST_P2P: u64 = 64 << 10;
pub(super) const LEAST_DIRECT: u64 = 1 << 20;

/// O_SYNC and O_DSYNC share a bit, which either sets.
pub(super) const SYNC: u32 = linux::O_SYNC | linux::O_DSYNC;

/// A write before it is made.
pub(super) struct Prospect<'a> {
    pub(super) ctx: &'a Writer,
    pub(super) file: &'a Arc<File>,
    pub(super) device: &'static dyn Device,
    pub(super) fd: Fd,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Status flags of the descriptor.
    pub(super) flags: u32,
    /// The route into the page cache.
    pub(super) into_cache: Route,
    /// Larger than the staging memory, so that it may be cut.
    pub(super) in_parts: bool,
    /// Whether storage may fetch from this memory, alignment in the file aside.
    pub(super) p2p: Result<(), Reason>,
    /// Whether a descriptor of ours may write here.
    pub(super) twin: Result<(), Reason>,
}

impl Prospect<'_> {
    /// What direct I/O counts in.
    pub(super) fn unit(&self) -> u64 {
        u64::from(self.file.align.offset).max(512)
    }

    /// The way it goes.
    pub(super) fn way(&self) -> WriteWay {
        let aligned = (self.offset | self.len).is_multiple_of(self.unit());
        let uncut = if aligned { Ok(()) } else { Err(Reason::OneCall) };
        if self.flags & linux::O_DIRECT != 0 {
            let refused = uncut.and(self.p2p).err();
            let route = if refused.is_some() { Route::Direct } else { Route::P2p };
            return WriteWay { route, reason: Reason::OwnDirect, refused };
        }
        let whole = if self.in_parts { Ok(()) } else { uncut };
        let direct = if self.ctx.policy.allows(Route::Direct) { self.twin } else { Err(Reason::Forced) };
        // What goes into the page cache is one step for other writers. Direct writes of blocks that are there already go on
        // side by side (ext4, xfs), and two of them were seen to mix.
        let unmixed = if self.in_parts { Ok(()) } else { Err(Reason::OneCall) };
        let case = WriteCase {
            len: self.len,
            into_cache: self.into_cache,
            synchronous: self.flags & SYNC != 0,
            cached: self.cached() > 0,
            direct: whole.and(unmixed).and(direct),
            p2p: whole.and(self.p2p).and(self.twin),
        };
        let model = self.ctx.files.costs(self.file, self.device).plain(&self.ctx.files.ctx, self.file, Route::Direct);
        write_way(&case, &model)
    }

    /// Bytes of the range in the page cache; all of it if the kernel will not say.
    fn cached(&self) -> u64 {
        let told = self.ctx.files.sys().cachestat(self.fd, self.offset, self.len);
        told.map_or(self.len, |c| (c.cached * linux::PAGE as u64).min(self.len))
    }
}

impl Writer {
    /// Explains a `pwrite` of `len` bytes at `offset` out of a buffer, through a descriptor with the status flags of `fd`.
    pub fn explain_write(self: &Arc<Self>, fd: Fd, offset: u64, len: u64, buffer: Buffer) -> Result<Explanation, Error> {
        let ctx = self;
        let fail = |e| Error::kernel(e, "explain", offset, len);
        let stat = subject(ctx.files.sys(), fd, offset, len)?;
        let flags = ctx.files.sys().flags(fd).map_err(fail)? as u32;
        let into_cache = if buffer.abilities.copies { Route::Copy } else { Route::Store };
        let in_parts = len > one_call(ctx, stat.kind);
        let plain = match flags & linux::O_DIRECT != 0 {
            true => WriteWay { route: Route::Direct, reason: Reason::OwnDirect, refused: None },
            false => {
                let reason = if in_parts { Reason::InParts } else { Reason::IntoCache };
                WriteWay { route: into_cache, reason, refused: None }
            }
        };
        let file = ctx.files.get(fd, stat).ok();
        let prospect = file.as_ref().map(|file| Prospect {
            ctx,
            file,
            device: buffer.device,
            fd,
            offset,
            len,
            flags,
            into_cache,
            in_parts,
            p2p: match buffer.p2p_mapped {
                false => Err(Reason::NoP2pMapping),
                true if !ctx.policy.allows(Route::P2p) => Err(Reason::Forced),
                true => ctx.files.p2p.verdict(file.storage, buffer.device).map_or(Ok(()), |verdict| verdict.allows()),
            }
            .and(file.direct.as_ref().map(drop).map_err(|reason| *reason)),
            twin: file.direct.as_ref().map(drop).map_err(|reason| *reason),
        });
        let least = if buffer.p2p_mapped { LEAST_P2P } else { LEAST_DIRECT };
        let looked = prospect.as_ref().filter(|_| len >= least && flags & linux::O_APPEND == 0);
        let way = looked.map_or(plain, |prospect| match prospect.way() {
            way if way.route.from_cache() => WriteWay { refused: way.refused, ..plain },
            way => way,
        });
        let (front, middle) = match way.route.from_cache() || !in_parts {
            true => (0, len),
            false => write_cut(offset, len, prospect.as_ref().map_or(512, Prospect::unit)),
        };
        let edge = |offset, len| Segment { offset, len, route: into_cache, reason: Reason::Edge, refused: None };
        let WriteWay { route, reason, refused } = way;
        let mut segments = vec![
            edge(0, front),
            Segment { offset: front, len: middle, route, reason, refused },
            edge(front + middle, len - front - middle),
        ];
        segments.retain(|s| s.len > 0);
        let advice = file.iter().filter(|_| in_parts && route == Route::Direct);
        let advice = advice
            .filter_map(|file| file.stripes.why_unknown(&ctx.files.ctx, (&file.cached, file.size), &stat, offset..offset + len))
            .map(|why| format!("portions of it end anywhere in stripes, so that the array reads old parity: {why}"));
        let cached = prospect.as_ref().map_or(0, Prospect::cached);
        let residency = match cached {
            0 => Residency::Absent,
            all if all >= len => Residency::Clean,
            _ => Residency::Unknown,
        };
        Ok(Explanation {
            offset,
            len,
            asked: "cachestat, for the range as a whole",
            extents: if len > 0 { vec![Extent { len, residency }] } else { vec![] },
            schedule: Schedule::from(segments),
            prediction: Prediction::default(),
            model: file
                .as_ref()
                .map_or_else(|| "none".to_owned(), |file| ctx.files.costs(file, buffer.device).describe(file)),
            storage: self.files.storage(fd).unwrap_or_default(),
            advice: advice.collect(),
        })
    }
}
