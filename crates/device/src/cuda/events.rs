//! Fences: events from two pools.
//!
//! Who waits for an ordinary event spins; who waits for a blocking one sleeps until an interrupt, which costs 22 us
//! where spinning costs 8. Programs whose context blocks get blocking ones throughout; the others get them only under
//! [`Wait::Sleep`], by way of a queue of ours that follows the fence.
//!
//! A fence holds the event's address; its lowest bit says which kind it is.

use spinio_sys::cuda::{Event, event};

use super::device::Cuda;
use super::handles::Handles;
use crate::{DeviceError, ErrorKind, Fence, QueueId, Wait};

type Result<T> = core::result::Result<T, DeviceError>;

pub(super) struct Events {
    spinning: Handles,
    blocking: Handles,
}

const BLOCKING_BIT: u64 = 1;

impl Events {
    pub(super) const fn new() -> Events {
        Events { spinning: Handles::new(1024), blocking: Handles::new(1024) }
    }

    fn pool(&self, blocking: bool) -> &Handles {
        if blocking { &self.blocking } else { &self.spinning }
    }
}

fn event_of(fence: &Fence) -> Event {
    Event((fence.0 & !BLOCKING_BIT) as usize)
}

fn blocks(fence: &Fence) -> bool {
    fence.0 & BLOCKING_BIT != 0
}

impl Cuda {
    /// An unused event as a fence that is nowhere yet. The context must be entered.
    fn blank_fence(&self, blocking: bool) -> Result<Fence> {
        let flags = event::DISABLE_TIMING | if blocking { event::BLOCKING_SYNC } else { 0 };
        let made = self.events.pool(blocking).take(|| self.driver.event_create(flags).map(|e| e.0));
        match made.map_err(|e| self.fail("cuEventCreate", e))? {
            Some(event) => Ok(Fence(event as u64 | if blocking { BLOCKING_BIT } else { 0 })),
            None => Err(DeviceError::new(ErrorKind::NoMemory, "pool of events")),
        }
    }

    /// A fence at the present end of a queue that is not captured. The context must be entered.
    pub(super) fn fence_here(&self, queue: QueueId, blocking: bool) -> Result<Fence> {
        let fence = self.blank_fence(blocking)?;
        // SAFETY: the event is ours and alive, as its context is; the queue is the caller's.
        match unsafe { self.driver.event_record(event_of(&fence), Cuda::stream(queue)) } {
            Ok(()) => Ok(fence),
            Err(e) => {
                self.keep_fence(fence);
                Err(self.fail("cuEventRecord", e))
            }
        }
    }

    /// Queue after fence. The context must be entered.
    pub(super) fn follow_fence(&self, queue: QueueId, fence: &Fence) -> Result<()> {
        // SAFETY: the fence's event is alive until it is released, as its context is; the queue is the caller's.
        unsafe { self.driver.stream_wait(Cuda::stream(queue), event_of(fence)) }
            .map_err(|e| self.fail("cuStreamWaitEvent", e))
    }

    /// Whether the fence has been passed. The context must be entered, relaxed.
    pub(super) fn fence_is_done(&self, fence: &Fence) -> Result<bool> {
        // SAFETY: as above.
        unsafe { self.driver.event_is_done(event_of(fence)) }.map_err(|e| self.fail("cuEventQuery", e))
    }

    /// Waits. The context must be entered, relaxed.
    pub(super) fn wait_for(&self, fence: &Fence, how: Wait) -> Result<()> {
        if how == Wait::Context || blocks(fence) {
            // SAFETY: as above.
            return unsafe { self.driver.event_synchronize(event_of(fence)) }
                .map_err(|e| self.fail("cuEventSynchronize", e));
        }
        if self.fence_is_done(fence)? {
            return Ok(());
        }
        let queue = self.take_queue()?;
        let asleep = self.follow_fence(queue, fence).and_then(|()| self.fence_here(queue, true)).and_then(|relay| {
            let waited = self.wait_for(&relay, Wait::Sleep);
            self.keep_fence(relay);
            waited
        });
        self.keep_queue(queue);
        asleep
    }

    /// Back to the pool.
    pub(super) fn keep_fence(&self, fence: Fence) {
        self.events.pool(blocks(&fence)).give(event_of(&fence).0);
    }
}
