//! Moves of own files in the order of a queue: asked for now, made when the queue gets there.
//!
//! ```text
//!   queue     ... work │ host function 0 │ copy 0 │ host function 1 │ copy 1 │ ... │ last host function │ later work
//!   keepers   fill piece 0 .. n at once      └ piece 0's block is free: fill piece n with it
//! ```
//!
//! An upload reads the file while the queue is still busy with what was there before. Each copy has a host function
//! before it, which waits until a keeper has filled its block, so that nothing queued behind the upload can run before
//! its bytes are there. After the call nothing is asked of the device any more, except by the queue itself: a program
//! that waits for its device waits for files too, but never for somebody who waits for it.
//!
//! The program may queue any number, and let the queue wait for itself: so nothing here waits for a block. An upload takes what
//! the ring of queued moves has, up to 16, but leaves others half of what is left. Where it has none, it uses the blocks of
//! the upload before it in the same queue, which is over when its own turn comes; the file is read only then. The first
//! of a queue gets a block beyond the bound, as does one that comes while another thread is queueing there.
//!
//! A download is [`Writer::write_async`] (write/stream_write.rs).
//!
//! Known flaws: the driver runs host functions of all queues on one thread, so uploads in two queues wait for each other's
//! files. An upload behind one of a stream that was destroyed meanwhile, in a new stream of the same number, may find that its
//! memory is in use still: it fails with EIO. Bytes that the file loses between the question for its size and the read arrive as zeros; the result tells.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use spinio_device::{Device, StreamId, WaitMode};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;

use crate::ctx::Writer;
use spinio_device::Target;
use spinio_files::ShadowFile;
use spinio_host::lock;
use spinio_stats::{Direction, RequestSpan};
use spinio_transfer::Error;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer, BouncePool, stream_owner};

/// No result yet.
const PENDING: isize = isize::MIN;

/// Blocks of an upload: so many pieces are read ahead of the queue.
const MAX_BUFFERS_AHEAD: usize = 16;

/// The word that a result is stored in.
#[derive(Debug)]
struct ResultWord {
    value: AtomicIsize,
    /// Somebody who stores it has been given the word without owning it.
    ptr_shared: AtomicBool,
}

/// A move on its way.
#[derive(Clone, Debug)]
pub struct AsyncResult(Arc<ResultWord>);

impl AsyncResult {
    fn new() -> AsyncResult {
        AsyncResult::with_value(PENDING)
    }

    fn with_value(value: isize) -> AsyncResult {
        AsyncResult(Arc::new(ResultWord { value: AtomicIsize::new(value), ptr_shared: AtomicBool::new(false) }))
    }

    /// One that is over.
    pub fn ready(moved: usize) -> AsyncResult {
        AsyncResult::with_value(moved as isize)
    }

    /// Lets the word live until its result has been seen.
    fn share_ptr(&self) -> *const AtomicIsize {
        self.0.ptr_shared.store(true, Release);
        // SAFETY: the pointer is an Arc's own; `take_back` undoes this.
        unsafe { Arc::increment_strong_count(Arc::as_ptr(&self.0)) };
        &raw const self.0.value
    }

    fn unshare_ptr(&self) {
        if self.0.ptr_shared.swap(false, AcqRel) {
            // SAFETY: counted by `lend`, once; `self` still holds one.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.0)) };
        }
    }

    /// The bytes moved, or why not; `None` while it is on its way.
    pub fn result(&self) -> Option<core::result::Result<usize, Errno>> {
        match self.0.value.load(Acquire) {
            PENDING => None,
            moved => {
                self.unshare_ptr();
                Some(usize::try_from(moved).map_err(|_| Errno::from_raw_os_error(-moved as i32)))
            }
        }
    }

