//! Stream-ordered transfers of shadow files: requested now, done when the stream gets there.
//!
//! ```text
//!   stream    ... work │ host function 0 │ copy 0 │ host function 1 │ copy 1 │ ... │ last host function │ later work
//!   workers   fill chunks 0 .. n at once     └ the buffer of chunk 0 is free: fill chunk n into it
//! ```
//!
//! An upload (a stream-ordered read) reads the file while the stream still runs earlier work. A host function before
//! each copy waits until a shadow worker has filled the copy's bounce buffer, so that work queued after the upload
//! cannot run before its bytes have arrived. After the call only the stream itself uses the device: a program that
//! waits for its device also waits for files, but never for a thread that waits for the program.
//!
//! The program may queue any number of transfers, and may make the stream wait for the program. So no step here waits
//! for a bounce buffer. An upload takes up to 16 of the buffers that the stream pool has, but at most half of them, so
//! that the others are left for later uploads. If the pool has none, the upload uses the buffers of the previous upload
//! in the same stream, which is complete when the stream reaches this one; the file is read only then. The first upload
//! of a stream gets a buffer over the limit, and so does one that is queued while another thread queues on the same
//! stream.
//!
//! A download (a stream-ordered write) is [`Writer::write_async`] (write/stream_write.rs).
//!
//! Known flaws:
//! - The driver runs the host functions of all streams on one thread, so uploads in two streams wait for each other's
//!   files.
//! - An upload in a new stream that has the number of a stream destroyed meanwhile may find the memory of that stream's
//!   last upload still in use: it fails with EIO.
//! - Bytes that the file loses between the query for its size and the read arrive as zeros; the result is the shorter
//!   count.

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
use crate::write::StreamLen;
use spinio_device::Target;
use spinio_files::{ShadowFile, size_of};
use spinio_host::lock;
use spinio_host::syscalls::pread_full;
use spinio_stats::{Direction, RequestSpan};
use spinio_transfer::Error;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer, BouncePool, Policy, stream_owner};

/// No result yet.
const PENDING: isize = isize::MIN;

/// Bounce buffers of an upload: this many chunks are read before the stream needs them.
const MAX_BUFFERS_AHEAD: usize = 16;

/// The word that holds a result.
#[derive(Debug)]
struct ResultWord {
    value: AtomicIsize,
    /// A pointer to the word was handed out, which counts as one reference.
    ptr_shared: AtomicBool,
}

/// The result of a transfer that may still be in progress.
#[derive(Clone, Debug)]
pub struct AsyncResult(Arc<ResultWord>);

impl AsyncResult {
    fn new() -> AsyncResult {
        AsyncResult::with_value(PENDING)
    }

    fn with_value(value: isize) -> AsyncResult {
        AsyncResult(Arc::new(ResultWord { value: AtomicIsize::new(value), ptr_shared: AtomicBool::new(false) }))
    }

    /// The result of a transfer that is complete.
    pub fn ready(bytes: usize) -> AsyncResult {
        AsyncResult::with_value(bytes as isize)
    }

    /// A pointer to the word, which keeps it alive until its result has been read.
    fn share_ptr(&self) -> *const AtomicIsize {
        self.0.ptr_shared.store(true, Release);
        // SAFETY: the pointer comes from an Arc; `unshare_ptr` undoes this.
        unsafe { Arc::increment_strong_count(Arc::as_ptr(&self.0)) };
        &raw const self.0.value
    }

    fn unshare_ptr(&self) {
        if self.0.ptr_shared.swap(false, AcqRel) {
            // SAFETY: counted by `share_ptr`, once; `self` still holds a reference.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.0)) };
        }
    }

    /// The bytes transferred, or the error; `None` while the transfer is in progress.
    pub fn result(&self) -> Option<core::result::Result<usize, Errno>> {
        match self.0.value.load(Acquire) {
            PENDING => None,
            value => {
                self.unshare_ptr();
                Some(usize::try_from(value).map_err(|_| Errno::from_raw_os_error(-value as i32)))
            }
        }
    }

