//! The runtime: one a process, made at the first device request. Every function of it that programs, hooks and
//! languages call is in this file; what they do is in the modules that have the names of the work.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU64, Ordering::*};

use spinio_device::emulated::Config;
use spinio_device::{Allocation, Device, StreamId, StreamOrder, Target, WaitMode};
use spinio_files::shadow_file::FdRouter;
use spinio_files::{Files, FilesCtx, ShadowFile, sequential};
use spinio_host::Settings;
use spinio_host::pool::Workers;
use spinio_host::storage_rings::NoRing;
use spinio_host::syscalls::{LinuxSyscalls, Syscalls};
use spinio_pinned::{DeviceMapping, PinError, PinnedFiles};
use spinio_plan::Route;
use spinio_plan::geometry::BlockStack;
use spinio_stats::{Gauge, Snapshot, StatsLocation, StatsRegion};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_transfer::{BouncePools, DeferredUnpin, Error};

use crate::ctx::{Reader, Writer};
use crate::decide::Buffer;
use crate::explain::Explanation;
use crate::policy::RoutePolicy;
use crate::read::WaitBuffers;
use crate::read::app_fd_calls::ReservedOffset;
use crate::stream::{AsyncResult, StreamTransfers};
use crate::trial::MeasuredRead;
use crate::write::{Part, StreamLen};

type Result<T> = core::result::Result<T, Error>;

/// Everything SPIN keeps in a process.
pub struct Runtime {
    settings: Settings,
    reader: Arc<Reader>,
    writer: Arc<Writer>,
    pinned: Arc<PinnedFiles>,
    transfers: StreamTransfers,
    /// PID of the process that made it; 0 in its forked children.
    alive: Option<&'static AtomicU64>,
}

static CURRENT: AtomicPtr<Runtime> = AtomicPtr::new(core::ptr::null_mut());

fn current() -> Option<&'static Runtime> {
    alive(CURRENT.load(Acquire))
}

fn alive(stored: *mut Runtime) -> Option<&'static Runtime> {
    // SAFETY: what is stored there was leaked and is never freed.
    let runtime = unsafe { stored.as_ref() }?;
    runtime.alive.is_none_or(|word| word.load(Relaxed) != 0).then_some(runtime)
}

/// Whether this very process has made the runtime. A child of `vfork` runs in its parent's memory: it finds every word as
/// the parent left it, but has its own descriptors. The files that it closes before `exec` are still open in the parent.
pub fn has_runtime() -> bool {
    // SAFETY: what is stored there was leaked and is never freed.
    let runtime = unsafe { CURRENT.load(Acquire).as_ref() };
    let pid = runtime.and_then(|runtime| runtime.alive).map_or(0, |word| word.load(Relaxed));
    pid != 0 && pid == u64::from(linux::getpid())
}

/// The runtime of this process. A forked child makes its own: the parent's threads did not come along, and its locks
/// may be held by them.
pub fn runtime() -> &'static Runtime {
    // One load: another thread may store a runtime at any time, which must not be replaced.
    let old = CURRENT.load(Acquire);
    if let Some(runtime) = alive(old) {
        return runtime;
    }
    let mut created = Runtime::build(Settings::of_process().clone(), &LinuxSyscalls, true);
    created.alive = linux::wipe_on_fork_word().ok();
    if let Some(word) = created.alive {
        word.store(linux::getpid().into(), Relaxed);
    }
    let created = Box::into_raw(Box::new(created));
    match CURRENT.compare_exchange(old, created, AcqRel, Acquire) {
        // SAFETY: leaked above, never freed.
        Ok(_) => unsafe { &*created },
        Err(_) => {
            // SAFETY: no other thread has seen it.
            drop(unsafe { Box::from_raw(created) });
            runtime()
        }
    }
}

/// The program is about to close or replace `fd`: closes what is kept for its file, so that the file system can be
/// unmounted and a deleted file's space is free. Costs one load while nothing is kept.
pub fn on_close(fd: Fd) {
    let Some(runtime) = current().filter(|r| r.keeps_anything()) else { return };
    if let Ok(key) = runtime.sys().known_key(fd) {
        runtime.pinned.on_close(fd, key);
        runtime.files().forget(key);
    }
}

