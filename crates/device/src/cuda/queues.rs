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
use super::handles::Handles;
use crate::thread_queue::thread_queue;
use crate::{DeviceError, ErrorKind, QueueId};

type Result<T> = core::result::Result<T, DeviceError>;

/// Queues of ours that may be out at once.
const QUEUES: usize = 128;

pub(super) struct Queues {
    ours: Handles,
    /// The queue of small requests while the default queue must be left alone.
    aside: OnceLock<QueueId>,
}

impl Queues {
    pub(super) const fn new() -> Queues {
        Queues { ours: Handles::new(QUEUES), aside: OnceLock::new() }
    }
}

impl Cuda {
    pub(super) fn stream(queue: QueueId) -> Stream {
        Stream(queue.0 as usize)
    }

    /// Where a request of this thread goes, and whether it has to wait there for its end.
    #[inline]
    pub(super) fn queue_of_thread(&self) -> (QueueId, bool) {
        let chosen = thread_queue();
        let Ok(_entered) = self.enter() else { return (chosen, false) };
        if !self.captures(chosen) {
            return (chosen, false);
        }
        // Without a queue of ours the next call on the chosen one reports what is wrong; fences and waits spare the
        // capture themselves.
        self.aside().map_or((chosen, false), |queue| (queue, true))
    }

    /// Whether work on a queue would be captured or spoil a capture. The context must be entered.
    pub(super) fn captures(&self, queue: QueueId) -> bool {
        // SAFETY: the queue is ours, the default one, or alive by the word of who chose it.
        match unsafe { self.driver.stream_is_capturing(Cuda::stream(queue)) } {
            Ok(captured) => captured,
            Err(e) => !e.is_gone(),
        }
    }

    /// For calls that would spoil a capture of the default queue; not for the hot path, which has asked before.
    pub(super) fn spare_captures(&self, queue: QueueId, operation: &'static str) -> Result<()> {
        if queue.0 == 0 && self.captures(queue) {
            return Err(self.fail(operation, CuError::STREAM_CAPTURE_IMPLICIT));
        }
        Ok(())
    }

    /// A queue of ours. The context must be entered.
    pub(super) fn take_queue(&self) -> Result<QueueId> {
        match self.queues.ours.take(|| self.driver.stream_create(stream::NON_BLOCKING).map(|s| s.0)) {
            Ok(Some(queue)) => Ok(QueueId(queue as u64)),
            Ok(None) => Err(DeviceError::new(ErrorKind::NoMemory, "pool of queues")),
            Err(e) => Err(self.fail("cuStreamCreate", e)),
        }
    }

    pub(super) fn keep_queue(&self, queue: QueueId) {
        if queue.0 != 0 && self.queues.aside.get() != Some(&queue) {
            self.queues.ours.give(queue.0 as usize);
        }
    }

    fn aside(&self) -> Result<QueueId> {
        if let Some(queue) = self.queues.aside.get() {
            return Ok(*queue);
        }
        let new = self.take_queue()?;
        let kept = *self.queues.aside.get_or_init(|| new);
        if kept != new {
            self.keep_queue(new);
        }
        Ok(kept)
    }
}