    /// Waits for the result.
    pub fn wait(&self) -> core::result::Result<usize, Errno> {
        let started = Instant::now();
        loop {
            if let Some(result) = self.result() {
                return result;
            }
            // A result that is nearly there is not worth a sleep.
            match started.elapsed() < Duration::from_micros(100) {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

/// The bounce buffers of one upload, or of several consecutive ones in a stream. The last one releases them.
struct BufferSet {
    pool: Arc<BouncePool>,
    buffers: Mutex<Vec<BounceBuffer>>,
    /// The device may still use them.
    quarantined: AtomicBool,
}

impl Drop for BufferSet {
    fn drop(&mut self) {
        for buffer in lock(&self.buffers).drain(..) {
            match self.quarantined.load(Acquire) {
                true => self.pool.quarantine(buffer),
                false => self.pool.release(buffer),
            }
        }
    }
}

/// The last completely queued upload of each stream. An entry may be out of date: complete uploads are removed when a
/// later one is recorded.
#[derive(Default)]
pub(crate) struct StreamUploads(Mutex<Vec<ChainTail>>);

/// The stream and the thread that owns it, and its last upload.
type ChainTail = ((StreamId, u32), Weak<StreamRead>);

impl StreamUploads {
    /// The memory of the previous upload in the same stream of the same device, and its result, which shows when it is
    /// complete. Only one upload may take it: host functions that another thread queues meanwhile may run before, after
    /// or between those of this upload.
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

    /// All host functions of an upload are queued: work queued from now on runs after it.
    fn record_tail(&self, stream: StreamId, upload: &Arc<StreamRead>) {
        let (mut tails, stream) = (lock(&self.0), (stream, stream_owner(stream)));
        tails.retain(|(of, other)| {
            let other = other.upgrade().filter(|other| lock(&other.buffers).is_some());
            other.is_some_and(|other| *of != stream || !core::ptr::addr_eq(other.device, upload.device))
        });
        tails.push((stream, Arc::downgrade(upload)));
    }
}

/// An upload: shared by shadow workers and host functions.
struct StreamRead {
    file: Arc<ShadowFile>,
    at: u64,
    len: usize,
    device: &'static dyn Device,
    /// `None`: the upload is complete.
    buffers: Mutex<Option<Arc<BufferSet>>>,
    /// The upload whose memory this one inherits when the stream reaches it.
    predecessor: Option<AsyncResult>,
    addresses: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
    result: AsyncResult,
    span: RequestSpan,
    started: Instant,
}

struct State {
    chunk_filled: Vec<bool>,
    /// Chunks that shadow workers are filling or will fill.
    running: usize,
    /// Bytes of the contiguous prefix, as far as the file had them.
    valid: usize,
    /// Why it ends there, if the file does not. It is the result, whatever was read before: a short count stands for the
    /// end of the file.
    error: Option<Errno>,
    /// Another upload still uses the memory: no byte may be read into it.
    forbidden: bool,
}

impl StreamRead {
    fn chunk_count(&self) -> usize {
        self.len.div_ceil(BUFFER_SIZE)
    }

    fn chunk_len(&self, chunk: usize) -> usize {
        (self.len - chunk * BUFFER_SIZE).min(BUFFER_SIZE)
    }

    /// Has a shadow worker fill the buffer of a chunk.
    fn start_fill(self: &Arc<Self>, chunk: usize) {
        lock(&self.state).running += 1;
        let upload = Arc::clone(self);
        // The chunk counts as filled also after a panic: the stream waits for it.
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
        let sys = self.file.files().ctx.sys;
        let (address, len) = (self.addresses[chunk % self.addresses.len()], self.chunk_len(chunk));
        let range = (self.at + (chunk * BUFFER_SIZE) as u64, len);
        // SAFETY: the buffer belongs to this upload until its last host function, and no copy from it is queued that
        // may run before this chunk counts as filled.
        let (filled, error) = unsafe { pread_full(sys, Route::Copy, self.file.fd(), address as *mut u8, range, 1) };
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

    /// The stream has reached a chunk: waits until it is filled.
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

    /// Has shadow workers fill the first chunks.
    fn start_first_fills(self: &Arc<Self>) {
        (0..self.addresses.len().min(self.chunk_count())).for_each(|chunk| self.start_fill(chunk));
    }

    /// The stream has reached the upload. The previous upload is complete, unless it belonged to another stream with
    /// the same number.
    fn inherit_buffers(self: &Arc<Self>) {
        if self.predecessor.as_ref().is_none_or(|previous| previous.0.value.load(Acquire) != PENDING) {
            return self.start_first_fills();
        }
        let mut state = lock(&self.state);
        (state.forbidden, state.valid, state.error) = (true, 0, Some(Errno::IO));
    }

    /// The stream has reached the end of the upload.
    fn complete(&self) {
        drop(lock(&self.buffers).take());
        let state = lock(&self.state);
        let result = state.error.map_or(Ok(state.valid), Err);
        let stats = self.file.files().ctx.stats();
        stats.record_piece(&self.span, Route::Copy, Reason::BySetting, 0, state.valid as u64, self.started);
        let outcome = result.map_err(|e| Error::kernel(e, "read", self.at, self.len as u64));
        stats.end(&self.span, &Error::outcome(&outcome));
        let value = result.map_or_else(|e| -(e.raw_os_error() as isize), |bytes| bytes as isize);
        self.result.0.value.store(value, Release);
    }
}

impl StreamRead {
    /// Ends an upload that could not be queued completely: waits until neither the device nor a worker uses its
    /// buffers.
    fn abort(&self, device: &dyn Device, stream: StreamId) {
        if device.synchronize(stream, WaitMode::Context).is_err() {
            // Whether the device is done is unknown: the buffers must never be reused.
            if let Some(buffer_set) = &*lock(&self.buffers) {
                buffer_set.quarantined.store(true, Release);
            }
        }
        let mut state = lock(&self.state);
        // Waits only for running fills: if the device is lost, the fills of later chunks are never started.
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (state.valid, state.error) = (0, Some(Errno::IO));
        drop(state);
        self.complete();
    }
}

/// The argument of a host function: an upload, and the number of a chunk; `chunk_count()` stands for the end.
struct HostCallback(Arc<StreamRead>, usize);

/// # Safety
/// `callback` must come from `Box::into_raw`, and be passed once.
unsafe extern "C" fn run_callback(callback: *mut c_void) {
    // SAFETY: the caller's promise.
    let HostCallback(upload, chunk) = *unsafe { Box::from_raw(callback.cast::<HostCallback>()) };
    let run = || match chunk < upload.chunk_count() {
        true => upload.on_reached(chunk),
        false => upload.complete(),
    };
    // A panic must not unwind into the driver. It becomes the result: later host functions do not clear the error.
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        lock(&upload.state).valid = 0;
        lock(&upload.state).error = Some(Errno::IO);
        if chunk == upload.chunk_count() {
            upload.result.0.value.store(-(Errno::IO.raw_os_error() as isize), Release);
        }
    }
}

/// Queues a host function; `false`: the device refused it.
fn enqueue_callback(device: &dyn Device, stream: StreamId, upload: &Arc<StreamRead>, chunk: usize) -> bool {
    let callback = Box::into_raw(Box::new(HostCallback(Arc::clone(upload), chunk)));
    // SAFETY: `run_callback` takes the box, once.
    let accepted = unsafe { device.launch_host_func(stream, run_callback, callback.cast()) }.is_ok();
    if !accepted {
        // SAFETY: the device refused the box, so it is still owned here.
        drop(unsafe { Box::from_raw(callback) });
    }
    accepted
}

/// Stream-ordered transfers of the shadow files of one runtime.
pub(crate) struct StreamTransfers {
    writer: Arc<Writer>,
    stream_uploads: StreamUploads,
}

impl StreamTransfers {
    /// Without transfers in progress.
    pub(crate) fn new(writer: Arc<Writer>) -> StreamTransfers {
        StreamTransfers { writer, stream_uploads: StreamUploads::default() }
    }

    /// Reads a file into device memory in the order of a stream. Work queued after it finds the bytes. On a device
    /// without host functions the bytes have arrived when this returns.
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
        let sys = self.writer.files.sys();
        let size = sys.fstat(file.fd()).and_then(|stat| size_of(sys, file.fd(), &stat)).map_err(fail)?;
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
            Some((buffer_set, previous)) => (buffer_set, Some(previous)),
            None => {
                if buffers.is_empty() {
                    buffers.push(match pool.try_acquire(Policy::OverLimit) {
                        Ok(Some(buffer)) => buffer,
                        _ => pool.acquire().map_err(device_fail)?,
                    });
                }
                (
                    Arc::new(BufferSet {
                        pool: Arc::clone(pool),
                        buffers: Mutex::new(buffers),
                        quarantined: AtomicBool::new(false),
                    }),
                    None,
                )
            }
        };
        let addresses: Vec<usize> = lock(&buffer_set.buffers).iter().map(|b| b.ptr() as usize).collect();
        // The driver reads memory that is not pinned when the copy is queued, not when it runs.
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
            started: Instant::now(),
        });
        if stream_read.predecessor.is_none() {
            stream_read.start_first_fills();
        }
        let enqueue_chunk = |chunk: usize| {
            if !(pinned && enqueue_callback(device, stream, &stream_read, chunk)) {
                // The device has no host functions, or refuses this one: wait on this thread.
                device.synchronize(stream, WaitMode::Context)?;
                stream_read.on_reached(chunk);
            }
            let from = stream_read.addresses[chunk % stream_read.addresses.len()] as *const u8;
            let dst = to.addr.offset((chunk * BUFFER_SIZE) as u64);
            // SAFETY: the buffer belongs to the upload until the last host function; the bytes are inside the
            // allocation. The buffer is filled when the copy runs: the host function before it, or the wait above,
            // ensures that.
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

    /// Writes device memory to a file in the order of a stream. Work queued after it may reuse the memory. The result is
    /// all bytes or an error.
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
        // SAFETY: `share_ptr` counted a reference, so the word stays until its result has been read.
        if let Err(error) = unsafe { self.writer.write_async(file.fd(), at, from, StreamLen::All(len), stream, result) }
        {
            // No write is queued, so the pointer is not used any more.
            async_result.unshare_ptr();
            return Err(error);
        }
        Ok(async_result)
    }
}
