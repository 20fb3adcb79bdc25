//! Stages that a device copies to and from at full speed, because their memory is registered with it.
//!
//! ```text
//!   device ── as pageable memory: through a buffer of the driver, 4 to 7 GB/s ──> stage of the window
//!          ── registered: by its copy engine, 55 GB/s (H200) ──────────────────>
//! ```
//!
//! To register the 8 MiB of a stage takes about as long as it saves in a release of two parts, so it is done at the first
//! release that has more. It is for the life of the map: to unregister may wait for all work of the device, as unmapping
//! does anyway. The stage of a server that has ended stays mapped until then too.
//!
//! Nothing is registered while a stream is stopped ([`crate::lane`]), and copies beside stops do not use the engine. What
//! cannot be registered is copied as before: the device then has refused once, and is not asked again for the map.
//!
//! Known flaws: 8 MiB of pinned memory for each map that has made a large release, and 8 MiB more for each server that
//! has ended since.

#![expect(unsafe_code, reason = "the device writes to memory of the process")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use spinio_device::{PAGE_BYTES, ReplicaMemory};
use spinio_host::lock;
use spinio_pagecache::messages::STAGE;

use crate::lane::{Lane, unless_stopped};
use crate::window::Window;

/// Pages of a release that are worth it: more than the stage has.
const WORTH: usize = STAGE as usize + 1;
const STAGE_BYTES: usize = STAGE as usize * PAGE_BYTES;

/// Those of one map.
pub(crate) struct RegisteredStages {
    device: &'static dyn ReplicaMemory,
    windows: Mutex<Vec<Arc<Window>>>,
    is_refused: AtomicBool,
}

impl RegisteredStages {
    pub(crate) fn new(device: &'static dyn ReplicaMemory) -> RegisteredStages {
        RegisteredStages { device, windows: Mutex::default(), is_refused: AtomicBool::new(false) }
    }

    /// So many pages will be copied through the stage: registers it, if that is worth it and can be done now.
    pub(crate) fn prepare(&self, window: &Arc<Window>, pages: usize) {
        let is_done = window.is_registered() || self.is_refused.load(Relaxed);
        if is_done || pages < WORTH || Lane::current().is_some() || self.device.app_stream().is_capturing() {
            return;
        }
        // SAFETY: the stage is mapped as long as this has the window, whose file cannot shrink, and `trim_stage` leaves its
        // memory. If the server freed it, that would see older bytes only.
        let register = || unsafe { self.device.register_host(window.stage(0, STAGE as usize), STAGE_BYTES) };
        match unless_stopped(self.device, register) {
            Some(Ok(())) => {
                window.set_registered();
                lock(&self.windows).push(Arc::clone(window));
            }
            Some(Err(_)) => self.is_refused.store(true, Relaxed),
            None => {}
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
    }
}
