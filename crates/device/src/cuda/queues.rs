//! Queues: which one a request goes to, and those of our own.
//!
//! ```text
//!   what the thread chose, else the default queue
//!        │
//!        ├─ work on it would be captured, or spoil a capture ──> aside: one of ours, kept for that alone
//!        └─ else ──> it
//! ```

use std::sync::OnceLock;

use spinio_sys::cuda::{CuError, Stream, stream};

use super::device::Cuda;
use super::handles::HandlePool;
use crate::thread_queue::thread_stream;
use crate::{DeviceError, ErrorKind, StreamId};

type Result<T> = core::result::Result<T, DeviceError>;

/// Queues of ours that may be out at once.
const MAX_STREAMS: usize = 128;

pub(super) struct StreamPool {
    pool: HandlePool,
    /// The queue of small requests while the default queue must be left alone.
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

    /// Where a request of this thread goes, and whether it has to wait there for its end.
    #[inline]
    pub(super) fn thread_app_stream(&self) -> (StreamId, bool) {
        let thread_choice = thread_stream();
        let Ok(_entered) = self.enter() else { return (thread_choice, false) };
        if !self.stream_captures(thread_choice) {
            return (thread_choice, false);
        }
        // Without a queue of ours the next call on the chosen one reports what is wrong; fences and waits spare the
        // capture themselves.
        self.scratch_stream().map_or((thread_choice, false), |queue| (queue, true))
    }

    /// Whether work on a queue would be captured or spoil a capture. The context must be entered.
    pub(super) fn stream_captures(&self, stream: StreamId) -> bool {
        // SAFETY: the queue is ours, the default one, or alive by the word of who chose it.
        match unsafe { self.driver.stream_is_capturing(Cuda::raw_stream(stream)) } {
            Ok(captured) => captured,
            Err(e) => !e.is_context_lost(),
        }
    }

    /// For calls that would spoil a capture of the default queue; not for the hot path, which has asked before.
    pub(super) fn refuse_if_capturing(&self, stream: StreamId, operation: &'static str) -> Result<()> {
        if stream.0 == 0 && self.stream_captures(stream) {
            return Err(self.driver_error(operation, CuError::STREAM_CAPTURE_IMPLICIT));
        }
        Ok(())
    }

    /// A queue of ours. The context must be entered.
    pub(super) fn take_stream(&self) -> Result<StreamId> {
        match self.streams.pool.acquire(|| self.driver.stream_create(stream::NON_BLOCKING).map(|s| s.0)) {
            Ok(Some(queue)) => Ok(StreamId(queue as u64)),
            Ok(None) => Err(DeviceError::new(ErrorKind::NoMemory, "pool of queues")),
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
