//! Sends fragments to one device: bounce buffers, and the lists of fragments that a gather kernel copies out of them.
//!
//! ```text
//!   buffer   [bytes][bytes] [bytes] ───>        <─── [entry][entry][entry]     2 MiB of pinned memory
//!             packed from the front                   the list grows from the end
//!                        └──────────── one launch ───────────┘
//! ```
//!
//! A copy costs the copy engine of a GPU 8 us however short it is, so fragments are copied together: their bytes are
//! packed into a buffer, and a GPU kernel copies each to its destination. Source and destination are equal modulo 16,
//! since the GPU kernel copies such ranges fastest.
//!
//! If a device has no such kernel, or its code could not be loaded, each fragment is a copy.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use spinio_device::{Device, DeviceAddr, DeviceError, FenceGuard, GatherEntry, StreamId, StreamOrder, WaitMode};

use crate::ctx::BatchCtx;
use spinio_host::lock;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer, BouncePool};

/// Bytes of an operation in a list.
pub(crate) const ENTRY_SIZE: usize = size_of::<GatherEntry>();

/// One device of a batch.
pub(crate) struct DeviceSink {
    pub(crate) device: &'static dyn Device,
    pub(crate) staging: Arc<BouncePool>,
    /// The event that every copy waits for.
    order: Option<FenceGuard>,
    /// Whether a GPU kernel copies the fragments to their destinations.
    gathers: AtomicBool,
    failure: Mutex<Option<DeviceError>>,
}

impl DeviceSink {
    /// In the order of this thread, from now on. `gathers`: whether there are enough operations for a GPU kernel.
    pub(crate) fn new(ctx: &BatchCtx, device: &'static dyn Device, gathers: bool) -> Result<DeviceSink, DeviceError> {
        let order = device.app_stream().fence(device)?;
        let staging = Arc::clone(ctx.reader.bounce.sync(device));
        Ok(DeviceSink { device, staging, order, gathers: AtomicBool::new(gathers), failure: Mutex::new(None) })
    }

    /// Whether an order has to be kept; not while the program captures a graph.
    pub(crate) fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    /// Whether a GPU kernel copies the fragments to their destinations.
    pub(crate) fn gathers(&self) -> bool {
        self.gathers.load(Relaxed)
    }

    /// Waits for the work that the program had queued before: storage and the CPU are not ordered with the device's
    /// streams.
    pub(crate) fn wait_for_order(&self) -> Result<(), DeviceError> {
        self.order.as_ref().map_or(Ok(()), |fence| fence.wait(WaitMode::Context))
    }

    /// It is not certain that the copies have arrived.
    pub(crate) fn record_failure(&self, error: DeviceError) {
        lock(&self.failure).get_or_insert(error);
    }

    /// The cause, if so.
    pub(crate) fn failure(&self) -> Option<DeviceError> {
        *lock(&self.failure)
    }
}

/// A buffer that is being filled.
pub(crate) struct PackBuffer {
    block: BounceBuffer,
    /// Its address for GPU kernels; for the CPU, if none are used.
    device_ptr: u64,
    /// First byte that is not taken.
    used: usize,
    /// Operations in the list.
    entries: usize,
    gathers: bool,
}

impl PackBuffer {
    pub(crate) fn new(sink: &DeviceSink, block: BounceBuffer) -> PackBuffer {
        let host = block.ptr() as u64;
        let device_ptr = (sink.gathers() && block.pinned).then(|| sink.device.device_ptr(block.ptr()).ok()).flatten();
        PackBuffer { device_ptr: device_ptr.unwrap_or(host), block, used: 0, entries: 0, gathers: device_ptr.is_some() }
    }

    /// Its buffer; nothing was written to it.
    pub(crate) fn into_block(self) -> BounceBuffer {
        self.block
    }

