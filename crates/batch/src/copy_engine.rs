//! Fragments in the page cache, copied by the CPU into bounce buffers and sent together.
//!
//! ```text
//!   caller ┐                                                        ┌─ fragment ─> its destination
//!   worker ├─ pread, pread, pread ... into a bounce buffer ─ launch ┼─ fragment ─> its destination
//!   worker ┘                          one for each thread           └─ fragment ─> its destination
//! ```
//!
//! The threads take fragments from the back, while the caller may be registering others from the front
//! (split_range.rs).
//!
//! Used by the threads that may call the device, each with its own buffer, through the program's own descriptors: for
//! few fragments, or more than one device. Many fragments are read by the batch readers (batch_readers.rs). Fragments
//! that are not in the page cache are read by the Linux kernel, among them everything that another route could not
//! deliver.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use crate::device_sink::{PackBuffer, SinkWriter};
use crate::split_range::SplitRange;
use crate::state::{BatchState, Fragment, HOST_SINK, Source};
use spinio_host::pool::Task;
use spinio_host::syscalls::pread_full;
use spinio_host::task_scope::TaskScope;
use spinio_transfer::bounce::{BounceBuffer, Policy};

/// Fragments a thread takes at once.
pub(super) const STEP: u32 = 128;

/// Fragments to be copied, by any number of threads.
pub(crate) struct CopyEngine {
    pub(crate) work: Arc<BatchState>,
    pub(crate) fragments: Vec<Fragment>,
    pub(crate) range: SplitRange,
    /// Fragments that only the caller takes, to register them.
    caller_only: usize,
    reason: Reason,
    scope: TaskScope,
}

/// A buffer that is being filled.
pub(super) struct PackedReads {
    buffer: PackBuffer,
    /// The fragments whose bytes are in it: indices into [`CopyEngine::fragments`].
    fragments: Vec<u32>,
    bytes: u64,
    started: Instant,
}

impl PackedReads {
    pub(super) fn new(page: PackBuffer) -> PackedReads {
        PackedReads { buffer: page, fragments: Vec::new(), bytes: 0, started: Instant::now() }
    }

    /// Reads a fragment into it; false if it has no space for the fragment.
    pub(super) fn try_add(&mut self, copies: &CopyEngine, fd: Fd, at: usize) -> bool {
        let fragment = &copies.fragments[at];
        let Some(slot) = self.buffer.slot_for(fragment.len as usize, fragment.dest) else { return false };
        // SAFETY: the buffer has room for as many bytes there.
        let got = unsafe { copies.read_fragment(fd, fragment, self.buffer.ptr().wrapping_add(slot), Route::Copy) };
        debug_assert!(got <= fragment.len as usize);
        if got > 0 {
            self.buffer.push(slot, got, fragment.dest);
            self.fragments.push(at as u32);
            self.bytes += got as u64;
        }
        true
    }

    /// Splits it up; nothing of it is sent.
    pub(super) fn into_block(self) -> BounceBuffer {
        self.buffer.into_block()
    }
}

/// The open buffer of a thread for one device.
struct SinkState {
    writer: SinkWriter,
    reads: Option<PackedReads>,
}

/// The open buffers of a thread for all devices.
#[derive(Default)]
pub(super) struct SinkSet(Vec<Option<SinkState>>);

impl CopyEngine {
    /// The first `caller_only` fragments are left to the caller.
    pub(crate) fn new(
        work: &Arc<BatchState>,
        fragments: Vec<Fragment>,
        caller_only: usize,
        reason: Reason,
    ) -> Arc<CopyEngine> {
        // A batch has fewer fragments than that: `resolve` checks it.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let frontier = SplitRange::new(count(fragments.len()), count(caller_only));
        Arc::new(CopyEngine {
            work: Arc::clone(work),
            fragments,
            range: frontier,
            caller_only,
            reason,
            scope: TaskScope::new(),
        })
    }

    /// The number of useful threads, the caller included.
    pub(super) fn useful_threads(&self) -> usize {
        // One more thread is worth waking for a few hundred operations, or a quarter of a MiB.
        let items = &self.fragments[self.caller_only..];
        match items.len() / 256 {
            few if few < 64 => few.max((items.iter().map(|i| u64::from(i.len)).sum::<u64>() >> 18) as usize),
            many => many,
        }
    }

