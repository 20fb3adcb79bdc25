//! Which fragments of a batch are in the page cache.
//!
//! ```text
//!   may survey   a sample of many fragments: if all or hardly any are cached, that is assumed of all
//!                else the whole span surveyed at once: all, none, or page by page (mincore)
//!   may not      a sample of the fragments, a byte each: if nearly all are cached, all count as cached
//! ```
//!
//! A survey of every page of 8 GiB takes 70 ms, as long as reading a million operations of it; a sample takes 0.1 ms. A
//! wrong "absent" is read from storage, which is correct; a wrong "cached" is read by the Linux kernel into the page
//! cache, which is correct too.
//!
//! Known flaw: of another user's file that is cached in part, either all fragments go through the page cache or none
//! does.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::sync::Arc;

use spinio_plan::Route;
use spinio_sys::linux::{self, PAGE, RWF_NOWAIT};

use crate::ctx::BatchCtx;
use crate::state::{Fragment, Source};
use spinio_files::ResidencyAccess;
use spinio_transfer::Mapping;

const PAGE64: u64 = PAGE as u64;

/// Fragments of another user's file that are sampled.
const READ_SAMPLES: usize = 64;

/// The number of fragments of a file of this user that are sampled, and the number from which that is done.
const STAT_SAMPLES: usize = 256;
const SAMPLING_MIN: usize = 4096;

/// If at most one in this many samples is cached, the others are not surveyed: that would take as long as reading some
/// per cent of them, and storage would be idle meanwhile.
const ABSENT_RATIO: usize = 64;

/// A survey of one fragment costs as much as a survey of this many pages in one call.
const PROBE_COST_PAGES: u64 = 12;

/// Pages surveyed in one call.
const MINCORE_STEP: usize = 16 << 10;

/// The range of the operations of one file.
pub(crate) enum FragmentResidency {
    Cached,
    Absent,
    /// A byte for each page from the first on, its lowest bit set if the page is cached.
    PageMap(u64, Vec<u8>),
    /// Each fragment has to be surveyed.
    Probe(Arc<Mapping>),
}

impl FragmentResidency {
    /// Whether any page of a fragment is absent.
    pub(crate) fn is_absent(&self, fragment: &Fragment) -> bool {
        let (first, end) = (fragment.offset / PAGE64, (fragment.offset + u64::from(fragment.len)).div_ceil(PAGE64));
        match self {
            FragmentResidency::Cached => false,
            FragmentResidency::Absent => true,
            FragmentResidency::PageMap(from, bits) => {
                bits[(first - from) as usize..(end - from) as usize].iter().any(|b| b & 1 == 0)
            }
            FragmentResidency::Probe(mapping) => {
                let mut bits = [0u8; (crate::state::MAX_FRAGMENT / PAGE64) as usize + 2];
                let bits = &mut bits[..(end - first) as usize];
                // SAFETY: the mapping has all bytes of the file that an operation can request, and outlives the call.
                let status = unsafe { linux::mincore(mapping.ptr.wrapping_add((first * PAGE64) as usize), bits) };
                status.is_ok() && bits.iter().any(|b| b & 1 == 0)
            }
        }
    }
}

/// Surveys fragments of one file.
pub(crate) fn survey(ctx: &Arc<BatchCtx>, source: &Source, fragments: &[Fragment]) -> FragmentResidency {
    let file = &source.file;
    if file.direct_fd.is_err() || file.residency_access == ResidencyAccess::InMemory || fragments.is_empty() {
        return FragmentResidency::Cached;
    }
    if file.residency_access == ResidencyAccess::NotPermitted {
        return sample_by_read(ctx, source, fragments);
    }
    if fragments.len() >= SAMPLING_MIN {
        let is_cached = |i: &Fragment| ctx.reader.files.sys().cachestat(source.fd, i.offset, 1).map(|c| c.cached > 0);
        let samples: Result<Vec<bool>, _> =
            fragments.iter().step_by(fragments.len() / STAT_SAMPLES).map(is_cached).collect();
        // Not before Linux 6.5.
        if let Ok(samples) = samples {
            let cached = samples.iter().filter(|cached| **cached).count();
            if cached == samples.len() {
                return FragmentResidency::Cached;
            }
            if cached * ABSENT_RATIO <= samples.len() {
                return FragmentResidency::Absent;
            }
        }
    }
    let first = fragments.iter().map(|i| i.offset).min().unwrap_or(0) / PAGE64;
    let end = fragments.iter().map(|i| i.offset + u64::from(i.len)).max().unwrap_or(0).div_ceil(PAGE64);
    if let Ok(c) = ctx.reader.files.sys().cachestat(source.fd, first * PAGE64, (end - first) * PAGE64) {
        if c.cached == 0 {
            return FragmentResidency::Absent;
        }
        if c.cached >= end - first {
            return FragmentResidency::Cached;
        }
    }
    let kernel = ctx.reader.files.sys();
    let mapping = file.cached_mapping(end * PAGE64).or_else(|| {
        let file = Arc::clone(file);
        ctx.reader
            .files
            .shadow_workers()?
            .for_key(source.file.storage)
            .run_blocking(move || file.mapping(kernel, end * PAGE64))?
    });
    // Without a mapping it is not known: the page cache serves cached pages and reads the rest.
    let Some(mapping) = mapping.filter(|m| m.len as u64 >= end * PAGE64) else { return FragmentResidency::Cached };
    if (fragments.len() as u64).saturating_mul(PROBE_COST_PAGES) < end - first {
        return FragmentResidency::Probe(mapping);
    }
    let mut bits = vec![0u8; (end - first) as usize];
    for (at, some) in bits.chunks_mut(MINCORE_STEP).enumerate() {
        let from = (first as usize + at * MINCORE_STEP) * PAGE;
        // SAFETY: inside the mapping, which outlives the call.
        if unsafe { linux::mincore(mapping.ptr.wrapping_add(from), some) }.is_err() {
            return FragmentResidency::Cached;
        }
    }
    FragmentResidency::PageMap(first, bits)
}

/// Samples a few fragments, by a shadow worker, whose descriptor starts no read-ahead.
fn sample_by_read(ctx: &Arc<BatchCtx>, source: &Source, items: &[Fragment]) -> FragmentResidency {
    let step = (items.len() / READ_SAMPLES).max(1);
    let samples: Vec<u64> = items.iter().step_by(step).map(|i| i.offset).collect();
    let (kernel, file) = (ctx.reader.files.sys(), Arc::clone(&source.file));
    let count = samples.len();
    let there = ctx.reader.files.shadow_workers().and_then(|shadow| {
        shadow.for_key(source.file.storage).run_blocking(move || {
            let is_cached = |&at: &u64| {
                let mut byte = 0u8;
                // SAFETY: one byte is read into a local.
                let got = unsafe { kernel.pread(Route::Copy, file.cached.get(), &mut byte, 1, at, RWF_NOWAIT) };
                got == Ok(1)
            };
            samples.iter().filter(|at| is_cached(at)).count()
        })
    });
    match there {
        Some(cached) if cached * 10 < count * 9 => FragmentResidency::Absent,
        _ => FragmentResidency::Cached,
    }
}
