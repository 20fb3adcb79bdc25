//! The way into one device: blocks of staging, and the lists of pieces that a gather takes out of them.
//!
//! ```text
//!   block   [bytes][bytes] [bytes] ───>        <─── [piece][piece][piece]     2 MiB of pinned memory
//!             packed from the front                  the list grows from the end
//!                        └──────────── one launch ──────────┘
//! ```
//!
//! A copy costs the copy engine of a GPU 8 us however short it is, so pieces travel together: their bytes are packed
//! into a block, and a kernel takes each to its place. Bytes are laid so that source and destination are alike modulo
//! 16, which is how the kernel moves them fastest.
//!
//! Where a device has no such kernel, or its code could not be loaded, each piece is a copy.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use spinio_device::{Device, DeviceAddr, DeviceError, Fence, Gathered, QueueId, Wait};

use crate::ctx::BatchCtx;
use spinio_host::lock;
use spinio_transfer::bounce::{BLOCK, Block, Staging};

/// Bytes of a piece in a list.
pub(crate) const ENTRY: usize = size_of::<Gathered>();

/// One device of a batch.
pub(crate) struct Outlet {
    pub(crate) device: &'static dyn Device,
    pub(crate) staging: Arc<Staging>,
    /// What every copy waits for.
    order: Option<Fence>,
    /// Whether a kernel takes the pieces to their places.
    gathers: AtomicBool,
    failed: Mutex<Option<DeviceError>>,
}

impl Outlet {
    /// In the order of this thread, from now on. `gathers`: whether there are enough pieces for a kernel.
    pub(crate) fn new(ctx: &BatchCtx, device: &'static dyn Device, gathers: bool) -> Result<Outlet, DeviceError> {
        let (queue, ours) = device.program_queue();
        let order = if ours { None } else { Some(device.fence(queue)?) };
        let staging = ctx.reader.bounce.sync(device);
        Ok(Outlet { device, staging, order, gathers: AtomicBool::new(gathers), failed: Mutex::new(None) })
    }

    /// Whether there is an order to keep; not while the program captures a graph.
    pub(crate) fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    /// Whether a kernel takes the pieces to their places.
    pub(crate) fn gathers(&self) -> bool {
        self.gathers.load(Relaxed)
    }

    /// Waits for what the program had queued before: storage and the CPU keep no order with the device's queues.
    pub(crate) fn wait_for_order(&self) -> Result<(), DeviceError> {
        self.order.as_ref().map_or(Ok(()), |fence| self.device.wait(fence, Wait::Context))
    }

    /// The copies cannot be trusted to have arrived.
    pub(crate) fn fail(&self, error: DeviceError) {
        lock(&self.failed).get_or_insert(error);
    }

    /// Why not, if so.
    pub(crate) fn failure(&self) -> Option<DeviceError> {
        *lock(&self.failed)
    }

    /// A queue of ours, behind what the program had queued before.
    fn queue(&self) -> Result<QueueId, DeviceError> {
        let queue = self.device.lease_queue()?;
        if let Some(order) = &self.order
            && let Err(e) = self.device.follow(queue, order)
        {
            self.device.return_queue(queue);
            return Err(e);
        }
        Ok(queue)
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if let Some(fence) = self.order.take() {
            self.device.release_fence(fence);
        }
    }
}

/// A block that is being filled.
pub(crate) struct Page {
    block: Block,
    /// Where the device's kernels see it; where the host does, if none are used.
    view: u64,
    /// First byte that is not taken.
    data: usize,
    /// Pieces in the list.
    pieces: usize,
    gathers: bool,
}

impl Page {
    pub(crate) fn new(outlet: &Outlet, block: Block) -> Page {
        let host = block.ptr() as u64;
        let seen = (outlet.gathers() && block.pinned).then(|| outlet.device.view(block.ptr()).ok()).flatten();
        Page { view: seen.unwrap_or(host), block, data: 0, pieces: 0, gathers: seen.is_some() }
    }

    /// Takes it apart; nothing was put into it.
    pub(crate) fn into_block(self) -> Block {
        self.block
    }

