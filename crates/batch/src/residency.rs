//! Which pieces of a batch are in the page cache.
//!
//! ```text
//!   owner     a sample of many pieces: all there, or hardly one? then that counts for all
//!             else the whole span asked at once: all, none, or page by page (mincore)
//!   stranger  a sample of the pieces, a byte each: nearly all there? then all count as there
//! ```
//!
//! To ask about every page of 8 GiB takes 70 ms, as long as reading a million pieces of it; a sample takes 0.1 ms. A wrong
//! "absent" is read from storage, which is right; a wrong "cached" is read by the kernel into the page cache, which is right
//! too.
//!
//! Known flaw: of a stranger's file that is cached in part, either all pieces go through the page cache or none does.

use std::sync::Arc;

use spinio_plan::Route;
use spinio_sys::linux::{self, PAGE, RWF_NOWAIT};

use crate::work::{Item, Source};
use crate::ctx::BatchCtx;
use spinio_files::Rights;
use spinio_transfer::Mapping;

const PAGE64: u64 = PAGE as u64;

/// Pieces of a stranger's file that are tried.
const SAMPLE: usize = 64;

/// Pieces of one's own file that are tried, and from how many on that is done.
const TRIED: usize = 256;
const MANY: usize = 4096;

/// One of so many tried that is there is not worth asking about the others: that would take as long as reading some per
/// cent of them, and storage would stand still meanwhile.
const HARDLY: usize = 64;

/// Asking about one piece costs as much as about so many pages in one go.
const ONE: u64 = 12;

/// Pages asked about in one go.
const STEP: usize = 16 << 10;

/// Where the pieces of one file are.
pub(crate) enum Where {
    Cached,
    Absent,
    /// A byte for each page from the first on, its lowest bit set if the page is there.
    Pages(u64, Vec<u8>),
    /// Each has to be asked about.
    Ask(Arc<Mapping>),
}

impl Where {
    /// Whether any page of an item is not there.
    pub(crate) fn is_absent(&self, item: &Item) -> bool {
        let (first, end) = (item.offset / PAGE64, (item.offset + u64::from(item.len)).div_ceil(PAGE64));
        match self {
            Where::Cached => false,
            Where::Absent => true,
            Where::Pages(from, bits) => bits[(first - from) as usize..(end - from) as usize].iter().any(|b| b & 1 == 0),
            Where::Ask(mapping) => {
                let mut bits = [0u8; (crate::work::CUT / PAGE64) as usize + 2];
                let bits = &mut bits[..(end - first) as usize];
                // SAFETY: the mapping has all bytes of the file that a piece can ask for, and outlives the call.
                let asked = unsafe { linux::mincore(mapping.ptr.wrapping_add((first * PAGE64) as usize), bits) };
                asked.is_ok() && bits.iter().any(|b| b & 1 == 0)
            }
        }
    }
}

/// Asks about items of one file.
pub(crate) fn ask(ctx: &Arc<BatchCtx>, source: &Source, items: &[Item]) -> Where {
    let file = &source.file;
    if file.direct.is_err() || file.rights == Rights::Resident || items.is_empty() {
        return Where::Cached;
    }
    if file.rights == Rights::Stranger {
        return stranger(ctx, source, items);
    }
    if items.len() >= MANY {
        let there = |i: &Item| ctx.reader.files.sys().cachestat(source.fd, i.offset, 1).map(|c| c.cached > 0);
        let tried: Result<Vec<bool>, _> = items.iter().step_by(items.len() / TRIED).map(there).collect();
        // Kernels before 6.5 do not tell.
        if let Ok(tried) = tried {
            let found = tried.iter().filter(|there| **there).count();
            if found == tried.len() {
                return Where::Cached;
            }
            if found * HARDLY <= tried.len() {
                return Where::Absent;
            }
        }
    }
    let first = items.iter().map(|i| i.offset).min().unwrap_or(0) / PAGE64;
    let end = items.iter().map(|i| i.offset + u64::from(i.len)).max().unwrap_or(0).div_ceil(PAGE64);
    if let Ok(c) = ctx.reader.files.sys().cachestat(source.fd, first * PAGE64, (end - first) * PAGE64) {
        if c.cached == 0 {
            return Where::Absent;
        }
        if c.cached >= end - first {
            return Where::Cached;
        }
    }
    let kernel = ctx.reader.files.sys();
    let mapping = file.kept_mapping(end * PAGE64).or_else(|| {
        let file = Arc::clone(file);
        ctx.reader.files.shadow_workers()?.call(move || file.mapping(kernel, end * PAGE64))?
    });
    // Without a mapping nothing tells: the page cache serves what it has and reads the rest.
    let Some(mapping) = mapping.filter(|m| m.len as u64 >= end * PAGE64) else { return Where::Cached };
    if (items.len() as u64).saturating_mul(ONE) < end - first {
        return Where::Ask(mapping);
    }
    let mut bits = vec![0u8; (end - first) as usize];
    for (at, some) in bits.chunks_mut(STEP).enumerate() {
        let from = (first as usize + at * STEP) * PAGE;
        // SAFETY: inside the mapping, which outlives the call.
        if unsafe { linux::mincore(mapping.ptr.wrapping_add(from), some) }.is_err() {
            return Where::Cached;
        }
    }
    Where::Pages(first, bits)
}

/// Tries a few pieces, by a keeper, whose twin starts no read-ahead.
fn stranger(ctx: &Arc<BatchCtx>, source: &Source, items: &[Item]) -> Where {
    let step = (items.len() / SAMPLE).max(1);
    let tried: Vec<u64> = items.iter().step_by(step).map(|i| i.offset).collect();
    let (kernel, file) = (ctx.reader.files.sys(), Arc::clone(&source.file));
    let count = tried.len();
    let there = ctx.reader.files.shadow_workers().and_then(|crew| {
        crew.call(move || {
            let there = |&at: &u64| {
                let mut byte = 0u8;
                // SAFETY: one byte is read into a local.
                let got = unsafe { kernel.pread(Route::Copy, file.cached.get(), &mut byte, 1, at, RWF_NOWAIT) };
                got == Ok(1)
            };
            tried.iter().filter(|at| there(at)).count()
        })
    });
    match there {
        Some(there) if there * 10 < count * 9 => Where::Absent,
        _ => Where::Cached,
    }
}
