//! Fills the page tables of the range that a stream will read next, on a shadow worker (`prefault_state.rs`: when that
//! is worth it).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use spinio_host::lock;
use spinio_sys::linux::PAGE;

use crate::ctx::FilesCtx;
use crate::state::FileState;

/// A stream has reached `next` with requests of `len` bytes.
pub fn prefault_next(ctx: &FilesCtx, file: &Arc<FileState>, next: u64, len: u64) {
    let state = &file.prefault;
    if !state.is_slow.load(Relaxed) || !file.likely_cached() {
        return;
    }
    let Some(mapping) = file.cached_mapping(next + 1) else { return };
    let range = next..(next + len).min(mapping.len as u64);
    if state.covers(&mapping, &range) || state.busy.swap(true, Relaxed) {
        return;
    }
    let (sys, worker_file) = (ctx.sys, Arc::clone(file));
    let fill = move || {
        let found = sys.cachestat(worker_file.cached.get(), range.start, range.end - range.start);
        // Prefaulting an absent page would read it from storage.
        if found.is_ok_and(|c| c.cached * PAGE as u64 >= range.end - range.start) {
            mapping.prefault(range.clone());
            *lock(&worker_file.prefault.ready) = (mapping.ptr as usize, range);
        }
        worker_file.prefault.busy.store(false, Relaxed);
    };
    match ctx.workers.shadow() {
        Some(shadow) => shadow.for_key(file.storage).spawn_detached(fill),
        None => state.busy.store(false, Relaxed),
    }
}