    /// Its memory.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.block.ptr()
    }

    /// Whether a kernel will take its pieces to their places: only then may they lie outside of it.
    pub(crate) fn gathers(&self) -> bool {
        self.gathers
    }

    /// Room for the bytes of one more piece that goes to `to`: where in the block.
    #[inline]
    pub(crate) fn room(&self, len: usize, to: u64) -> Option<usize> {
        let at = self.data.next_multiple_of(16) + (to & 15) as usize;
        (at + len + (self.pieces + 1) * ENTRY <= BLOCK).then_some(at)
    }

    /// Takes these bytes of the block, found by [`Page::room`], for a piece.
    #[inline]
    pub(crate) fn put(&mut self, at: usize, len: usize, to: u64) {
        self.data = at + len;
        self.list(self.view + at as u64, to, len as u64);
    }

    /// Takes bytes off the front that no piece has yet.
    pub(crate) fn reserve(&mut self, len: usize) {
        self.data = len;
    }

    /// Adds a piece of bytes that lie somewhere in the block.
    #[inline]
    pub(crate) fn put_within(&mut self, at: usize, len: usize, to: u64) {
        debug_assert!(at + len <= self.data);
        self.list(self.view + at as u64, to, len as u64);
    }

    /// Adds a piece of memory that the device sees at `from`. There must be room for it.
    #[inline(always)]
    pub(crate) fn list(&mut self, from: u64, to: u64, len: u64) {
        self.pieces += 1;
        let at = BLOCK - self.pieces * ENTRY;
        debug_assert!(at >= self.data);
        // SAFETY: the list ends with the block and has not reached its bytes; a block is aligned to a page, and its
        // length and the entries' are multiples of 8.
        unsafe { self.block.ptr().add(at).cast::<Gathered>().write(Gathered { from, to, len }) };
    }
}

/// A thread that sends pages.
pub(crate) struct Pen {
    pub(crate) outlet: Arc<Outlet>,
    queue: Option<QueueId>,
}

impl Pen {
    pub(crate) fn new(outlet: &Arc<Outlet>) -> Pen {
        Pen { outlet: Arc::clone(outlet), queue: None }
    }

    /// This thread's queue.
    pub(crate) fn queue(&mut self) -> Result<QueueId, DeviceError> {
        match self.queue {
            Some(queue) => Ok(queue),
            None => Ok(*self.queue.insert(self.outlet.queue()?)),
        }
    }

    /// Sends a page: queues its pieces, and gives the block back behind them. An error: nothing of it may have been
    /// queued, and nothing that was can be relied on.
    pub(crate) fn send(&mut self, page: Page) -> Result<(), DeviceError> {
        let outlet = Arc::clone(&self.outlet);
        let Page { block, pieces, gathers, .. } = page;
        if pieces == 0 {
            outlet.staging.give_back(block);
            return Ok(());
        }
        let queue = match self.queue() {
            Ok(queue) => queue,
            Err(e) => {
                outlet.staging.give_back(block);
                return Err(e);
            }
        };
        let list = block.ptr().wrapping_add(BLOCK - pieces * ENTRY).cast::<Gathered>();
        let sent = if gathers {
            // SAFETY: the block is retired behind the gather, the pieces lie inside allocations, and what they take
            // from elsewhere is kept by the batch until its queues are drained.
            unsafe { outlet.device.gather(queue, list, pieces) }
        } else {
            (0..pieces).try_for_each(|i| {
                // SAFETY: inside the list.
                let Gathered { from, to, len } = unsafe { list.add(i).read() };
                // SAFETY: the block is retired behind the copies; the bytes lie inside allocations.
                unsafe { outlet.device.copy_in(queue, DeviceAddr(to), from as *const u8, len as usize) }
            })
        };
        if sent.is_err() && gathers {
            outlet.gathers.store(false, Relaxed);
        }
        // Behind an error too: something may have been queued.
        outlet.staging.retire(block, queue);
        sent
    }

    /// Waits for everything that was sent.
    pub(crate) fn finish(mut self) {
        if let Some(queue) = self.queue {
            if let Err(e) = self.outlet.device.drain(queue, Wait::Context) {
                self.outlet.fail(e);
            }
            self.queue = None;
            self.outlet.device.return_queue(queue);
        }
    }
}

impl Drop for Pen {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            let _ = self.outlet.device.drain(queue, Wait::Context);
            self.outlet.device.return_queue(queue);
        }
    }
}