    /// Waits for the result.
    pub fn wait(&self) -> core::result::Result<usize, Errno> {
        let begun = Instant::now();
        loop {
            if let Some(result) = self.result() {
                return result;
            }
            // What is nearly there is not slept for.
            match begun.elapsed() < Duration::from_micros(100) {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

/// Blocks of one upload, or of several that follow each other in a queue. They go back with the last.
struct BufferSet {
    pool: Arc<BouncePool>,
    buffers: Mutex<Vec<BounceBuffer>>,
    /// The device may use them still.
    quarantined: AtomicBool,
}

impl Drop for BufferSet {
    fn drop(&mut self) {
        for block in lock(&self.buffers).drain(..) {
            match self.quarantined.load(Acquire) {
                true => self.pool.quarantine(block),
                false => self.pool.release(block),
            }
        }
    }
}

/// The last upload of each queue that is queued to its end and not over, as far as anybody has looked.
#[derive(Default)]
pub(crate) struct StreamUploads(Mutex<Vec<ChainTail>>);

/// Of which queue, and whose it is.
type ChainTail = ((StreamId, u32), Weak<StreamRead>);

impl StreamUploads {
    /// The memory of the upload before, in the same queue of the same device, and how one knows that it is over. One takes
    /// it: what another thread queues meanwhile may come to lie before, behind or between its turns.
    fn take_predecessor(&self, device: &dyn Device, stream: StreamId) -> Option<(Arc<BufferSet>, AsyncResult)> {
        let (mut tails, stream) = (lock(&self.0), (stream, stream_owner(stream)));
        let at = tails.iter().position(|(of, upload)| {
            let same_device = |upload: Arc<StreamRead>| core::ptr::addr_eq(upload.device, device);
            *of == stream && upload.upgrade().is_some_and(same_device)
        })?;
        let upload = tails.swap_remove(at).1.upgrade()?;
        let buffers = lock(&upload.buffers).clone()?;
        Some((buffers, upload.result.clone()))
    }

    /// All turns of an upload are queued: what is queued from now on is behind it.
    fn record_tail(&self, stream: StreamId, upload: &Arc<StreamRead>) {
        let (mut last, queue) = (lock(&self.0), (stream, stream_owner(stream)));
        last.retain(|(of, other)| {
            let other = other.upgrade().filter(|other| lock(&other.buffers).is_some());
            other.is_some_and(|other| *of != queue || !core::ptr::addr_eq(other.device, upload.device))
        });
        last.push((queue, Arc::downgrade(upload)));
    }
}

/// What keepers and host functions share.
struct StreamRead {
    file: Arc<ShadowFile>,
    at: u64,
    len: usize,
    device: &'static dyn Device,
    /// `None`: it is over.
    buffers: Mutex<Option<Arc<BufferSet>>>,
    /// Whose memory it takes over, when its turn has come.
    predecessor: Option<AsyncResult>,
    addresses: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
    result: AsyncResult,
    span: RequestSpan,
    begun: Instant,
}

struct State {
    chunk_filled: Vec<bool>,
    /// Pieces that keepers are filling, or will.
    running: usize,
    /// Bytes of the unbroken front, as far as the file had them.
    valid: usize,
    error: Option<Errno>,
    /// The memory is not its own: nothing is read into it.
    forbidden: bool,
}

impl StreamRead {
    fn chunk_count(&self) -> usize {
        self.len.div_ceil(BUFFER_SIZE)
    }

    fn chunk_len(&self, chunk: usize) -> usize {
        (self.len - chunk * BUFFER_SIZE).min(BUFFER_SIZE)
    }

    /// Has a keeper fill the block of a piece.
    fn start_fill(self: &Arc<Self>, chunk: usize) {
        lock(&self.state).running += 1;
        let upload = Arc::clone(self);
        // Whatever happens, the piece counts as filled: the queue waits for it.
        let fill = move |_| {
            if catch_unwind(AssertUnwindSafe(|| upload.fill(chunk))).is_err() {
                upload.finish_fill(chunk, 0, Some(Errno::IO));
            }
        };
        if !self.file.spawn(fill) {
            self.finish_fill(chunk, 0, Some(Errno::IO));
        }
    }

    fn fill(&self, chunk: usize) {
        let kernel = self.file.files().ctx.sys;
        let (address, len) = (self.addresses[chunk % self.addresses.len()], self.chunk_len(chunk));
        let offset = self.at + (chunk * BUFFER_SIZE) as u64;
        let (mut filled, mut error) = (0, None);
        while filled < len {
            let into = (address + filled) as *mut u8;
            // SAFETY: the block is this upload's until its last host function, and no copy from it is queued that may
            // run before this piece counts as filled.
            let read =
                unsafe { kernel.pread(Route::Copy, self.file.fd(), into, len - filled, offset + filled as u64, 0) };
            match read {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(Errno::INTR) => {}
                Err(e) => {
                    error = Some(e);
                    break;
                }
            }
        }
        // SAFETY: as above.
        unsafe { core::ptr::write_bytes((address + filled) as *mut u8, 0, len - filled) };
        self.finish_fill(chunk, filled, error);
    }

    fn finish_fill(&self, chunk: usize, filled: usize, error: Option<Errno>) {
        let mut state = lock(&self.state);
        state.chunk_filled[chunk] = true;
        state.running -= 1;
        let end = chunk * BUFFER_SIZE + filled;
        if filled < self.chunk_len(chunk) && end < state.valid {
            state.valid = end;
            state.error = error;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The queue has come to a piece: what it needs is waited for.
    fn on_reached(self: &Arc<Self>, chunk: usize) {
        if chunk == 0 && self.predecessor.is_some() {
            self.inherit_buffers();
        }
        if lock(&self.state).forbidden {
            return;
        }
        if let Some(free) = chunk.checked_sub(1)
            && free + self.addresses.len() < self.chunk_count()
        {
            self.start_fill(free + self.addresses.len());
        }
        let mut state = lock(&self.state);
        while !state.chunk_filled[chunk] {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has the first pieces filled.
    fn start_first_fills(self: &Arc<Self>) {
        (0..self.addresses.len().min(self.chunk_count())).for_each(|piece| self.start_fill(piece));
    }

    /// The queue has come to the beginning: the upload before is over, or else it was another queue's of this number.
    fn inherit_buffers(self: &Arc<Self>) {
        if self.predecessor.as_ref().is_none_or(|before| before.0.value.load(Acquire) != PENDING) {
            return self.start_first_fills();
        }
        let mut state = lock(&self.state);
        (state.forbidden, state.valid, state.error) = (true, 0, Some(Errno::IO));
    }

    /// The queue has come to the end.
    fn complete(&self) {
        drop(lock(&self.buffers).take());
        let state = lock(&self.state);
        let result = match state.error {
            Some(error) if state.valid == 0 => Err(error),
            _ => Ok(state.valid),
        };
        let stats = self.file.files().ctx.stats();
        stats.record_piece(&self.span, Route::Copy, Reason::BySetting, 0, state.valid as u64, self.begun);
        let outcome = result.map_err(|e| Error::kernel(e, "read", self.at, self.len as u64));
        stats.end(&self.span, &Error::outcome(&outcome));
        let value = result.map_or_else(|e| -(e.raw_os_error() as isize), |good| good as isize);
        self.result.0.value.store(value, Release);
    }
}

impl StreamRead {
    /// It cannot be queued to its end: waits until nobody uses its blocks.
    fn abort(&self, device: &dyn Device, stream: StreamId) {
        if device.synchronize(stream, WaitMode::Context).is_err() {
            // It cannot say that it is done: the blocks are nobody's from now on.
            if let Some(lot) = &*lock(&self.buffers) {
                lot.quarantined.store(true, Release);
            }
        }
        let mut state = lock(&self.state);
        // Not all pieces: where the device is lost, nobody begins those whose turn has not come.
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (state.valid, state.error) = (0, Some(Errno::IO));
        drop(state);
        self.complete();
    }
}

/// A host function's argument: an upload, and which piece; behind the last one is the end.
struct HostCallback(Arc<StreamRead>, usize);

/// # Safety
/// `turn` must come from `Box::into_raw`, once.
unsafe extern "C" fn run_callback(callback: *mut c_void) {
    // SAFETY: the caller's promise.
    let HostCallback(upload, chunk) = *unsafe { Box::from_raw(callback.cast::<HostCallback>()) };
    let run = || match chunk < upload.chunk_count() {
        true => upload.on_reached(chunk),
        false => upload.complete(),
    };
    // Nothing may unwind into the driver. Whoever waits hears of it: a later turn cannot make it right.
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        lock(&upload.state).valid = 0;
        lock(&upload.state).error = Some(Errno::IO);
        if chunk == upload.chunk_count() {
            upload.result.0.value.store(-(Errno::IO.raw_os_error() as isize), Release);
        }
    }
}

/// Queues a turn; `false`: the device does not take it.
fn enqueue_callback(device: &dyn Device, stream: StreamId, upload: &Arc<StreamRead>, chunk: usize) -> bool {
    let callback = Box::into_raw(Box::new(HostCallback(Arc::clone(upload), chunk)));
    // SAFETY: `take_turn` takes the box, once.
    let accepted = unsafe { device.launch_host_func(stream, run_callback, callback.cast()) }.is_ok();
    if !accepted {
        // SAFETY: the device did not take it.
        drop(unsafe { Box::from_raw(callback) });
    }
    accepted
}

/// Stream-ordered moves of shadow files, of one runtime.
pub(crate) struct StreamMoves {
    writer: Arc<Writer>,
    stream_uploads: StreamUploads,
}

impl StreamMoves {
    /// None under way.
    pub(crate) fn new(writer: Arc<Writer>) -> StreamMoves {
        StreamMoves { writer, stream_uploads: StreamUploads::default() }
    }

    /// Reads a file into device memory in the order of a queue (CUDA: a stream). What is queued behind it finds the
    /// bytes. A device that calls no host functions has them when this returns.
    pub(crate) fn read_on_stream(
        &self,
        file: &Arc<ShadowFile>,
        at: u64,
        to: Target,
        len: usize,
        stream: StreamId,
    ) -> Result<AsyncResult, Error> {
        let device = to.allocation.device;
        let fail = |e| Error::kernel(e, "read", at, len as u64);
        let device_fail = |e| Error::device(e, "read", at, len as u64);
        let size = self.writer.files.sys().fstat(file.fd()).map_err(fail)?.size;
        let len = (len as u64).min(size.saturating_sub(at)).min(to.allocation.bytes_left(to.addr)) as usize;
        if device.is_capturing(stream) {
            return Err(fail(Errno::BUSY));
        }
        if len == 0 {
            return Ok(AsyncResult::ready(0));
        }
        let uploads = &self.stream_uploads;
        let pool = self.writer.bounce.stream(device);
        let chunks = len.div_ceil(BUFFER_SIZE);
        let mut buffers =
            pool.acquire_many(chunks.min(MAX_BUFFERS_AHEAD).min(pool.available().div_ceil(2)), Duration::ZERO);
        let inherited = if buffers.is_empty() { uploads.take_predecessor(device, stream) } else { None };
        let (buffer_set, predecessor) = match inherited {
            Some((lot, before)) => (lot, Some(before)),
            None => {
                if buffers.is_empty() {
                    buffers.push(pool.acquire_over_limit().or_else(|_| pool.acquire()).map_err(device_fail)?);
                }
                (Arc::new(BufferSet { pool, buffers: Mutex::new(buffers), quarantined: AtomicBool::new(false) }), None)
            }
        };
        let addresses: Vec<usize> = lock(&buffer_set.buffers).iter().map(|b| b.ptr() as usize).collect();
        // Memory that is not pinned is read by the driver when the copy is queued, not when it runs.
        let pinned = lock(&buffer_set.buffers).iter().all(|b| b.pinned);
        let stream_read = Arc::new(StreamRead {
            file: Arc::clone(file),
            at,
            len,
            device,
            buffers: Mutex::new(Some(buffer_set)),
            predecessor,
            addresses,
            state: Mutex::new(State {
                chunk_filled: vec![false; chunks],
                running: 0,
                valid: len,
                error: None,
                forbidden: false,
            }),
            changed: Condvar::new(),
            result: AsyncResult::new(),
            span: self.writer.files.stats().begin(Direction::Read, file.fd(), Some(at), len as u64).with_device(device),
            begun: Instant::now(),
        });
        if stream_read.predecessor.is_none() {
            stream_read.start_first_fills();
        }
        let enqueue_chunk = |chunk: usize| {
            if !(pinned && enqueue_callback(device, stream, &stream_read, chunk)) {
                // The device calls nobody, or not any more: here, and now.
                device.synchronize(stream, WaitMode::Context)?;
                stream_read.on_reached(chunk);
            }
            let from = stream_read.addresses[chunk % stream_read.addresses.len()] as *const u8;
            let dst = to.addr.offset((chunk * BUFFER_SIZE) as u64);
            // SAFETY: the block is the upload's until the last turn; the bytes lie inside the allocation. It is filled
            // when the copy runs: the turn before it sees to that, or it has been waited for.
            unsafe { device.copy_in(stream, dst, from, stream_read.chunk_len(chunk)) }
        };
        let enqueue_end = || {
            if !enqueue_callback(device, stream, &stream_read, chunks) {
                device.synchronize(stream, WaitMode::Context)?;
                stream_read.complete();
            }
            Ok(())
        };
        if let Err(error) = (0..chunks).try_for_each(enqueue_chunk).and_then(|()| enqueue_end()) {
            stream_read.abort(device, stream);
            return Err(device_fail(error));
        }
        uploads.record_tail(stream, &stream_read);
        Ok(stream_read.result.clone())
    }

    /// Writes device memory to a file in the order of a queue. What is queued behind it may use the memory again.
    pub(crate) fn write_on_stream(
        &self,
        file: &Arc<ShadowFile>,
        at: u64,
        from: Target,
        len: usize,
        stream: StreamId,
    ) -> Result<AsyncResult, Error> {
        let async_result = AsyncResult::new();
        let result = async_result.share_ptr();
        // SAFETY: the word is lent, so it stays until its result has been seen.
        if let Err(error) = unsafe { self.writer.write_async(file.fd(), at, from, len, stream, result) } {
            // Nothing is queued, so nobody stores into it any more.
            async_result.unshare_ptr();
            return Err(error);
        }
        Ok(async_result)
    }
}
