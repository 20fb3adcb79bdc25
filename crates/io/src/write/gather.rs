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

use std::sync::Arc;
use std::time::Duration;

use spinio_device::{Device, DeviceError, ErrorKind, Fence, QueueId, Wait};
use spinio_sys::linux;

use super::Part;
use spinio_transfer::Error;
use crate::ctx::Writer;
use spinio_transfer::HostMemory;
use spinio_transfer::bounce::{BLOCK, Block, Staging};

/// How long to wait for blocks of the ring.
const PATIENCE: Duration = Duration::from_millis(10);

/// Where the bytes are gathered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    /// The staging ring: for calls of the kernel that end by themselves.
    Ring,
    /// The ring of what waits for a queue, beyond its bound if it must be: who queues a write must not wait for the queue.
    Queued,
    /// Memory of this write alone: for streams, which may keep their caller waiting for ever.
    Own,
}

/// The queues that the copies of a write go to, one a device.
pub(super) struct Order {
    queues: Vec<(&'static dyn Device, QueueId)>,
    leased: bool,
}

impl Order {
    /// The program's own queues: the copies stand where a `cudaMemcpy` would.
    pub(super) fn program(parts: &[Part]) -> Order {
        let mut order = Order { queues: Vec::new(), leased: false };
        for device in devices(parts) {
            order.queues.push((device, device.program_queue().0));
        }
        order
    }

    /// Queues of our own behind what the program has queued by now, for copies that are queued later.
    pub(super) fn leased(parts: &[Part]) -> Result<Order, DeviceError> {
        let mut order = Order { queues: Vec::new(), leased: true };
        for device in devices(parts) {
            let (program, ours) = device.program_queue();
            let queue = device.lease_queue()?;
            order.queues.push((device, queue));
            if !ours {
                let fence = device.fence(program)?;
                let followed = device.follow(queue, &fence);
                device.release_fence(fence);
                followed?;
            }
        }
        Ok(order)
    }

    /// A queue that the program names.
    pub(super) fn named(device: &'static dyn Device, queue: QueueId) -> Order {
        Order { queues: vec![(device, queue)], leased: false }
    }

    fn queue(&self, device: &'static dyn Device) -> QueueId {
        let found = self.queues.iter().find(|(d, _)| core::ptr::addr_eq(*d, device));
        found.map_or(QueueId(0), |&(_, queue)| queue)
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        if self.leased {
            self.queues.iter().for_each(|&(device, queue)| device.return_queue(queue));
        }
    }
}

fn devices(parts: &[Part]) -> Vec<&'static dyn Device> {
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
struct Lot {
    staging: Arc<Staging>,
    queue: QueueId,
    blocks: Vec<Block>,
    own: Option<HostMemory>,
    /// Pieces of memory still to be filled, last first.
    empty: Vec<(*mut u8, usize)>,
    fence: Option<Fence>,
    /// Something was queued that may not be over.
    moving: bool,
}

impl Lot {
    fn new(
        ctx: &Writer,
        device: &'static dyn Device,
        queue: QueueId,
        len: usize,
        into: Into,
    ) -> Result<Lot, DeviceError> {
        let staging = if into == Into::Queued { ctx.bounce.stream(device) } else { ctx.bounce.sync(device) };
        let count = len.div_ceil(BLOCK);
        let mut blocks = match into {
            Into::Ring => staging.take_many(count, PATIENCE),
            Into::Queued => Vec::with_capacity(count),
            Into::Own => Vec::new(),
        };
        // A driver copies into memory that is not pinned while the caller waits for it, and so for the queue.
        while into == Into::Queued
            && blocks.len() < count
            && let Ok(Some(block)) = staging.take_queued()
        {
            blocks.push(block);
        }
        let mut lot = Lot { staging, queue, blocks, own: None, empty: Vec::new(), fence: None, moving: false };
        let rest = len.saturating_sub(lot.blocks.len() * BLOCK);
        if rest > 0 {
            let own = HostMemory::new(rest)?;
            lot.empty.push((own.ptr, rest));
            lot.own = Some(own);
        }
        lot.empty.extend(lot.blocks.iter().rev().map(|b| (b.ptr(), BLOCK)));
        Ok(lot)
    }

    fn device(&self) -> &'static dyn Device {
        self.staging.device()
    }

