//! Many fragments in the page cache, read by threads that only read.
//!
//! ```text
//!   launcher ── empty buffer ──>  reader: pread, pread, pread ...   in an unshared fd table
//!            <── full buffer ───  reader: pread, pread, pread ...   likewise
//!     └─ launch: each fragment to its destination
//! ```
//!
//! A `pread` costs about a microsecond, but a thread that shares its fd table has to increment and decrement the
//! reference count of the open file, so that no other thread closes it meanwhile, and all threads count in one word.
//! Seen (H200, 1 M reads out of 8 GiB by threads that share a table): 512 bytes at 1.7 GB/s with 6 threads and 1.9 with
//! 12 or 15, 4 KiB at 10.4, 16.0 and 15.2 GB/s, and from 6 threads to 15 twice the CPU time. If only one thread uses an
//! fd table, the Linux kernel knows that no other thread can close anything in it (`fdget`), and counts nothing.
//!
//! So each reader has an unshared table and, for the time of a batch, the program's descriptors in it: the same open
//! files (`pidfd_getfd`), so that rights, modes and leases are the program's. A reader must not call a device: the
//! driver would look for its descriptors in that table. It gets empty buffers from a launcher, which may call the
//! device, and submits filled ones (buffer_exchange.rs).
//!
//! The launcher is the caller, and no other thread while it registers memory: the driver has one lock, which is not
//! fair. Seen (H200) while one thread registers part after part, 8 or 128 MiB at a time: a copy that another thread
//! issues takes 3 us otherwise and then up to 60 ms, until nearly all is registered. So buffers ran out with a second
//! launcher, and 12 threads that copied while one registered reached less (12 to 13 GB/s of 4 KiB operations) than
//! without (14 to 18). Between two parts the caller supplies empty buffers and launches full ones, and each reader has
//! a buffer in reserve for the time of a part. Only while the caller waits for storage, whose reads have to be launched
//! too, another thread is launcher concurrently with it.
//!
//! If a sandbox refuses `pidfd_getfd` (Docker's default does, without CAP_SYS_PTRACE) readers reopen the files through
//! the program's entries in /proc, unless the program has a lease that this would break.
//!
//! While there is no reader (all read for another batch, or none can be started) the caller reads itself.
//!
//! Known flaws: a process that watches a file (inotify) sees it opened by readers that reopen it. The open file's
//! read-ahead state is still one word for all. On XFS each read counts in a lock of the inode.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spinio_device::DeviceError;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::buffer_exchange::{BufferExchange, Next, Reader};
use crate::copy_engine::{CopyEngine, PackedReads, STEP, SinkSet};
use crate::device_sink::PackBuffer;
use crate::state::{Fragment, HOST_SINK};
use spinio_host::lock;
use spinio_host::pool::Task;
use spinio_host::syscalls::Syscalls;
use spinio_host::task_scope::TaskScope;
use spinio_transfer::bounce::{BounceBuffer, BouncePool, Policy};

/// Fewer threads are not worth a launcher.
const MIN_THREADS: usize = 4;

/// Files that a reader has open at once.
const MAX_OPEN_FILES: usize = 64;

/// Readers of one batch.
pub(crate) struct BatchReaders {
    copies: Arc<CopyEngine>,
    /// The only sink.
    sink: u16,
    /// The thread whose fd table has the descriptors.
    tid: u32,
    /// Files are reopened.
    reopen_mode: bool,
    exchange: BufferExchange<PackBuffer, PackedReads>,
    /// Fragments that readers took and could not read.
    unread: Mutex<Vec<Fragment>>,
    /// Sinks of the caller, the only thread that uses them.
    sinks: Mutex<SinkSet>,
    reader_scope: TaskScope,
    launcher_scope: TaskScope,
    done: AtomicBool,
}

/// The second launcher, while the caller waits for storage.
struct LauncherTask(Arc<BatchReaders>);