    /// Wakes as many copy workers as are useful.
    pub(crate) fn wake_workers(self: &Arc<Self>) {
        let useful = self.useful_threads();
        if useful > 1
            && let Some(pool) = self.work.ctx.reader.files.workers().batch_copy()
            && pool.shares_fd_table() != Some(false)
        {
            pool.submit(Arc::clone(self) as Arc<dyn Task>, useful - 1);
        }
    }

    /// Fragments that no thread has begun are not begun.
    pub(crate) fn cancel_rest(&self) {
        let _ = self.range.take_front(self.fragments.len());
    }

    /// Works until everything is done.
    pub(crate) fn finish(&self) {
        // Workers finish before the caller returns, also after a panic: they write into its memory. The scope relays a
        // panic.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            if let Some(_inside) = self.scope.enter() {
                self.run();
            }
        }));
        self.scope.join();
    }

    /// Whether the descriptors refer to the same files on this thread as on the caller's: a thread of the program may
    /// have left the fd table that it had when the workers were started.
    pub(super) fn verify_fds(&self) -> bool {
        self.work.sources.iter().all(|source| self.verify_fd(source))
    }

    fn verify_fd(&self, source: &Source) -> bool {
        self.work.ctx.reader.files.sys().is_file(source.fd, source.file.key())
    }

    fn run(&self) {
        let mut sinks = self.new_sinks();
        while self.step(&mut sinks) {}
        self.finish_sinks(sinks);
    }

    pub(super) fn new_sinks(&self) -> SinkSet {
        SinkSet(self.work.sinks.iter().map(|_| None).collect())
    }

    /// Copies some fragments; false if there are none left.
    pub(super) fn step(&self, sinks: &mut SinkSet) -> bool {
        let Some(range) = self.range.take_back(STEP) else { return false };
        for at in range.clone() {
            self.copy_one(at, sinks);
        }
        self.verify_sources(range);
        true
    }

    /// Sends what is not sent yet, and waits until it has arrived.
    pub(super) fn finish_sinks(&self, mut sinks: SinkSet) {
        self.send_all(&mut sinks);
        sinks.0.into_iter().flatten().for_each(|open| open.writer.finish());
    }

    pub(super) fn send_all(&self, sinks: &mut SinkSet) {
        for SinkState { writer, reads } in sinks.0.iter_mut().flatten() {
            if let Some(full) = reads.take() {
                self.send(writer, full);
            }
        }
    }

    /// The writer for the fragments of a sink.
    pub(super) fn writer<'a>(&self, sinks: &'a mut SinkSet, sink: u16) -> &'a mut SinkWriter {
        &mut self.sink_state(sinks, sink).writer
    }

    fn sink_state<'a>(&self, sinks: &'a mut SinkSet, sink: u16) -> &'a mut SinkState {
        let new_state = || SinkState { writer: SinkWriter::new(&self.work.sinks[sink as usize]), reads: None };
        sinks.0[sink as usize].get_or_insert_with(new_state)
    }

    fn copy_one(&self, at: usize, sinks: &mut SinkSet) {
        let fragment = &self.fragments[at];
        let fd = self.work.sources[fragment.source as usize].fd;
        if fragment.sink == HOST_SINK || !self.work.sinks[fragment.sink as usize].device.capabilities().has_dma_engine {
            let started = Instant::now();
            // SAFETY: host-mapped memory inside its allocation, or host memory, which the Linux kernel validates.
            let got = unsafe { self.read_fragment(fd, fragment, fragment.dest as *mut u8, Route::Store) };
            self.record(Route::Store, got as u64, started);
            return;
        }
        if let Some(reads) = &mut self.sink_state(sinks, fragment.sink).reads
            && reads.try_add(self, fd, at)
        {
            return;
        }
        let Some(buffer) = self.next_buffer(fragment.sink, sinks) else {
            return self.work.record_short(fragment, 0, Some(Errno::NOMEM));
        };
        let reads = self.sink_state(sinks, fragment.sink).reads.insert(PackedReads::new(buffer));
        if !reads.try_add(self, fd, at) {
            self.work.record_short(fragment, 0, Some(Errno::NOMEM));
        }
    }

    /// Sends the buffer to a sink, and acquires a new one.
    fn next_buffer(&self, sink_index: u16, sinks: &mut SinkSet) -> Option<PackBuffer> {
        let SinkState { writer, reads } = self.sink_state(sinks, sink_index);
        if let Some(full) = reads.take() {
            self.send(writer, full);
        }
        let sink = &self.work.sinks[sink_index as usize];
        let block = match sink.staging.try_acquire(Policy::WithinLimit) {
            Ok(Some(block)) => block,
            // A thread that waits for a buffer must not have any that other threads wait for.
            Ok(None) => {
                self.send_all(sinks);
                sink.staging.acquire().ok()?
            }
            Err(_) => return None,
        };
        Some(PackBuffer::new(sink, block))
    }

    /// Sends a buffer. What cannot be gathered is read and copied one by one; what cannot be copied has failed.
    pub(super) fn send(&self, writer: &mut SinkWriter, reads: PackedReads) {
        let PackedReads { buffer, fragments, bytes, started } = reads;
        let gathered = buffer.gathers();
        match writer.send(buffer) {
            Ok(()) => self.record(Route::Copy, bytes, started),
            Err(e) if !gathered => writer.sink.record_failure(e),
            Err(_) => {
                for at in fragments {
                    if let Err(e) = self.copy_single(&self.fragments[at as usize], writer) {
                        writer.sink.record_failure(e);
                        break;
                    }
                    self.verify_sources(at as usize..at as usize + 1);
                }
            }
        }
    }

    /// One fragment in its own buffer.
    fn copy_single(&self, fragment: &Fragment, writer: &mut SinkWriter) -> Result<(), spinio_device::DeviceError> {
        let started = Instant::now();
        let mut buffer = PackBuffer::new(&writer.sink, writer.sink.staging.acquire()?);
        let Some(at) = buffer.slot_for(fragment.len as usize, fragment.dest) else { return Ok(()) };
        let fd = self.work.sources[fragment.source as usize].fd;
        // SAFETY: the buffer has room for as many bytes there.
        let got = unsafe { self.read_fragment(fd, fragment, buffer.ptr().wrapping_add(at), Route::Copy) };
        if got > 0 {
            buffer.push(at, got, fragment.dest);
        }
        writer.send(buffer)?;
        self.record(Route::Copy, got as u64, started);
        Ok(())
    }

    /// Reads a fragment into memory; the bytes read. If they are not all, that is recorded.
    ///
    /// # Safety
    /// `into` must have as many bytes, or be an address that the kernel may refuse.
    pub(super) unsafe fn read_fragment(&self, fd: Fd, fragment: &Fragment, into: *mut u8, route: Route) -> usize {
        let (sys, range) = (self.work.ctx.reader.files.sys(), (fragment.offset, fragment.len as usize));
        // SAFETY: passed on to the caller.
        let (got, error) = unsafe { pread_full(sys, route, fd, into, range, 1) };
        if got < range.1 {
            self.work.record_short(fragment, got as u64, error);
        }
        got
    }

    /// Whether the bytes came from the intended files: the program may have closed a descriptor during its batch, and
    /// opened another file with the same number.
    fn verify_sources(&self, range: std::ops::Range<usize>) {
        let mut last = None;
        for at in range {
            let fragment = &self.fragments[at];
            let source = &self.work.sources[fragment.source as usize];
            let same_file = match last {
                Some((which, good)) if which == fragment.source => good,
                _ => source.number.is_still(self.work.ctx.reader.files.sys(), source.file.key()),
            };
            last = Some((fragment.source, same_file));
            if !same_file {
                self.work.record_short(fragment, 0, Some(Errno::BADF));
            }
        }
    }

    fn record(&self, route: Route, bytes: u64, begun: Instant) {
        self.work.ctx.reader.files.stats().record_piece(&self.work.span, route, self.reason, 0, bytes, begun);
    }
}

impl Task for CopyEngine {
    fn execute(&self) {
        if let Some(_inside) = self.scope.enter()
            && self.verify_fds()
        {
            self.run();
        }
    }
}
