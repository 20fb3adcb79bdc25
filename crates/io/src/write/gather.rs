//! Gathers the parts of a write in host memory.
//!
//! ```text
//!   parts     Device 3 MiB     Host 100 B    Device 5 KiB
//!   memory    [2 MiB] [1 MiB ........................ 5 KiB] bounce buffers of the device, filled end to end
//!   vectors   buffer 0, buffer 1, the host part itself, buffer 1 further on
//! ```
//!
//! All copies of one device are queued first, then waited for with one fence. A `StagedWrite` that is dropped before it
//! was waited for synchronizes its stream, since a copy out of the device may still store into its memory.
//!
//! A gathering thread holds bounce buffers while it acquires more, so its waits are bounded: buffers that the pool does
//! not release within 10 ms are replaced by private memory, unpinned and slower. A stream-ordered write does not wait
//! for buffers at all.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::Arc;
use std::time::Duration;

use spinio_device::{Device, DeviceError, FenceGuard, StreamId, StreamOrder, WaitMode};

use super::Part;
use crate::ctx::Writer;
use spinio_transfer::Error;
use spinio_transfer::HostMemory;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer, BouncePool, Policy};

/// How long to wait for bounce buffers of the pool.
const POOL_WAIT: Duration = Duration::from_millis(10);

/// Where the bytes are gathered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferSource {
    /// The bounce buffer pool: for system calls that end by themselves.
    Pool,
    /// The pool of stream-ordered transfers, over its limit if needed: a thread that queues a write must not wait for
    /// the stream.
    StreamPool,
    /// Memory of this write only: for pipes and sockets, which may block their caller without limit.
    Private,
}

/// A stream of each device of a write, after what the program has queued by now: for copies that are queued later.
pub(super) fn streams_after_app(parts: &[Part]) -> Result<Vec<StreamOrder>, DeviceError> {
    devices(parts).into_iter().map(StreamOrder::after_app).collect()
}

pub(super) fn devices(parts: &[Part]) -> Vec<&'static dyn Device> {
    let mut devices: Vec<&'static dyn Device> = Vec::new();
    for part in parts {
        if let Part::Device(from, _) = part
            && !devices.iter().any(|d| core::ptr::addr_eq(*d, from.allocation.device))
        {
            devices.push(from.allocation.device);
        }
    }
    devices
}

/// The host memory for the bytes of one device.
struct DeviceStage {
    pool: Arc<BouncePool>,
    stream: StreamId,
    buffers: Vec<BounceBuffer>,
    private: Option<HostMemory>,
    /// Ranges of memory still to be filled, last first.
    free: Vec<(*mut u8, usize)>,
    fence: Option<FenceGuard>,
    /// A copy was queued that may not be complete.
    copying: bool,
}

impl DeviceStage {
    fn new(ctx: &Writer, stream: &StreamOrder, len: usize, source: BufferSource) -> Result<DeviceStage, DeviceError> {
        let (device, stream) = (stream.device(), stream.id());
        let pool = if source == BufferSource::StreamPool { ctx.bounce.stream(device) } else { ctx.bounce.sync(device) };
        let count = len.div_ceil(BUFFER_SIZE);
        let mut buffers = match source {
            BufferSource::Pool => pool.acquire_many(count, POOL_WAIT),
            BufferSource::StreamPool => Vec::with_capacity(count),
            BufferSource::Private => Vec::new(),
        };
        // Over the limit if needed: for a copy into memory that is not pinned the driver makes the caller wait for the
        // copy, and so for the stream.
        while source == BufferSource::StreamPool
            && buffers.len() < count
            && let Ok(Some(buffer)) = pool.try_acquire(Policy::UpToTwiceLimit)
        {
            buffers.push(buffer);
        }
        let mut stage = DeviceStage {
            pool: Arc::clone(pool),
            stream,
            buffers,
            private: None,
            free: Vec::new(),
            fence: None,
            copying: false,
        };
        let rest = len.saturating_sub(stage.buffers.len() * BUFFER_SIZE);
        if rest > 0 {
            let private = HostMemory::new(rest)?;
            stage.free.push((private.ptr, rest));
            stage.private = Some(private);
        }
        stage.free.extend(stage.buffers.iter().rev().map(|b| (b.ptr(), BUFFER_SIZE)));
        Ok(stage)
    }