impl BatchReaders {
    /// Readers that a large batch of one file and device has at most, out of `threads`.
    pub(crate) fn max_readers(threads: usize) -> usize {
        if threads < MIN_THREADS { 0 } else { threads - 1 }
    }

    /// Starts readers, if at least [`MIN_THREADS`] are of use; the caller must be a thread of the program.
    pub(crate) fn start(copies: &Arc<CopyEngine>) -> Option<Arc<BatchReaders>> {
        let (work, wanted) =
            (&copies.work, copies.useful_threads().min(copies.work.ctx.reader.files.workers().batch_threads()));
        let sink = copies.fragments.first()?.sink;
        let single_sink = (work.uniform || copies.fragments.iter().all(|item| item.sink == sink)) && sink != HOST_SINK;
        let reopen_mode = work.ctx.reader.files.workers().pidfd_getfd_denied.load(Relaxed);
        let excluded = |fd: Fd| reopen_mode && work.ctx.reader.files.sys().is_leased(fd);
        if work.sources.iter().any(|source| excluded(source.fd)) {
            return None;
        }
        if wanted < MIN_THREADS || !single_sink || !work.sinks[sink as usize].device.capabilities().has_dma_engine {
            return None;
        }
        let pool = work.ctx.reader.files.workers().batch_readers()?;
        let readers = Arc::new(BatchReaders {
            copies: Arc::clone(copies),
            sink,
            tid: linux::gettid(),
            reopen_mode,
            exchange: BufferExchange::new(),
            unread: Mutex::default(),
            sinks: Mutex::new(copies.new_sinks()),
            reader_scope: TaskScope::new(),
            launcher_scope: TaskScope::new(),
            done: AtomicBool::new(false),
        });
        pool.submit(Arc::clone(&readers) as Arc<dyn Task>, wanted - 1);
        Some(readers)
    }

    /// Starts a second launcher, because the caller will be busy for a long time. Not while it registers memory.
    pub(crate) fn start_launcher(self: &Arc<Self>) {
        // Fragments that it cannot send it reads again itself, through the program's descriptors.
        if let Some(workers) = self.copies.work.ctx.reader.files.workers().batch_copy()
            && workers.shares_fd_table() != Some(false)
        {
            workers.submit(Arc::new(LauncherTask(Arc::clone(self))), 1);
        }
    }

    /// A launcher with other work: supplies the buffers that are needed, sends full ones, and does not wait.
    pub(crate) fn pump(&self) {
        let mut sinks = lock(&self.sinks);
        self.supply_buffers();
        while let Some(reads) = self.exchange.try_recv() {
            self.copies.send(self.copies.writer(&mut sinks, self.sink), reads);
            self.supply_buffers();
        }
    }

    /// Whether their buffers are of this sink's pool.
    pub(crate) fn uses_sink(&self, sink: u16) -> bool {
        sink == self.sink
    }

    /// A buffer of the pool for the caller itself. The readers may have all others, so it sends what they submit
    /// while it waits.
    pub(crate) fn acquire_block(&self) -> Result<BounceBuffer, DeviceError> {
        let mut sinks = lock(&self.sinks);
        loop {
            if let Some(block) = self.staging().try_acquire(Policy::WithinLimit)? {
                return Ok(block);
            }
            if let Some(buffer) = self.exchange.reclaim() {
                return Ok(buffer.into_block());
            }
            match self.exchange.next(true) {
                Next::Send(reads) => self.copies.send(self.copies.writer(&mut sinks, self.sink), reads),
                Next::Wait => self.staging().reclaim_unused(),
                // No reader of this batch has the others.
                Next::NoReaders => self.staging().wait_for_release(),
            }
        }
    }

