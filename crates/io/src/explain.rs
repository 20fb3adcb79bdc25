//! What a read would do, without doing it.
//!
//! Known flaw: what a lease of a held file is worth is found out by using it, so a hold that is about to end is taken at its
//! word.

use std::sync::Arc;

use spinio_device::{Allocation, Capabilities, Device};
use spinio_plan::geometry::BlockStack;
use spinio_plan::{Extent, Objective, Prediction, Reason, Residency, Route, Schedule, plan, predict};
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, FileKind, Stat};

use crate::ctx::Reader;
use crate::read::plan_range;
use spinio_files::ResidencyAccess;
use spinio_files::residency::Survey;
use spinio_host::settings::SMALL_REQUEST_MAX;
use spinio_host::syscalls::Syscalls;
use spinio_transfer::Error;

/// The buffer a read would go to.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Its device.
    pub device: &'static dyn Device,
    /// Of its device.
    pub abilities: Capabilities,
    /// The kernel can make a storage device DMA into it.
    pub p2p_mapped: bool,
}

impl Buffer {
    /// One in this allocation.
    pub fn of(allocation: &Allocation) -> Buffer {
        let Allocation { device, p2p_mapped, .. } = *allocation;
        Buffer { device, abilities: device.capabilities(), p2p_mapped }
    }
}

/// What a read of a range would do, and why.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// First byte.
    pub offset: u64,
    /// Bytes up to the end of the file.
    pub len: u64,
    /// How the residency was asked.
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
        let ctx = self;
        let stat = stat_seekable(ctx.files.sys(), fd, offset, len)?;
        let app_fd_plan = |len, reason| {
            let route = if buffer.abilities.has_dma_engine { Route::Copy } else { Route::Store };
            let schedule = if len > 0 { Schedule::single(len, route, reason) } else { Schedule::default() };
            Explanation {
                offset,
                len,
                residency_source: "not at all: this read goes through the page cache whatever is there",
                extents: if len > 0 { vec![Extent { len, residency: Residency::Unknown }] } else { vec![] },
                schedule,
                prediction: Prediction::default(),
                model: "none".to_owned(),
                storage: self.files.storage(fd).unwrap_or_default(),
                advice: vec![],
            }
        };
        let regular = stat.kind == FileKind::Regular;
        let within = if regular { len.min(stat.size.saturating_sub(offset)) } else { len };
        let Some(shadow) = ctx.files.shadow_workers() else { return Ok(app_fd_plan(within, Reason::NoWorkers)) };
        let file = match ctx.files.get(fd, stat) {
            Ok(file) => file,
            Err(reason) => return Ok(app_fd_plan(within, reason)),
        };
        let within = if regular { within } else { len.min(file.size.saturating_sub(offset)) };
        if within == 0 {
            return Ok(app_fd_plan(0, Reason::Small));
        }
        if within > SMALL_REQUEST_MAX as u64 && ctx.pinned.can_serve(file.key(), stat.size, buffer.device) {
            return Ok(Explanation {
                residency_source: "not at all: the file is held, so all of it is in memory",
                extents: vec![Extent { len: within, residency: Residency::Clean }],
                schedule: Schedule::single(within, Route::Dma, Reason::Pinned),
                storage: Arc::clone(file.block_stack()),
                ..app_fd_plan(within, Reason::Pinned)
            });
        }
        let p2p = match buffer.p2p_mapped {
            false => Err(Reason::NoP2pMapping),
            true if !ctx.policy.allows(Route::P2p) => Err(Reason::BySetting),
            true => match &file.direct_fd {
                Ok(_) => ctx.files.p2p_trust.known_refusal(file.storage).map_or(Ok(()), Err),
                Err(reason) => Err(*reason),
            },
        };
        let (sys, nonce, file_ref) = (ctx.files.sys(), ctx.files.probe_nonce(), Arc::clone(&file));
        let survey = move || {
            let (kernel, fd) = (sys, file_ref.cached.get());
            match file_ref.residency_access {
                ResidencyAccess::InMemory => vec![Extent { len: within, residency: Residency::Clean }],
                ResidencyAccess::NotPermitted => {
                    Survey { sys: kernel, fd, mapping: None }.by_probes(offset, within, plan_range::PROBE_SPAN, nonce)
                }
                _ => {
                    let mapping = file_ref.mapping(kernel, offset + within);
                    Survey { sys: kernel, fd, mapping: mapping.as_deref() }.by_cachestat(offset, within)
                }
            }
        };
        let access = file.residency_access;
        let Some(extents) = shadow.for_key(file.storage).run_blocking(survey) else {
            return Ok(app_fd_plan(within, Reason::NoWorkers));
        };
        let constraints = plan_range::constraints(ctx, &file, buffer.abilities, p2p, ctx.policy.may_register(), offset);
        let known = ctx.files.cost_entry(&file, buffer.device);
        let model = known.model(&ctx.files.ctx, &file, constraints.storage.unwrap_or(Route::Direct));
        let mut schedule = Schedule::default();
        plan(Objective::Concurrent, &extents, &model, &constraints, &mut schedule);
        if within <= SMALL_REQUEST_MAX as u64 {
            schedule = Schedule::single(within, constraints.cache, Reason::Small);
        }
        let prediction = predict(Objective::Concurrent, &extents, &schedule, &model);
        let size = if regular { stat.size } else { file.size };
        let file_continues = size > offset + within;
        let advice = advice(&extents, &schedule, &constraints.refused, access, (within, file_continues));
        Ok(Explanation {
            offset,
            len: within,
            residency_source: match access {
                ResidencyAccess::NotPermitted => "a byte every 64 KiB (RWF_NOWAIT): the file belongs to somebody else",
                ResidencyAccess::InMemory => "not at all: this file system keeps its files in memory",
                _ => "cachestat, and mincore where a step is mixed",
            },
            extents,
            schedule,
            prediction,
            model: known.describe(&file),
            storage: Arc::clone(file.block_stack()),
            advice,
        })
    }
}

