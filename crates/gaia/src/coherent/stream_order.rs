//! Calls in stream order. There is nothing to do for them: an acquire has its effect when it is called, because what CPU
//! programs write later is seen without it, and a release only says when the stream has come to it.

#![expect(unsafe_code, reason = "a host function of a stream")]

use std::ffi::c_void;

use spinio_device::StreamId;

use super::Map;
use crate::call_checks::captured;
use crate::{Access, Error, Result, StreamRelease};

/// What a host function runs.
type Body = Box<dyn FnOnce() + Send>;

impl Map {
    /// [`Map::acquire`] for work that is queued on the stream later. Pages by which the file grows after the call come with
    /// the next acquire.
    pub fn acquire_async(&self, offset: u64, len: u64, access: Access, stream: StreamId) -> Result<()> {
        self.refuse_capture(stream)?;
        self.acquire(offset, len, access).map(drop)
    }

    /// Ends the epoch of the pages of a range; the result is told when the work that is queued on the stream now is done.
    /// Errors are those of [`Map::release`], or [`Map::discard`]; after one nothing is told.
    pub fn release_async(&self, offset: u64, len: u64, release: StreamRelease) -> Result<()> {
        let StreamRelease { stream, discard, published } = release;
        self.refuse_capture(stream)?;
        let _turn = self.queue.turn_to_queue()?;
        self.end_epoch(offset, len, discard)?;
        let ticket = self.queue.ticket();
        let body: Body = Box::new(move || {
            published(&Ok(0));
            drop(ticket);
        });
        let body = Box::into_raw(Box::new(body));
        // SAFETY: `run` takes the body over, once; it lives until then, and for ever if the device fails.
        unsafe { self.device.launch_host_func(stream, run, body.cast()) }.map_err(|e| {
            // SAFETY: the device has not taken it over.
            drop(unsafe { Box::from_raw(body) });
            Error::device(e, "queue a call")
        })
    }

    /// Waits until the calls that are queued have ended, or the device runs none any more.
    pub(crate) fn wait_for_queued(&self) {
        drop(self.queue.last_turn(|| self.device.is_lost()));
    }

    fn refuse_capture(&self, stream: StreamId) -> Result<()> {
        match self.device.is_capturing(stream) {
            true => Err(captured()),
            false => Ok(()),
        }
    }
}

/// # Safety
/// The argument is a body that no other call takes.
unsafe extern "C" fn run(body: *mut c_void) {
    // SAFETY: the caller's.
    let body = unsafe { Box::from_raw(body.cast::<Body>()) };
    body();
}