/// The program has advised the kernel about `fd`, and the kernel has accepted it. Takes no lock: it may come before any
/// device read, and from any context.
pub fn record_advice(fd: Fd, advice: linux::Advice) {
    if let Ok(stat) = linux::fstat(fd) {
        sequential::record_advice(fd, &stat, advice);
    }
}

/// Applies advice about `len` bytes at `offset` (0: to the end) to the state that is kept for the file.
pub fn apply_advice(fd: Fd, offset: u64, len: u64, advice: linux::Advice) {
    let Some(runtime) = current().filter(|r| !r.files().table.is_empty()) else { return };
    if let Ok(stat) = runtime.sys().fstat(fd) {
        let end = if len == 0 { u64::MAX } else { offset.saturating_add(len) };
        runtime.files().advised(stat, offset..end, advice);
    }
}

/// As [`on_close`], for descriptors that are closed as a range. Pinned files end with the descriptor that they were
/// pinned by; all other state of files is dropped, since it comes back with the next request.
pub fn on_close_range(first: u32, last: u32) {
    let Some(runtime) = current().filter(|r| r.keeps_anything()) else { return };
    runtime.pinned.on_close_range(first, last);
    runtime.files().forget_all();
}

/// What is not understood of the settings that `get` finds by name, one sentence a setting.
pub fn check_settings(get: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (settings, mut complaints) = Settings::read(get);
    if let Some(text) = settings.emulated
        && let Err(error) = Config::parse(&text)
    {
        complaints.push(format!("SPINIO_EMULATED={text} is not understood ({error}): the default stays"));
    }
    complaints
}

impl Runtime {
    /// A runtime of its own, for tests and tools.
    pub fn new(settings: Settings) -> Runtime {
        Runtime::build(settings, &LinuxSyscalls, false)
    }

    /// A runtime over another kernel, for fault injection.
    pub fn with_kernel(settings: Settings, kernel: &'static dyn Syscalls) -> Runtime {
        Runtime::build(settings, kernel, false)
    }

    fn build(mut settings: Settings, kernel: &'static dyn Syscalls, process_wide: bool) -> Runtime {
        // A setting that is not understood counts as none.
        settings.emulated = settings.emulated.filter(|text| Config::parse(text).is_ok());
        let sys = FdRouter::leak(kernel);
        let workers = Arc::new(Workers::new(sys, &settings));
        sys.attach(&workers);
        // On the program's thread, before anything is counted: a worker opens the file, and must not wait for itself.
        let stats_region =
            Arc::new(StatsRegion::new(StatsLocation::from_settings(&settings, process_wide), settings.trace, || {
                workers.shadow()
            }));
        let unpin = DeferredUnpin::new(Arc::clone(&workers));
        let ctx = FilesCtx {
            sys,
            workers: Arc::clone(&workers),
            stats_region: Arc::clone(&stats_region),
            unpin: Arc::clone(&unpin),
        };
        let files = Arc::new(Files::new(Arc::new(ctx), &settings));
        let bounce = Arc::new(BouncePools::new(settings.bounce_limit));
        let pinned = Arc::new(PinnedFiles::new(Arc::clone(&files), settings.effective_pin_limit()));
        let policy = Arc::new(RoutePolicy::new(&settings, Arc::clone(&unpin)));
        let weak = Arc::downgrade(&files);
        let (held, registered) = (Arc::downgrade(&pinned), Arc::downgrade(&pinned));
        let staging = Arc::clone(&bounce);
        stats_region.set_gauges(vec![
            (Gauge::Pinned, Box::new(move || unpin.bytes())),
            (Gauge::BounceBytes, Box::new(move || staging.bytes())),
            (Gauge::CachedFileStates, Box::new(move || weak.upgrade().map_or(0, |files| files.table.count()))),
            (Gauge::PinnedFiles, Box::new(move || held.upgrade().map_or(0, |pinned| pinned.totals().0))),
            (Gauge::PinnedFileBytes, Box::new(move || registered.upgrade().map_or(0, |pinned| pinned.totals().1))),
        ]);
        let writer =
            Arc::new(Writer { files: Arc::clone(&files), bounce: Arc::clone(&bounce), policy: Arc::clone(&policy) });
        let reader = Arc::new(Reader {
            files,
            bounce,
            pinned: Arc::clone(&pinned),
            policy,
            wait_buffers: WaitBuffers::default(),
        });
        Runtime { settings, reader, transfers: StreamTransfers::new(Arc::clone(&writer)), writer, pinned, alive: None }
    }

