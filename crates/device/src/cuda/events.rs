//! Fences: events from two pools.
//!
//! A wait for an ordinary event spins; a wait for a blocking one sleeps until an interrupt, which costs 22 us
//! where spinning costs 8. Programs whose context blocks get blocking events throughout; the others get them only under
//! [`crate::WaitMode::Block`], through an internal stream that follows the fence.
//!
//! A fence contains the event's address; its lowest bit is its kind.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use spinio_sys::cuda::{Event, event};

use super::device::Cuda;
use super::handle_pool::HandlePool;
use crate::{DeviceError, ErrorKind, Fence, StreamId, WaitMode, wait};

type Result<T> = core::result::Result<T, DeviceError>;

pub(super) struct EventPools {
    spinning: HandlePool,
    blocking: HandlePool,
}

const BLOCKING_BIT: u64 = 1;

impl EventPools {
    pub(super) const fn new() -> EventPools {
        EventPools { spinning: HandlePool::new(1024), blocking: HandlePool::new(1024) }
    }

    fn pool(&self, blocking: bool) -> &HandlePool {
        if blocking { &self.blocking } else { &self.spinning }
    }
}

fn event_of(fence: &Fence) -> Event {
    Event((fence.0 & !BLOCKING_BIT) as usize)
}

fn is_blocking(fence: &Fence) -> bool {
    fence.0 & BLOCKING_BIT != 0
}

impl Cuda {
    /// An unused event as a fence that is not recorded yet. The context must be entered.
    fn new_fence(&self, blocking: bool) -> Result<Fence> {
        let flags = event::DISABLE_TIMING | if blocking { event::BLOCKING_SYNC } else { 0 };
        let made = self.events.pool(blocking).acquire(|| self.driver.event_create(flags).map(|e| e.0));
        match made.map_err(|e| self.driver_error("cuEventCreate", e))? {
            Some(event) => Ok(Fence(event as u64 | if blocking { BLOCKING_BIT } else { 0 })),
            None => Err(DeviceError::new(ErrorKind::NoMemory, "pool of events")),
        }
    }

    /// A fence at the present end of a stream that is not captured. The context must be entered.
    pub(super) fn record_fence(&self, stream: StreamId, blocking: bool) -> Result<Fence> {
        let fence = self.new_fence(blocking)?;
        // SAFETY: the event is SPIN's and alive, as its context is; the stream is the caller's.
        match unsafe { self.driver.event_record(event_of(&fence), Cuda::raw_stream(stream)) } {
            Ok(()) => Ok(fence),
            Err(e) => {
                self.recycle_fence(fence);
                Err(self.driver_error("cuEventRecord", e))
            }
        }
    }

    /// Makes the stream wait for the fence. The context must be entered.
    pub(super) fn stream_wait_fence(&self, stream: StreamId, fence: &Fence) -> Result<()> {
        // SAFETY: the fence's event is alive until it is released, as its context is; the stream is the caller's.
        unsafe { self.driver.stream_wait_event(Cuda::raw_stream(stream), event_of(fence)) }
            .map_err(|e| self.driver_error("cuStreamWaitEvent", e))
    }

    /// Whether the fence is reached. The context must be entered, relaxed.
    pub(super) fn fence_query(&self, fence: &Fence) -> Result<bool> {
        // SAFETY: as above.
        unsafe { self.driver.event_query(event_of(fence)) }.map_err(|e| self.driver_error("cuEventQuery", e))
    }

    /// Waits. The context must be entered, relaxed.
    pub(super) fn wait_fence(&self, fence: &Fence, mode: WaitMode) -> Result<()> {
        if wait::must_poll() {
            return wait::poll(|| self.fence_query(fence));
        }
        if mode == WaitMode::Context || is_blocking(fence) {
            // SAFETY: as above.
            return unsafe { self.driver.event_synchronize(event_of(fence)) }
                .map_err(|e| self.driver_error("cuEventSynchronize", e));
        }
        if self.fence_query(fence)? {
            return Ok(());
        }
        let queue = self.take_stream()?;
        let sleeps =
            self.stream_wait_fence(queue, fence).and_then(|()| self.record_fence(queue, true)).and_then(|relay| {
                let waited = self.wait_fence(&relay, WaitMode::Block);
                self.recycle_fence(relay);
                waited
            });
        self.recycle_stream(queue);
        sleeps
    }

    /// Returns it to the pool.
    pub(super) fn recycle_fence(&self, fence: Fence) {
        self.events.pool(is_blocking(&fence)).release(event_of(&fence).0);
    }
}
