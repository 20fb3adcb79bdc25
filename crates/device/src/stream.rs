//! The order of SPIN's work with the program's: after what the program has queued.
//!
//! ```text
//!   program's stream   work work ── fence ─┐ work
//!   internal stream                        └ wait_event, copy copy
//! ```
//!
//! Fences and internal streams come from bounded pools; the types here return them when dropped.

use crate::{Device, DeviceError, Fence, StreamId, WaitMode, wait};

type Result<T> = core::result::Result<T, DeviceError>;

/// The stream for small requests of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppStream {
    /// The default stream, or the one that the thread chose.
    Named(StreamId),
    /// An internal stream: the program captures a graph, and work on its own stream would break that. Nothing can be
    /// ordered after the program's work, and the caller must wait before it returns.
    Capturing(StreamId),
}

impl AppStream {
    /// The stream to work on.
    #[inline]
    pub const fn id(self) -> StreamId {
        match self {
            AppStream::Named(id) | AppStream::Capturing(id) => id,
        }
    }

    /// Whether the program captures a graph.
    #[inline]
    pub const fn is_capturing(self) -> bool {
        matches!(self, AppStream::Capturing(_))
    }

    /// A fence after what the program has queued by now; `None` while it captures.
    pub fn fence(self, device: &'static dyn Device) -> Result<Option<FenceGuard>> {
        match self {
            AppStream::Named(id) => FenceGuard::new(device, id).map(Some),
            AppStream::Capturing(_) => Ok(None),
        }
    }
}

/// A fence, released when dropped.
#[derive(Debug)]
#[must_use]
pub struct FenceGuard {
    device: &'static dyn Device,
    fence: Fence,
}

impl FenceGuard {
    /// Marks the present end of a stream.
    pub fn new(device: &'static dyn Device, stream: StreamId) -> Result<FenceGuard> {
        Ok(FenceGuard { device, fence: device.fence(stream)? })
    }

    /// Whether all work before the fence is done; a device that cannot answer has lost its context.
    pub fn is_done(&self) -> bool {
        self.device.query(&self.fence).unwrap_or(true)
    }

    /// Waits with naps until all work before the fence is done: where other threads keep the device busy.
    pub fn take_turns(&self) -> Result<()> {
        wait::take_turns(|| self.device.query(&self.fence))
    }

    /// Waits until all work before the fence is done.
    pub fn wait(&self, mode: WaitMode) -> Result<()> {
        self.device.wait(&self.fence, mode)
    }
}

impl Drop for FenceGuard {
    fn drop(&mut self) {
        self.device.release_fence(Fence(self.fence.0));
    }
}

/// The stream that copies go to, and so their order with the program's work. An internal one is released when dropped,
/// idle or not.
#[derive(Debug)]
#[must_use]
pub struct StreamOrder {
    device: &'static dyn Device,
    stream: StreamId,
    internal: bool,
}

impl StreamOrder {
    /// The program's own stream: the copies run where a `cudaMemcpy` would.
    pub fn app(device: &'static dyn Device) -> StreamOrder {
        StreamOrder::explicit(device, device.app_stream().id())
    }

    /// A stream that the program names.
    pub fn explicit(device: &'static dyn Device, stream: StreamId) -> StreamOrder {
        StreamOrder { device, stream, internal: false }
    }

    /// An internal stream after what the program has queued by now, for copies that are queued later.
    pub fn after_app(device: &'static dyn Device) -> Result<StreamOrder> {
        let app = device.app_stream();
        StreamOrder::unordered(device)?.follow(app.fence(device)?.as_ref())
    }

    /// An internal stream after a fence.
    pub fn after(device: &'static dyn Device, fence: Option<&FenceGuard>) -> Result<StreamOrder> {
        StreamOrder::unordered(device)?.follow(fence)
    }

    fn unordered(device: &'static dyn Device) -> Result<StreamOrder> {
        Ok(StreamOrder { device, stream: device.acquire_stream()?, internal: true })
    }

    fn follow(self, fence: Option<&FenceGuard>) -> Result<StreamOrder> {
        fence.map_or(Ok(()), |guard| self.device.wait_event(self.stream, &guard.fence)).map(|()| self)
    }

    /// Its device.
    pub fn device(&self) -> &'static dyn Device {
        self.device
    }

    /// The stream.
    pub fn id(&self) -> StreamId {
        self.stream
    }

    /// Waits until all work on the stream is done.
    pub fn synchronize(&self, mode: WaitMode) -> Result<()> {
        self.device.synchronize(self.stream, mode)
    }
}

impl Drop for StreamOrder {
    fn drop(&mut self) {
        if self.internal {
            self.device.release_stream(self.stream);
        }
    }
}