    fn files(&self) -> &Files {
        &self.reader.files
    }

    fn sys(&self) -> &'static dyn Syscalls {
        self.reader.files.sys()
    }

    fn keeps_anything(&self) -> bool {
        !self.files().table.is_empty() || !self.pinned.is_empty()
    }

    fn update_gauges(&self) {
        self.files().ctx.stats_region.update_gauges();
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Its reads, for batches.
    pub fn reader(&self) -> &Arc<Reader> {
        &self.reader
    }

    /// The counters now.
    pub fn stats(&self) -> Snapshot {
        self.files().stats().snapshot()
    }

    /// Pieces of storage that callers have read through the ring so far, without a shadow worker.
    pub fn ring_reads(&self) -> u64 {
        self.reader.files.workers().ring_reads()
    }

    /// Why no read takes the ring, as far as is known; `None`: one would, or the ring was not needed yet.
    pub fn ring_refusal(&self) -> Option<NoRing> {
        self.reader.files.workers().ring_refusal()
    }

    /// Why shadow workers read the storage of a file, as far as is known without a read; `None`: the ring would, once
    /// its kernel thread is awake.
    pub fn ring_refusal_of(&self, fd: Fd) -> core::result::Result<Option<NoRing>, Errno> {
        let files = self.files();
        let stat = files.sys().fstat(fd)?;
        Ok(files.get(fd, stat).map_or(Some(NoRing::NotRegistered), |file| files.ring_refusal(&file)))
    }

    /// Bytes of pinned bounce buffers for the device of an allocation.
    pub fn bounce_bytes(&self, allocation: &Allocation) -> u64 {
        self.reader.bounce.bytes_of(allocation.device)
    }
}

/// Reads.
impl Runtime {
    /// `pread` (with an offset) or `read` (at the descriptor's own) into device memory.
    /// Returns what POSIX says: bytes read, short at the end of the file or of the allocation.
    pub fn read(&self, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize> {
        self.reader.read(fd, at, to, len)
    }

    /// Reads the file now and queues the copies on a stream; returns the bytes that will be there once the stream gets
    /// that far. Waits only for bounce buffers of stream-ordered requests, and up to twice the limit: beyond it the
    /// stream has to move.
    pub fn read_async(&self, fd: Fd, at: u64, to: Target, len: usize, stream: StreamId) -> Result<usize> {
        self.reader.read_async(fd, at, to, len, stream)
    }

    /// Moves the offset of a descriptor forward by `len` for a later read. EBADF if it cannot be read: others share the
    /// offset, and must not see it moved by a read that fails.
    pub fn reserve(&self, fd: Fd, len: u64) -> core::result::Result<ReservedOffset, Errno> {
        let sys = self.sys();
        if sys.status_flags(fd)? & linux::O_ACCMODE as i32 == linux::O_WRONLY as i32 {
            return Err(Errno::BADF);
        }
        ReservedOffset::new(sys, fd, len, &sys.fstat(fd)?)
    }

    /// Moves the offset back by what a reserved read did not use, unless the number is another file's by now.
    pub fn unreserve(&self, fd: Fd, reserved: &ReservedOffset, unused: u64) {
        reserved.release(self.sys(), fd, unused);
    }

    /// Whether a read fills the whole buffer while the file has bytes: a device, or a file whose size says nothing (procfs)
    /// or whose offset cannot be moved. A second call after a full one waits for nothing that one call would not have waited for.
    pub fn fills_buffers(&self, fd: Fd) -> core::result::Result<bool, Errno> {
        self.reader.fills_buffers(fd)
    }

    /// Whether the file of `fd` can only be read front to back: it has no offsets, or its size says nothing.
    pub fn is_stream(&self, fd: Fd) -> core::result::Result<bool, Errno> {
        self.reader.is_stream(fd)
    }

    /// Lets the kernel itself read into host-mapped device memory, as a `pread` without SPIN does; with an O_DIRECT
    /// descriptor and P2P-mapped memory that is a peer-to-peer transfer. For tools that compare.
    pub fn read_by_kernel(&self, fd: Fd, at: u64, to: Target, len: usize) -> Result<usize> {
        self.writer.pread_host_mapped(fd, at, to, len)
    }

    /// Explains a `pread` of `len` bytes at `offset` into a buffer.
    pub fn explain(&self, fd: Fd, offset: u64, len: u64, buffer: Buffer) -> Result<Explanation> {
        self.reader.explain(fd, offset, len, buffer)
    }

    /// Prepares trials that read `fd` into `to`.
    pub fn trial(&self, fd: Fd, to: Target) -> Result<MeasuredRead<'_>> {
        self.reader.measured_read(fd, to)
    }
}