    /// Its memory.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.block.ptr()
    }

    /// Whether a GPU kernel will copy its fragments to their destinations: only then may their bytes be outside of the
    /// buffer.
    pub(crate) fn gathers(&self) -> bool {
        self.gathers
    }

    /// Space for the bytes of one more operation whose destination is `to`: the offset in the buffer.
    #[inline]
    pub(crate) fn slot_for(&self, len: usize, to: u64) -> Option<usize> {
        let at = self.used.next_multiple_of(16) + (to & 15) as usize;
        (at + len + (self.entries + 1) * ENTRY_SIZE <= BUFFER_SIZE).then_some(at)
    }

    /// Takes these bytes of the buffer, found by [`PackBuffer::slot_for`], for an operation.
    #[inline]
    pub(crate) fn push(&mut self, at: usize, len: usize, to: u64) {
        self.used = at + len;
        self.push_entry(self.device_ptr + at as u64, to, len as u64);
    }

    /// Takes bytes from the front that no operation uses yet.
    pub(crate) fn reserve(&mut self, len: usize) {
        self.used = len;
    }

    /// Adds a fragment whose bytes are already in the buffer.
    #[inline]
    pub(crate) fn push_within(&mut self, at: usize, len: usize, to: u64) {
        debug_assert!(at + len <= self.used);
        self.push_entry(self.device_ptr + at as u64, to, len as u64);
    }

    /// Adds an operation on memory that the device sees at `from`. There must be space for it.
    #[inline(always)]
    pub(crate) fn push_entry(&mut self, from: u64, to: u64, len: u64) {
        self.entries += 1;
        let at = BUFFER_SIZE - self.entries * ENTRY_SIZE;
        debug_assert!(at >= self.used);
        // SAFETY: the list ends with the block and has not reached its bytes; a block is aligned to a page, and its
        // length and the entries' are multiples of 8.
        unsafe { self.block.ptr().add(at).cast::<GatherEntry>().write(GatherEntry { src: from, dst: to, len }) };
    }
}

/// A thread that sends buffers.
pub(crate) struct SinkWriter {
    pub(crate) sink: Arc<DeviceSink>,
    stream: Option<StreamOrder>,
}

impl SinkWriter {
    pub(crate) fn new(sink: &Arc<DeviceSink>) -> SinkWriter {
        SinkWriter { sink: Arc::clone(sink), stream: None }
    }

    /// This thread's stream.
    pub(crate) fn stream(&mut self) -> Result<StreamId, DeviceError> {
        if let Some(stream) = &self.stream {
            return Ok(stream.id());
        }
        let stream = StreamOrder::after(self.sink.device, self.sink.order.as_ref())?;
        Ok(self.stream.insert(stream).id())
    }

    /// Sends a buffer: queues its fragments, and releases the buffer after them. After an error some of it may have
    /// been queued, but none of it can be relied on.
    pub(crate) fn send(&mut self, buffer: PackBuffer) -> Result<(), DeviceError> {
        let sink = Arc::clone(&self.sink);
        let PackBuffer { block, entries, gathers, .. } = buffer;
        if entries == 0 {
            sink.staging.release(block);
            return Ok(());
        }
        let stream = match self.stream() {
            Ok(stream) => stream,
            Err(e) => {
                sink.staging.release(block);
                return Err(e);
            }
        };
        let list = block.ptr().wrapping_add(BUFFER_SIZE - entries * ENTRY_SIZE).cast::<GatherEntry>();
        let sent = if gathers {
            // SAFETY: the buffer is released after the gather, the fragments are inside allocations, and memory outside
            // of the buffer that they read is kept by the batch until its streams are synchronized.
            unsafe { sink.device.gather(stream, list, entries) }
        } else {
            (0..entries).try_for_each(|i| {
                // SAFETY: inside the list.
                let GatherEntry { src: from, dst: to, len } = unsafe { list.add(i).read() };
                // SAFETY: the buffer is released after the copies; the bytes are inside allocations.
                unsafe { sink.device.copy_in(stream, DeviceAddr(to), from as *const u8, len as usize) }
            })
        };
        if sent.is_err() && gathers {
            sink.gathers.store(false, Relaxed);
        }
        // After an error too: something may have been queued.
        sink.staging.release_after(block, stream);
        sent
    }

    /// Waits for everything that was sent.
    pub(crate) fn finish(mut self) {
        if let Some(stream) = self.stream.take()
            && let Err(e) = stream.synchronize(WaitMode::Context)
        {
            self.sink.record_failure(e);
        }
    }
}

impl Drop for SinkWriter {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            let _ = stream.synchronize(WaitMode::Context);
        }
    }
}