    fn device(&self) -> &'static dyn Device {
        self.pool.device()
    }

    /// Queues the copies of one part, and adds the memory of its bytes to `vectors`.
    fn fill(&mut self, part: super::Target, len: usize, vectors: &mut Vec<[usize; 2]>) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < len
            && let Some((ptr, available)) = self.free.pop()
        {
            let n = available.min(len - done);
            self.copying = true;
            // SAFETY: this stage owns the memory, and synchronizes the stream before it releases it; the bytes are
            // inside the allocation.
            unsafe { self.device().copy_out(self.stream, ptr, part.addr.offset(done as u64), n) }?;
            match vectors.last_mut() {
                Some([at, before]) if *at + *before == ptr as usize => *before += n,
                _ => vectors.push([ptr as usize, n]),
            }
            if n < available {
                self.free.push((ptr.wrapping_add(n), available - n));
            }
            done += n;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        let Some(fence) = self.fence.take() else { return Ok(()) };
        let waited = fence.wait(WaitMode::Context);
        self.copying = waited.is_err();
        waited
    }
}

impl Drop for DeviceStage {
    fn drop(&mut self) {
        if self.copying && self.device().synchronize(self.stream, WaitMode::Context).is_err() {
            // Whether the device is done is unknown: the memory that it may still store into must never be reused.
            core::mem::forget(self.private.take());
            self.buffers.drain(..).for_each(|buffer| self.pool.quarantine(buffer));
            return;
        }
        for buffer in self.buffers.drain(..) {
            self.pool.release(buffer);
        }
    }
}

/// The parts of a write, being copied into host memory.
pub(super) struct StagedWrite {
    stages: Vec<DeviceStage>,
    /// The vectors for the kernel.
    pub(super) vectors: Vec<[usize; 2]>,
    /// Their total length.
    pub(super) len: usize,
    /// Their offset in the file: for errors.
    offset: u64,
}

impl StagedWrite {
    /// Queues all copies, to the stream of their device. `offset`: the offset in the file, for errors.
    pub(super) fn start(
        ctx: &Writer,
        streams: &[StreamOrder],
        parts: &[Part],
        source: BufferSource,
        offset: u64,
    ) -> Result<StagedWrite, Error> {
        let len = parts.iter().map(Part::len).sum::<usize>();
        let vectors = Vec::with_capacity(parts.len() + len / BUFFER_SIZE);
        let mut staged = StagedWrite { stages: Vec::new(), vectors, len, offset };
        let fail = staged.error_mapper();
        for stream in streams {
            let of_device = |p: &&Part| match p {
                Part::Device(from, _) => core::ptr::addr_eq(from.allocation.device, stream.device()),
                Part::Host(..) => false,
            };
            let bytes = parts.iter().filter(of_device).map(Part::len).sum();
            if bytes > 0 {
                staged.stages.push(DeviceStage::new(ctx, stream, bytes, source).map_err(&fail)?);
            }
        }
        for part in parts {
            match *part {
                Part::Host(at, len) => staged.vectors.push([at as usize, len]),
                Part::Device(from, len) => {
                    let mut stages = staged.stages.iter_mut();
                    if let Some(stage) = stages.find(|s| core::ptr::addr_eq(s.device(), from.allocation.device)) {
                        stage.fill(from, len, &mut staged.vectors).map_err(&fail)?;
                    }
                }
            }
        }
        Ok(staged)
    }

    /// Adds a fence on each stream, for [`StagedWrite::wait`].
    pub(super) fn with_fences(mut self) -> Result<StagedWrite, Error> {
        let fail = self.error_mapper();
        for stage in &mut self.stages {
            stage.fence = Some(FenceGuard::new(stage.device(), stage.stream).map_err(&fail)?);
        }
        Ok(self)
    }

    /// Records that all queued copies are complete, which the caller knows by other means.
    pub(super) fn mark_complete(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.copying = false);
    }

    /// Waits until all copies are complete.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        let fail = self.error_mapper();
        self.stages.iter_mut().try_for_each(DeviceStage::wait).map_err(fail)
    }

    /// Turns an error of a device into an error of the write.
    fn error_mapper(&self) -> impl Fn(DeviceError) -> Error + use<> {
        let (offset, len) = (self.offset, self.len as u64);
        move |error| Error::device(error, "write", offset, len)
    }

    /// Whether all its host memory is pinned.
    pub(super) fn is_pinned(&self) -> bool {
        self.stages.iter().all(|stage| stage.private.is_none() && stage.buffers.iter().all(|b| b.pinned))
    }
}