/// Writes.
impl Runtime {
    /// `pwrite` (with an offset) or `write` (at the descriptor's own) out of device memory.
    /// Returns what POSIX says: the bytes that are in the file now.
    pub fn write(&self, fd: Fd, at: Option<u64>, from: Target, len: usize) -> Result<usize> {
        self.writer.write(fd, at, from, len)
    }

    /// `pwritev2`, with parts that may be host or device memory, and `RWF_*` flags.
    pub fn write_parts(&self, fd: Fd, at: Option<u64>, flags: u32, parts: &[Part]) -> Result<usize> {
        self.writer.write_parts(fd, at, flags, parts)
    }

    /// Writes parts at offsets of a file, each in one call of the kernel; returns when all are written. The error
    /// has the first offset that failed; others may be written or not.
    pub fn write_ranges(&self, file: &ShadowFile, ranges: &[(u64, Part)], route: Route) -> Result<()> {
        self.writer.write_ranges(file, ranges, route)
    }

    /// As [`Runtime::write_ranges`], each range only if `may` says so on the shadow worker just before it. Returns the
    /// indexes of the ranges that were not written because of that.
    pub fn write_ranges_while(
        &self,
        file: &ShadowFile,
        ranges: &[(u64, Part)],
        route: Route,
        may: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Vec<usize>> {
        self.writer.write_ranges_while(file, ranges, route, may)
    }

    /// Queues a `pwrite` of device memory on a stream. `result` is set when the stream has got there: the bytes
    /// written, or a negative errno. What is queued after it sees both.
    ///
    /// # Safety
    /// `result` must be null, or stay until it is set.
    pub unsafe fn write_async(
        &self,
        fd: Fd,
        at: u64,
        from: Target,
        len: usize,
        stream: StreamId,
        result: *const AtomicIsize,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.writer.write_async(fd, at, from, StreamLen::UpTo(len), stream, result) }
    }

    /// Explains a `pwrite` of `len` bytes at `offset` out of a buffer, through a descriptor with the status flags of
    /// `fd`.
    pub fn explain_write(&self, fd: Fd, offset: u64, len: u64, buffer: Buffer) -> Result<Explanation> {
        self.writer.explain_write(fd, offset, len, buffer)
    }
}

/// Copies between host and device memory.
impl Runtime {
    /// Copies host bytes into device memory, in the order of a small read; the bytes may be reused at once.
    pub fn put(&self, to: Target, bytes: &[u8]) -> Result<()> {
        self.writer.copy_to_device(to, bytes)
    }

    /// Waits until the copies that earlier reads of this thread have queued have arrived, for a caller that promises more
    /// than a small read does. `operation`, `offset` and `len` are named in the error.
    pub fn wait_arrived(&self, to: Target, operation: &'static str, offset: u64, len: u64) -> Result<()> {
        let arrived = StreamOrder::app(to.allocation.device).synchronize(WaitMode::Context);
        arrived.map_err(|e| Error::device(e, operation, offset, len))
    }

    /// Copies device memory into host memory that a stream takes: a write, as [`Runtime::put`] is a read.
    pub fn get(&self, from: Target, into: &mut [u8]) -> Result<()> {
        self.writer.copy_from_device(from, into)
    }

    /// Copies host memory into the device as a program without SPIN does: from where it lies, and waits. For tools that
    /// compare.
    pub fn copy(&self, to: Target, bytes: &[u8]) -> Result<()> {
        self.writer.copy_unstaged(to, bytes)
    }

    /// Copies device memory into host memory and waits, after what this thread has queued before.
    pub fn fetch(&self, from: Target, into: &mut [u8]) -> Result<()> {
        self.writer.read_back(from, into)
    }
}

