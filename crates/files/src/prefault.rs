//! Page tables of the range that a stream will ask for next, filled by a shadow worker (`tables.rs` says when that pays).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_host::lock;
use spinio_sys::linux::PAGE;

use crate::ctx::FilesCtx;
use crate::state::FileState;

/// A stream has come to `next` with requests of `len` bytes.
pub fn prefault_next(ctx: &FilesCtx, file: &Arc<FileState>, next: u64, len: u64) {
    let tables = &file.prefault;
    if !tables.is_slow.load(Relaxed) || !file.likely_cached() {
        return;
    }
    let Some(mapping) = file.cached_mapping(next + 1) else { return };
    let range = next..(next + len).min(mapping.len as u64);
    if tables.covers(&mapping, &range) || tables.busy.swap(true, Relaxed) {
        return;
    }
    let (kernel, theirs) = (ctx.sys, Arc::clone(file));
    let fill = move || {
        let asked = kernel.cachestat(theirs.cached.get(), range.start, range.end - range.start);
        // What is absent would be read in.
        if asked.is_ok_and(|c| c.cached * PAGE as u64 >= range.end - range.start) {
            mapping.prefault(range.clone());
            *lock(&theirs.prefault.ready) = (mapping.ptr as usize, range);
        }
        theirs.prefault.busy.store(false, Relaxed);
    };
    match ctx.workers.shadow() {
        Some(keepers) => keepers.for_key(file.storage).spawn_detached(fill),
        None => tables.busy.store(false, Relaxed),
    }
}
