//! Allocates new chunks on another thread, ahead of the copies into them.
//!
//! ```text
//!   this thread      allocate 1 │ allocate 2 │ allocate 3 │ wait for room ...
//!   the filling one             │ map, import, copy 1     │ map, import, copy 2, hand over ...
//! ```
//!
//! To allocate a chunk and to make its descriptor takes the driver 0.7 ms on an H200, more than all other calls for it together.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver};

use spinio_device::{DeviceError, SharedMemory};
use spinio_pagecache::leased_messages::Content;
use spinio_sys::linux::spawn_signals_blocked;

use super::chunks::NewChunk;

/// Chunks that wait to be taken: memory that is in use before it is needed.
const AHEAD: usize = 2;
const STACK: usize = 256 << 10;

/// Chunks in their order. When it is dropped, those that were not taken are freed.
pub(super) struct Allocation {
    made: Receiver<Result<NewChunk, DeviceError>>,
    stop: Arc<AtomicBool>,
}

impl Allocation {
    /// `None`: there is no thread for it.
    pub(super) fn start(
        device: &'static dyn SharedMemory,
        content: Content,
        mut chunks: Range<u64>,
    ) -> Option<Allocation> {
        let (out, made) = mpsc::sync_channel(AHEAD);
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let body = move || {
            // One that fails is the last: the others would fail too.
            let mut goes_on = true;
            while let Some(chunk) = chunks.next().filter(|_| goes_on && !is_stopped.load(Relaxed)) {
                let new = NewChunk::allocate(device, content.len_of(chunk));
                goes_on = new.is_ok();
                goes_on &= out.send(new).is_ok();
            }
        };
        spawn_signals_blocked("spinio-gaia-new", STACK, body).ok()?;
        Some(Allocation { made, stop })
    }

    /// The next one; `None`: there are no more.
    pub(super) fn next(&mut self) -> Option<Result<NewChunk, DeviceError>> {
        self.made.recv().ok()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // Until the thread has ended, so that no call of the device is under way later.
        self.made.iter().for_each(drop);
    }
}
