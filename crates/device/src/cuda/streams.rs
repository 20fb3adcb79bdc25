//! Streams: the choice for a request, and internal streams.
//!
//! ```text
//!   the thread's stream, else the default stream
//!        │
//!        ├─ work on it would be captured, or invalidate a capture ──> an internal stream for this purpose
//!        └─ else ──> it
//! ```

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::sync::OnceLock;

use spinio_sys::cuda::{CuError, Stream, stream};

use super::device::Cuda;
use super::handle_pool::HandlePool;
use crate::thread_stream::thread_stream;
use crate::{AppStream, DeviceError, ErrorKind, StreamId};

type Result<T> = core::result::Result<T, DeviceError>;

/// The limit of acquired internal streams.
const MAX_STREAMS: usize = 128;

pub(super) struct StreamPool {
    pool: HandlePool,
    /// The stream of small requests while the default stream must not be used.
    scratch: OnceLock<StreamId>,
}

impl StreamPool {
    pub(super) const fn new() -> StreamPool {
        StreamPool { pool: HandlePool::new(MAX_STREAMS), scratch: OnceLock::new() }
    }
}

impl Cuda {
    pub(super) fn raw_stream(stream: StreamId) -> Stream {
        Stream(stream.0 as usize)
    }

    /// The stream for a request of this thread.
    #[inline]
    pub(super) fn thread_app_stream(&self) -> AppStream {
        let thread_choice = thread_stream();
        let Ok(_entered) = self.enter() else { return AppStream::Named(thread_choice) };
        if !self.stream_captures(thread_choice) {
            return AppStream::Named(thread_choice);
        }
        // Without an internal stream the next call on the chosen one reports the error; fences and waits spare the
        // capture themselves.
        self.scratch_stream().map_or(AppStream::Named(thread_choice), AppStream::Capturing)
    }

    /// Whether work on a stream would be captured or invalidate a capture. The context must be entered.
    pub(super) fn stream_captures(&self, stream: StreamId) -> bool {
        // SAFETY: the stream is ours, the default one, or kept alive by the thread that chose it.
        match unsafe { self.driver.stream_is_capturing(Cuda::raw_stream(stream)) } {
            Ok(captured) => captured,
            Err(e) => !e.is_context_lost(),
        }
    }

    /// For calls that would invalidate a capture of the default stream; not for the hot path, which has checked before.
    pub(super) fn refuse_if_capturing(&self, stream: StreamId, operation: &'static str) -> Result<()> {
        if stream.0 == 0 && self.stream_captures(stream) {
            return Err(self.driver_error(operation, CuError::STREAM_CAPTURE_IMPLICIT));
        }
        Ok(())
    }

    /// Acquires an internal stream. The context must be entered.
    pub(super) fn take_stream(&self) -> Result<StreamId> {
        match self.streams.pool.acquire(|| self.driver.stream_create(stream::NON_BLOCKING).map(|s| s.0)) {
            Ok(Some(queue)) => Ok(StreamId(queue as u64)),
            Ok(None) => Err(DeviceError::new(ErrorKind::NoMemory, "pool of streams")),
            Err(e) => Err(self.driver_error("cuStreamCreate", e)),
        }
    }

    pub(super) fn recycle_stream(&self, stream: StreamId) {
        if stream.0 != 0 && self.streams.scratch.get() != Some(&stream) {
            self.streams.pool.release(stream.0 as usize);
        }
    }

    fn scratch_stream(&self) -> Result<StreamId> {
        if let Some(queue) = self.streams.scratch.get() {
            return Ok(*queue);
        }
        let new = self.take_stream()?;
        let stored = *self.streams.scratch.get_or_init(|| new);
        if stored != new {
            self.recycle_stream(new);
        }
        Ok(stored)
    }
}
