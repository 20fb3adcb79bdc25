//! The parts of a write, brought together in host memory.
//!
//! ```text
//!   parts     Device 3 MiB     Host 100 B    Device 5 KiB
//!   memory    [2 MiB] [1 MiB ........................ 5 KiB] blocks of the device's staging ring, filled end to end
//!   vectors   block 0, block 1, the host part itself, block 1 further on
//! ```
//!
//! All copies of one device are queued first, then waited for at one fence. A `Gathered` that goes before it was
//! waited for drains its queue, since a copy out of the device may still store into its memory.
//!
//! A gatherer holds blocks while it takes more, so it never waits for them for ever: what the ring does not give within
//! 10 ms is replaced by memory of its own, unpinned and slower. What is queued waits for no block at all.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::Arc;
use std::time::Duration;

use spinio_device::{Device, DeviceError, FenceGuard, StreamId, StreamOrder, WaitMode};

use super::Part;
use crate::ctx::Writer;
use spinio_transfer::Error;
use spinio_transfer::HostMemory;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer, BouncePool};

/// How long to wait for blocks of the ring.
const POOL_WAIT: Duration = Duration::from_millis(10);

/// Where the bytes are gathered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferSource {
    /// The staging ring: for calls of the kernel that end by themselves.
    Pool,
    /// The ring of what waits for a queue, beyond its bound if it must be: who queues a write must not wait for the queue.
    StreamPool,
    /// Memory of this write alone: for streams, which may keep their caller waiting for ever.
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

/// The bytes of one device.
struct DeviceStage {
    staging: Arc<BouncePool>,
    stream: StreamId,
    blocks: Vec<BounceBuffer>,
    private: Option<HostMemory>,
    /// Pieces of memory still to be filled, last first.
    free: Vec<(*mut u8, usize)>,
    fence: Option<FenceGuard>,
    /// Something was queued that may not be over.
    copying: bool,
}

impl DeviceStage {
    fn new(ctx: &Writer, stream: &StreamOrder, len: usize, source: BufferSource) -> Result<DeviceStage, DeviceError> {
        let (device, stream) = (stream.device(), stream.id());
        let staging =
            if source == BufferSource::StreamPool { ctx.bounce.stream(device) } else { ctx.bounce.sync(device) };
        let count = len.div_ceil(BUFFER_SIZE);
        let mut blocks = match source {
            BufferSource::Pool => staging.acquire_many(count, POOL_WAIT),
            BufferSource::StreamPool => Vec::with_capacity(count),
            BufferSource::Private => Vec::new(),
        };
        // A driver copies into memory that is not pinned while the caller waits for it, and so for the queue.
        while source == BufferSource::StreamPool
            && blocks.len() < count
            && let Ok(Some(block)) = staging.acquire_for_stream()
        {
            blocks.push(block);
        }
        let mut stage =
            DeviceStage { staging, stream, blocks, private: None, free: Vec::new(), fence: None, copying: false };
        let rest = len.saturating_sub(stage.blocks.len() * BUFFER_SIZE);
        if rest > 0 {
            let private = HostMemory::new(rest)?;
            stage.free.push((private.ptr, rest));
            stage.private = Some(private);
        }
        stage.free.extend(stage.blocks.iter().rev().map(|b| (b.ptr(), BUFFER_SIZE)));
        Ok(stage)
    }

    fn device(&self) -> &'static dyn Device {
        self.staging.device()
    }

    /// Queues the copies of one part; where its bytes will be.
    fn fill(&mut self, part: super::Target, len: usize, vectors: &mut Vec<[usize; 2]>) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < len
            && let Some((ptr, room)) = self.free.pop()
        {
            let n = room.min(len - done);
            self.copying = true;
            // SAFETY: the memory is this lot's, which drains the queue before it lets go of it; the bytes lie inside
            // the allocation.
            unsafe { self.device().copy_out(self.stream, ptr, part.addr.offset(done as u64), n) }?;
            match vectors.last_mut() {
                Some([at, before]) if *at + *before == ptr as usize => *before += n,
                _ => vectors.push([ptr as usize, n]),
            }
            if n < room {
                self.free.push((ptr.wrapping_add(n), room - n));
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
            // The device cannot say that it is done: what it may still store into is nobody's from now on.
            core::mem::forget(self.private.take());
            self.blocks.drain(..).for_each(|block| self.staging.quarantine(block));
            return;
        }
        for block in self.blocks.drain(..) {
            self.staging.release(block);
        }
    }
}

/// Parts on their way into host memory.
pub(super) struct StagedWrite {
    stages: Vec<DeviceStage>,
    /// What the kernel is to write.
    pub(super) vectors: Vec<[usize; 2]>,
    /// Bytes of them.
    pub(super) len: usize,
    /// Where they go in the file: for errors.
    offset: u64,
}

impl StagedWrite {
    /// Queues all copies, to the stream of their device. `offset`: where they go in the file, for errors.
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
                    if let Some(stage) = stages.find(|l| core::ptr::addr_eq(l.device(), from.allocation.device)) {
                        stage.fill(from, len, &mut staged.vectors).map_err(&fail)?;
                    }
                }
            }
        }
        Ok(staged)
    }

    /// With a place in each queue to wait for.
    pub(super) fn with_fences(mut self) -> Result<StagedWrite, Error> {
        let fail = self.error_mapper();
        for stage in &mut self.stages {
            stage.fence = Some(FenceGuard::new(stage.device(), stage.stream).map_err(&fail)?);
        }
        Ok(self)
    }

    /// Everything queued is done, as is known otherwise.
    pub(super) fn mark_complete(&mut self) {
        self.stages.iter_mut().for_each(|lot| lot.copying = false);
    }

    /// Waits until every byte is there.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        let fail = self.error_mapper();
        self.stages.iter_mut().try_for_each(DeviceStage::wait).map_err(fail)
    }

    /// What an error of a device means for the write.
    fn error_mapper(&self) -> impl Fn(DeviceError) -> Error + use<> {
        let (offset, len) = (self.offset, self.len as u64);
        move |error| Error::device(error, "write", offset, len)
    }

    /// Whether all memory of it is pinned.
    pub(super) fn is_pinned(&self) -> bool {
        self.stages.iter().all(|lot| lot.private.is_none() && lot.blocks.iter().all(|b| b.pinned))
    }
}