/// What a descriptor names, if that has offsets.
pub(crate) fn stat_seekable(sys: &dyn Syscalls, fd: Fd, offset: u64, len: u64) -> Result<Stat, Error> {
    const S_IFMT: u32 = 0o170_000;
    const S_IFDIR: u32 = 0o040_000;
    let checked = sys.fstat(fd).and_then(|stat| match stat.kind {
        FileKind::Other => Err(if stat.mode & S_IFMT == S_IFDIR { Errno::ISDIR } else { Errno::SPIPE }),
        _ => Ok(stat),
    });
    checked.map_err(|e| Error::kernel(e, "explain", offset, len))
}

/// What would make it faster, most useful first. `more`: the file goes on behind these `len` bytes.
fn advice(
    extents: &[Extent],
    schedule: &Schedule,
    refused: &Option<Reason>,
    access: ResidencyAccess,
    (len, file_continues): (u64, bool),
) -> Vec<String> {
    let bytes = |r: Residency| extents.iter().filter(|e| e.residency == r).map(|e| e.len).sum::<u64>();
    let mut out = Vec::new();
    if len <= SMALL_REQUEST_MAX as u64 && file_continues {
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
                out.push("storage cannot write into this buffer itself: `spinio doctor` tells what P2P needs".into());
            }
            Some(reason) => out.push(format!("a faster way from storage was refused: {reason}")),
            None => {}
        }
    }
    if bytes(Residency::Dirty) > 0 && schedule.segments.iter().any(|s| !s.route.from_cache()) {
        out.push("dirty pages are written back before storage is read: fsync beforehand would spare it".into());
    }
    if access == ResidencyAccess::NotPermitted {
        out.push("the owner of the file, or who may write it, can be told its residency exactly and faster".into());
    }
    if schedule.segments.len() > 64 {
        out.push(format!("{} segments: the cached pages lie scattered among absent ones", schedule.segments.len()));
    }
    out
}
