//! Stages that a device copies to and from at full speed, because their memory is registered with it.
//!
//! ```text
//!   device ── as pageable memory: through a buffer of the driver, 4 to 7 GB/s ──> stage of the window
//!          ── registered: by its copy engine, 55 GB/s (H200) ──────────────────>
//! ```
//!
//! To register the 8 MiB of a stage takes about as long as it saves in a release of two parts, so it is done at the first
//! release that has more, and for a map that has copied [`WORTH_IN_ALL`] in smaller ones: what each of these gives back of the
//! stage is new memory for the next one (3 ms for 4 MiB, an H200). It is for the life of the map: to unregister may wait for
//! all work of the device, as unmapping does anyway. The stage of a server that has ended stays mapped until then too.
//!
//! Many single pages are copied by one call of the driver, by a kernel, which can use registered memory only; a call for
//! each takes longer than its bytes. So it is worth it too once a map has copied many, at once or some at a time.
//!
//! Nothing is registered while a stream is stopped ([`crate::lane`]), and copies beside stops do not use the engine. What
//! cannot be registered is copied as before: the device then has refused once, and is not asked again for the map.
//!
//! Known flaws: 8 MiB of pinned memory for each map that has made a large release, or many smaller ones, or copied many single
//! pages, and 8 MiB more for each server that has ended since.

#![expect(unsafe_code, reason = "the device writes to memory of the process")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use spinio_device::{GatherEntry, PAGE_BYTES, PinnedBuffer, ReplicaMemory};
use spinio_host::lock;
use spinio_pagecache::messages::STAGE;

use crate::lane::{Lane, unless_stopped};
use crate::window::Window;

/// Pages of a release that are worth it: more than the stage has.
const WORTH: usize = STAGE as usize + 1;
/// Pages of all copies of a map that are worth it: 64 MiB.
const WORTH_IN_ALL: usize = 8 * STAGE as usize;
const STAGE_BYTES: usize = STAGE as usize * PAGE_BYTES;
/// Runs of pages, of all copies of a map, that are worth it: to register the stage takes as long as some hundred calls.
const WORTH_RUNS: usize = 256;
/// Runs that are copied by one call, if they are short.
const MANY: usize = 16;
/// The list of the pieces of a stage.
const LIST: usize = (STAGE as usize * size_of::<GatherEntry>()).next_multiple_of(PAGE_BYTES);

/// Those of one map.
pub(crate) struct RegisteredStages {
    device: &'static dyn ReplicaMemory,
    windows: Mutex<Vec<Arc<Window>>>,
    is_refused: AtomicBool,
    /// Pages that were copied through a stage, registered or not.
    pages: AtomicUsize,
    /// Runs of pages that one call could have copied.
    runs: AtomicUsize,
    /// For copies by one call; `None`: that cannot be done.
    list: OnceLock<Option<PinnedBuffer>>,
    has_kernel: bool,
}

impl RegisteredStages {
    pub(crate) fn new(device: &'static dyn ReplicaMemory) -> RegisteredStages {
        let has_kernel = device.prepare_pieces().is_ok();
        let (windows, is_refused, list) = (Mutex::default(), AtomicBool::new(false), OnceLock::new());
        let (pages, runs) = (AtomicUsize::new(0), AtomicUsize::new(0));
        RegisteredStages { device, windows, is_refused, pages, runs, list, has_kernel }
    }

    /// The list for copies of so many runs of pages by one call. `None`: each is copied for itself.
    pub(crate) fn list(&self, window: &Window, runs: usize, pages: usize) -> Option<*mut GatherEntry> {
        if runs < MANY || pages / runs > MANY || !window.is_registered() || Lane::current().is_some() {
            return None;
        }
        let list = self.list.get().copied().flatten();
        list.map(|list| list.ptr.cast())
    }

    /// So many pages in so many runs will be copied through the stage: registers it, if that is worth it and can be done now.
    pub(crate) fn prepare(&self, window: &Arc<Window>, pages: usize, runs: usize) {
        let many = if runs >= MANY && self.has_kernel { self.runs.fetch_add(runs, Relaxed) + runs } else { 0 };
        let in_all = self.pages.fetch_add(pages, Relaxed) + pages;
        let is_worth_it = pages >= WORTH || in_all >= WORTH_IN_ALL || many >= WORTH_RUNS;
        let registers = is_worth_it && !window.is_registered() && !self.is_refused.load(Relaxed);
        let lists = runs >= MANY && self.has_kernel && self.list.get().is_none();
        if !(registers || lists && window.is_registered())
            || Lane::current().is_some()
            || self.device.app_stream().is_capturing()
        {
            return;
        }
        if registers {
            // SAFETY: the stage is mapped as long as this has the window, whose file cannot shrink, and `trim_stage` leaves
            // its memory. If the server freed it, that would see older bytes only.
            let register = || unsafe { self.device.register_host(window.stage(0, STAGE as usize), STAGE_BYTES) };
            match unless_stopped(self.device, register) {
                Some(Ok(())) => {
                    window.set_registered();
                    lock(&self.windows).push(Arc::clone(window));
                }
                Some(Err(_)) => return self.is_refused.store(true, Relaxed),
                None => return,
            }
        }
        if lists && let Some(list) = unless_stopped(self.device, || self.device.alloc_pinned(LIST)) {
            let _ = self.list.set(list.ok());
        }
    }

    /// The map ends: no copy uses a stage any more. It may wait for all work of the device.
    pub(crate) fn unregister(&self) {
        for window in lock(&self.windows).drain(..) {
            if !self.device.unregister_host(window.stage(0, STAGE as usize)) {
                // The device may write there for ever.
                std::mem::forget(window);
            }
        }
        if let Some(Some(list)) = self.list.get() {
            self.device.free_pinned(*list);
        }
    }
}