    /// A buffer of another pool. Two batches, each with readers that have all buffers of the pool that the other waits
    /// for, would both wait for ever: so it sends what readers submit, and gives back what they have not taken.
    pub(crate) fn acquire_other(&self, pool: &BouncePool) -> Result<BounceBuffer, DeviceError> {
        let mut sinks = lock(&self.sinks);
        loop {
            if let Some(block) = pool.try_acquire(Policy::WithinLimit)? {
                return Ok(block);
            }
            while let Some(reads) = self.exchange.try_recv() {
                self.copies.send(self.copies.writer(&mut sinks, self.sink), reads);
            }
            self.release_unused();
            pool.wait_for_release();
        }
    }

    /// Works until everything is done, and returns what no thread could read.
    pub(crate) fn finish(&self) -> Vec<Fragment> {
        // The other threads finish before the caller returns, also after a panic.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run()));
        self.exchange.close();
        self.done.store(true, Relaxed);
        let readers = catch_unwind(AssertUnwindSafe(|| self.reader_scope.join()));
        let launcher = catch_unwind(AssertUnwindSafe(|| self.launcher_scope.join()));
        self.release_unused();
        while let Next::Send(reads) = self.exchange.next(true) {
            // Only after a panic of the batch.
            self.staging().release(reads.into_block());
        }
        if let Err(panic) = outcome.and(readers).and(launcher) {
            std::panic::resume_unwind(panic);
        }
        std::mem::take(&mut lock(&self.unread))
    }

    /// The caller: launcher while there are readers, otherwise reader.
    fn run(&self) {
        let mut sinks = std::mem::take(&mut *lock(&self.sinks));
        loop {
            if self.launch_step(&mut sinks) {
                continue;
            }
            // A thread waiting for buffers must not keep any; no reader would fill them.
            self.release_unused();
            // A reader that started meanwhile may have taken what was left.
            if !self.copies.step(&mut sinks) && self.exchange.try_close() {
                break;
            }
        }
        self.copies.finish_sinks(sinks);
    }

    /// One step of a launcher; false while there are no readers.
    fn launch_step(&self, sinks: &mut SinkSet) -> bool {
        let out_of_buffers = !self.supply_buffers();
        if out_of_buffers {
            self.copies.send_all(sinks);
        }
        match self.exchange.next(out_of_buffers) {
            Next::Send(reads) => self.copies.send(self.copies.writer(sinks, self.sink), reads),
            // No thread waits for a buffer here, which would free those.
            Next::Wait if out_of_buffers => self.staging().reclaim_unused(),
            Next::Wait => {}
            Next::NoReaders => return false,
        }
        true
    }

    /// Supplies the buffers that are needed; false if the pool has no more now.
    fn supply_buffers(&self) -> bool {
        let sink = &self.copies.work.sinks[self.sink as usize];
        while self.exchange.needs_buffers() {
            match sink.staging.try_acquire(Policy::WithinLimit) {
                Ok(Some(block)) => self.exchange.supply(PackBuffer::new(sink, block)),
                Ok(None) => return false,
                Err(_) => self.exchange.close(),
            }
        }
        true
    }

    /// Releases empty buffers, which other batches may need.
    fn release_unused(&self) {
        while let Some(buffer) = self.exchange.reclaim() {
            self.staging().release(buffer.into_block());
        }
    }

    fn staging(&self) -> &BouncePool {
        &self.copies.work.sinks[self.sink as usize].staging
    }

    /// A reader.
    fn run_reader(&self) {
        let Some(reader) = self.exchange.enter() else { return };
        let mut files = ReaderFds::new(self);
        let mut reads: Option<PackedReads> = None;
        while let Some(range) = self.copies.range.take_back(self.chunk_len()) {
            for at in range {
                let fd = files.get(self.copies.fragments[at].source);
                let read = fd.is_some_and(|fd| self.read_one(&reader, &mut reads, fd, at));
                if !read {
                    lock(&self.unread).push(self.copies.fragments[at]);
                }
            }
        }
        if let Some(full) = reads {
            reader.submit(full);
        }
    }