    /// Queues the copies of one part; where its bytes will be.
    fn fill(&mut self, part: super::Target, len: usize, vectors: &mut Vec<[usize; 2]>) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < len
            && let Some((ptr, room)) = self.empty.pop()
        {
            let n = room.min(len - done);
            self.moving = true;
            // SAFETY: the memory is this lot's, which drains the queue before it lets go of it; the bytes lie inside
            // the allocation.
            unsafe { self.device().copy_out(self.queue, ptr, part.addr.offset(done as u64), n) }?;
            match vectors.last_mut() {
                Some([at, before]) if *at + *before == ptr as usize => *before += n,
                _ => vectors.push([ptr as usize, n]),
            }
            if n < room {
                self.empty.push((ptr.wrapping_add(n), room - n));
            }
            done += n;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        let Some(fence) = self.fence.take() else { return Ok(()) };
        let waited = self.device().wait(&fence, Wait::Context);
        self.device().release_fence(fence);
        self.moving = waited.is_err();
        waited
    }
}

impl Drop for Lot {
    fn drop(&mut self) {
        if let Some(fence) = self.fence.take() {
            self.device().release_fence(fence);
        }
        if self.moving && self.device().drain(self.queue, Wait::Context).is_err() {
            // The device cannot say that it is done: what it may still store into is nobody's from now on.
            core::mem::forget(self.own.take());
            self.blocks.drain(..).for_each(|block| self.staging.lose(block));
            return;
        }
        for block in self.blocks.drain(..) {
            self.staging.give_back(block);
        }
    }
}

/// Parts on their way into host memory.
pub(super) struct Gathered {
    lots: Vec<Lot>,
    /// What the kernel is to write.
    pub(super) vectors: Vec<[usize; 2]>,
    /// Bytes of them.
    pub(super) len: usize,
    /// Where they go in the file: for errors.
    offset: u64,
}

impl Gathered {
    /// Queues all copies. `offset`: where they go, for errors.
    pub(super) fn begin(
        ctx: &Writer,
        order: &Order,
        parts: &[Part],
        into: Into,
        offset: u64,
    ) -> Result<Gathered, Error> {
        let len = parts.iter().map(Part::len).sum::<usize>();
        let vectors = Vec::with_capacity(parts.len() + len / BLOCK);
        let mut gathered = Gathered { lots: Vec::new(), vectors, len, offset };
        let fail = gathered.failure();
        for device in devices(parts) {
            let of_device = |p: &&Part| match p {
                Part::Device(from, _) => core::ptr::addr_eq(from.allocation.device, device),
                Part::Host(..) => false,
            };
            let bytes = parts.iter().filter(of_device).map(Part::len).sum();
            let queue = order.queue(device);
            gathered.lots.push(Lot::new(ctx, device, queue, bytes, into).map_err(&fail)?);
        }
        for part in parts {
            match *part {
                Part::Host(at, len) => gathered.vectors.push([at as usize, len]),
                Part::Device(from, len) => {
                    let mut lots = gathered.lots.iter_mut();
                    if let Some(lot) = lots.find(|l| core::ptr::addr_eq(l.device(), from.allocation.device)) {
                        lot.fill(from, len, &mut gathered.vectors).map_err(&fail)?;
                    }
                }
            }
        }
        Ok(gathered)
    }

    /// With a place in each queue to wait for.
    pub(super) fn fenced(mut self) -> Result<Gathered, Error> {
        let fail = self.failure();
        for lot in &mut self.lots {
            lot.fence = Some(lot.device().fence(lot.queue).map_err(&fail)?);
        }
        Ok(self)
    }

    /// Everything queued is done, as is known otherwise.
    pub(super) fn arrived(&mut self) {
        self.lots.iter_mut().for_each(|lot| lot.moving = false);
    }

    /// Waits until every byte is there.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        let fail = self.failure();
        self.lots.iter_mut().try_for_each(Lot::wait).map_err(fail)
    }

    /// What an error of a device means for the write.
    fn failure(&self) -> impl Fn(DeviceError) -> Error + use<> {
        let (offset, len) = (self.offset, self.len as u64);
        move |error| Error::device(error, "write", offset, len)
    }

    /// Whether all memory of it is pinned.
    pub(super) fn is_pinned(&self) -> bool {
        self.lots.iter().all(|lot| lot.own.is_none() && lot.blocks.iter().all(|b| b.pinned))
    }
}