/// Pinned files.
impl Runtime {
    /// Pins the file of a descriptor: its pages are registered with `device` now (with any other at its first read),
    /// and stay so until [`Runtime::unpin_file`], or until a process opens it for writing. A file may be pinned more
    /// than once. Returns the generation of its pins, for [`Runtime::unpin_generation`].
    pub fn pin_file(&self, fd: Fd, device: Option<&'static dyn Device>) -> core::result::Result<u64, PinError> {
        let done = self.pinned.pin(fd, device);
        self.update_gauges();
        done
    }

    /// Unpins the file, once for each time that it was pinned; after the last its pages are unregistered
    /// when this returns, unless it is mapped: then when it is unmapped.
    pub fn unpin_file(&self, fd: Fd) -> core::result::Result<(), PinError> {
        let done = self.pinned.unpin_file(fd);
        self.update_gauges();
        done
    }

    /// The same, unless the file was unpinned since, whether or not it was pinned again.
    pub fn unpin_generation(&self, fd: Fd, generation: u64) -> core::result::Result<(), PinError> {
        let done = self.pinned.unpin_generation(fd, generation);
        self.update_gauges();
        done
    }

    /// Whether the file is pinned, and no process waits to write it.
    pub fn is_pinned(&self, fd: Fd) -> bool {
        self.pinned.is_pinned(fd)
    }

    /// Bytes of pinned files that are registered now.
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned.pinned_bytes()
    }

    /// Maps a range of a pinned file for a device; pins the file if it was not, for as long as the runtime lives or
    /// until a process waits to write it.
    pub fn map(
        &self,
        fd: Fd,
        offset: u64,
        len: u64,
        device: &'static dyn Device,
    ) -> core::result::Result<DeviceMapping, PinError> {
        self.pinned.map(fd, offset, len, device)
    }

    /// As [`Runtime::map`], until [`Runtime::unmap`] of the address.
    pub fn map_until_unmap(
        &self,
        fd: Fd,
        offset: u64,
        len: u64,
        device: &'static dyn Device,
    ) -> core::result::Result<u64, PinError> {
        self.pinned.map_until_unmap(fd, offset, len, device)
    }

    /// Ends a map; false if there is none at this address.
    pub fn unmap(&self, address: u64) -> bool {
        self.pinned.unmap(address)
    }

    /// Whether a process waits to write the file of a map; `None` if there is none at this address.
    pub fn revoke_requested(&self, address: u64) -> Option<bool> {
        self.pinned.revoke_requested(address)
    }
}

/// Files that SPIN opens itself, and stream-ordered transfers.
impl Runtime {
    /// Opens a file by its name, outside the program's descriptor table. `flags` and `mode` as for `open`.
    /// ENOSYS: this kernel gives no thread a table of its own. EINTR: waiting for a lease was interrupted.
    pub fn open(&self, path: &CStr, flags: u32, mode: u32) -> core::result::Result<ShadowFile, Errno> {
        self.files().shadow.open(path, flags, mode)
    }

    /// The block devices under what `fd` names: a file, a directory or a device.
    pub fn storage(&self, fd: Fd) -> Result<Arc<BlockStack>> {
        self.files().storage(fd).map_err(|e| Error::kernel(e, "ask the storage of", 0, 0))
    }

    /// The size of a file or of a block device. It moves the offset of the file's descriptor, by which nothing is read.
    pub fn size_of(&self, file: &ShadowFile) -> core::result::Result<u64, Errno> {
        spinio_files::size_of(self.sys(), file.fd(), &self.sys().fstat(file.fd())?)
    }

    /// Reads a file into device memory in the order of a stream. What is queued after it finds the bytes. On a device
    /// without host functions they are there when this returns. The result is short only where the file ends: an error
    /// is the result even where bytes before it have been moved.
    pub fn read_on_stream(
        &self,
        file: &Arc<ShadowFile>,
        at: u64,
        to: Target,
        len: usize,
        stream: StreamId,
    ) -> Result<AsyncResult> {
        self.transfers.read_on_stream(file, at, to, len, stream)
    }

    /// Writes device memory to a file in the order of a stream. What is queued after it may use the memory again. The
    /// result is all of the bytes, or an error, even where bytes before it are in the file.
    pub fn write_on_stream(
        &self,
        file: &Arc<ShadowFile>,
        at: u64,
        from: Target,
        len: usize,
        stream: StreamId,
    ) -> Result<AsyncResult> {
        self.transfers.write_on_stream(file, at, from, len, stream)
    }
}