    /// The number of fragments that a reader takes at once: many while many are left, so that readers are in different
    /// parts of the file. Two readers in one part contend for the same folios, each of whose counters is one word. A
    /// reader alone in a part has in its caches what it needed for the fragment before.
    fn chunk_len(&self) -> u32 {
        let threads = u32::try_from(self.copies.work.ctx.reader.files.workers().batch_threads()).unwrap_or(u32::MAX);
        (self.copies.range.remaining() / threads.saturating_mul(4)).clamp(STEP, 16 * STEP)
    }

    /// Reads a fragment into a buffer; false if there is no buffer.
    fn read_one(
        &self,
        reader: &Reader<'_, PackBuffer, PackedReads>,
        reads: &mut Option<PackedReads>,
        fd: Fd,
        at: usize,
    ) -> bool {
        if let Some(current) = reads
            && current.try_add(&self.copies, fd, at)
        {
            return true;
        }
        if let Some(full) = reads.take() {
            reader.submit(full);
        }
        reader.acquire().is_some_and(|page| reads.insert(PackedReads::new(page)).try_add(&self.copies, fd, at))
    }
}

/// The program's open files in the table of a reader.
struct ReaderFds<'a> {
    readers: &'a BatchReaders,
    kernel: &'static dyn Syscalls,
    /// By the index of the source; `None` inside: the descriptor could not be duplicated or opened.
    open: Vec<Option<Option<Fd>>>,
    count: usize,
}

impl ReaderFds<'_> {
    fn new(readers: &BatchReaders) -> ReaderFds<'_> {
        let work = &readers.copies.work;
        ReaderFds { readers, kernel: work.ctx.reader.files.sys(), open: vec![None; work.sources.len()], count: 0 }
    }

    fn get(&mut self, source: u16) -> Option<Fd> {
        if let Some(known) = self.open[source as usize] {
            return known;
        }
        if self.count >= MAX_OPEN_FILES {
            self.close_all();
        }
        let found = self.open_source(source);
        self.count += usize::from(found.is_some());
        self.open[source as usize] = Some(found);
        found
    }

    fn open_source(&self, source: u16) -> Option<Fd> {
        let work = &self.readers.copies.work;
        let source = &work.sources[source as usize];
        let BatchReaders { tid, reopen_mode, .. } = *self.readers;
        let found = match reopen_mode {
            false => self.kernel.dup_from_thread(tid, source.fd),
            true => self.kernel.reopen(tid, source.fd, linux::O_RDONLY as i32),
        };
        if let (false, Err(Errno::PERM | Errno::NOSYS)) = (reopen_mode, found) {
            // A sandbox: the next batch does not try.
            work.ctx.reader.files.workers().pidfd_getfd_denied.store(true, Relaxed);
        }
        let fd = found.ok()?;
        // The program may have closed it during its batch, and opened another file as the same number.
        let same_file = self.kernel.is_file(fd, source.file.key());
        if !same_file {
            self.kernel.close(fd);
        }
        same_file.then_some(fd)
    }

    fn close_all(&mut self) {
        for file in &mut self.open {
            if let Some(fd) = file.take().flatten() {
                self.kernel.close(fd);
            }
        }
        self.count = 0;
    }
}

impl Drop for ReaderFds<'_> {
    fn drop(&mut self) {
        self.close_all();
    }
}

impl Task for BatchReaders {
    fn execute(&self) {
        if let Some(_scope) = self.reader_scope.enter() {
            self.run_reader();
        }
    }
}

impl Task for LauncherTask {
    fn execute(&self) {
        let readers = &self.0;
        let Some(_scope) = readers.launcher_scope.enter() else { return };
        if !readers.copies.verify_fds() {
            return;
        }
        let mut sinks = readers.copies.new_sinks();
        while !readers.done.load(Relaxed) {
            if !readers.launch_step(&mut sinks) {
                // The caller may be waiting for a buffer, or another batch.
                readers.release_unused();
                // No fragment is left for a reader to take.
                if readers.copies.range.is_empty() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        readers.copies.finish_sinks(sinks);
    }
}
