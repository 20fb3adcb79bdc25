//! On-demand reads from kernels: a cache of file pages in device memory, which kernels fill by requests.
//!
//! ```text
//!   kernel (device/include/spinio/gaia_device.h)              fillers: threads of this process       fill.rs
//!     tags: which page is in which frame                        ring entry: page and frame
//!     miss: claims a frame, stores a request ── ring ────────>  pread of the page into a slot of pinned memory
//!     waits for the frame's word             <── done words ──  slot and bytes, or errno
//!     copies slot to frame, gives it back    ── taken words ──> the slot is free
//!     counts itself as user of the frame
//! ```
//!
//! Tags, counts and locks are in device memory, and only kernels access them. The words in pinned memory have one
//! writer each ([`words`]). Nothing here trusts them: an entry of the ring that makes no sense is ignored.
//!
//! No call of the driver is on the way of a page: kernels wait for it, and what the driver does may wait for kernels.
//!
//! `close`, and the end of the process, stop the waiting kernels with an error first.
//!
//! Known flaws: a page is read by one system call, through the page cache. Pages that were requested ahead and that no
//! kernel uses keep their slots until another page replaces them, or a kernel waits for a slot. A device without copies has no readers.

#![expect(unsafe_code, reason = "device memory")]

mod fill;
mod words;

use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex};

use spinio_device::{Device, DeviceAddr, ReplicaMemory, WaitMode};
use spinio_host::lock;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

pub use self::fill::ReaderStats;

use self::fill::Fillers;
use self::words::Words;
use crate::file_reader::FileReader;
use crate::{Error, Result};

const MIN_PAGE: u64 = 4096;
/// A done word has 17 bits for their number.
const MAX_PAGE: u64 = 64 << 10;
/// Frames that a page may be in.
const WAYS: u64 = 8;
/// A ring entry has 20 bits for a frame.
const MAX_FRAMES: u64 = 1 << 20;
/// Pages that are requested ahead of a sequential reader.
const PREFETCH: u32 = 4;
/// How long a kernel waits for a page.
const TIMEOUT_NS: u64 = 30_000_000_000;

/// What a kernel needs: `struct spinio_gaia_reader`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Handle {
    /// Bytes of the file when it was opened.
    pub size: u64,
    /// How long a kernel waits for a page.
    pub timeout_ns: u64,
    /// For the calls of the program.
    pub id: u64,
    frames: u64,
    tags: u64,
    tickets: u64,
    results: u64,
    locks: u64,
    tail: u64,
    ring: u64,
    done: u64,
    taken: u64,
    staged: u64,
    stop: u64,
    page_shift: u32,
    sets: u32,
    entries: u32,
    prefetch: u32,
}

/// An open reader.
struct Reader {
    id: u64,
    process: u32,
    device: &'static dyn ReplicaMemory,
    /// The frames, then what else is in device memory.
    memory: DeviceAddr,
    fillers: Arc<Fillers>,
}

static READERS: Mutex<(u64, Vec<Reader>)> = Mutex::new((0, Vec::new()));

/// Opens a reader of a file on a device. `sequential`: pages are requested ahead of kernels that read in order.
pub fn open(
    fd: Fd,
    cache: u64,
    page: u64,
    sequential: bool,
    device: &'static dyn Device,
    files: &dyn FileReader,
) -> Result<Handle> {
    let invalid = |sentence: &str| Error::new(Errno::INVAL, sentence);
    if !page.is_power_of_two() || !(MIN_PAGE..=MAX_PAGE).contains(&page) {
        return Err(invalid("The pages of a reader have 4096, 8192, ... 65536 bytes"));
    }
    let frames = cache / page / WAYS * WAYS;
    if frames == 0 || frames > MAX_FRAMES {
        return Err(invalid("The cache of a reader has 8 to 1048576 pages"));
    }
    let query = |e| Error::of(e, "query the descriptor");
    let stat = linux::fstat(fd).map_err(query)?;
    const ACCESS: i32 = 3;
    const WRITE_ONLY: i32 = 1;
    if linux::status_flags(fd).map_err(query)? & ACCESS == WRITE_ONLY {
        return Err(Error::new(Errno::ACCESS, "The descriptor is not open for reading"));
    }
    if stat.kind != FileKind::Regular {
        return Err(invalid("Readers are for regular files"));
    }
    let memory = device
        .replica_memory()
        .ok_or_else(|| Error::new(Errno::NOTSUP, format!("{} has no memory for the pages of a reader", device.id())))?;
    let file = files.open(linux::gettid(), fd)?;
    let words = Words::new(device, frames, page)?;
    let shared = words.device_addresses(device)?;
    // Tags, tickets, results and a lock for each set; the ticket counter has a line of its own, and so have the words of the stop.
    let control = (frames * 24 + frames / WAYS * 8 + 192).next_multiple_of(MIN_PAGE);
    let failed = |e| Error::device(e, "allocate the cache of a reader");
    let at = memory.alloc_replica(frames * page + control).map_err(failed)?;
    let tags = at.offset(frames * page);
    let started = zero(device, tags, control).and_then(|()| {
        let fillers = Arc::new(Fillers::new(file, page, frames, words));
        Fillers::start(&fillers).map(|()| fillers)
    });
    let fillers = match started {
        Ok(fillers) => fillers,
        Err(e) => {
            let _ = memory.free_replica(at);
            return Err(e);
        }
    };
    let words = &fillers.words;
    let tickets = tags.offset(frames * 8);
    let results = tickets.offset(frames * 8);
    let locks = results.offset(frames * 8);
    let tail = DeviceAddr((locks.0 + frames / WAYS * 8).next_multiple_of(64));
    let mut readers = lock(&READERS);
    readers.0 += 1;
    let id = readers.0;
    let handle = Handle {
        size: stat.size,
        timeout_ns: TIMEOUT_NS,
        id,
        frames: at.0,
        tags: tags.0,
        tickets: tickets.0,
        results: results.0,
        locks: locks.0,
        tail: tail.0,
        ring: shared.ring,
        done: shared.done,
        taken: shared.taken,
        staged: shared.staged,
        stop: shared.stop,
        page_shift: page.trailing_zeros(),
        sets: (frames / WAYS) as u32,
        entries: words.entries() as u32,
        prefetch: if sequential && frames >= 64 { PREFETCH } else { 0 },
    };
    readers.1.push(Reader { id, process: linux::getpid() as u32, device: memory, memory: at, fillers });
    Ok(handle)
}

/// Closes a reader: kernels that wait get an error. Returns when no kernel runs any more.
pub fn close(id: u64) -> Result<()> {
    let reader = {
        let mut readers = lock(&READERS);
        let at = find(&readers.1, id)?;
        readers.1.swap_remove(at)
    };
    reader.fillers.words.stop().store(1, Release);
    reader.fillers.join();
    // It waits for kernels, which do not wait any more.
    reader.device.free_replica(reader.memory).map_err(|e| Error::device(e, "free the cache of a reader"))
    // The words are freed with the fillers, after that.
}

/// The counters of a reader.
pub fn stats(id: u64) -> Result<ReaderStats> {
    let readers = lock(&READERS);
    find(&readers.1, id).map(|at| readers.1[at].fillers.stats())
}

fn find(readers: &[Reader], id: u64) -> Result<usize> {
    let process = linux::getpid() as u32;
    let at = readers.iter().position(|reader| reader.id == id && reader.process == process);
    at.ok_or_else(|| Error::new(Errno::BADF, "There is no such reader: it was closed, or is another process's"))
}

/// Stops the kernels that wait, for the end of the process: there the driver waits for kernels that run.
pub fn stop_all() {
    // A thread that is stopped in a call may hold the lock.
    if let Ok(readers) = READERS.try_lock() {
        // A child that was forked has the readers of its parent, not their memory.
        let process = linux::getpid() as u32;
        let own = readers.1.iter().filter(|reader| reader.process == process);
        own.for_each(|reader| reader.fillers.words.stop().store(1, Release));
    }
}

fn zero(device: &'static dyn Device, at: DeviceAddr, len: u64) -> Result<()> {
    let failed = |e| Error::device(e, "clear the tags of a reader");
    let zeros = vec![0_u8; len as usize];
    let stream = device.acquire_stream().map_err(failed)?;
    // SAFETY: the bytes stay until the wait has returned, and the memory was just allocated.
    let done = unsafe { device.copy_in(stream, at, zeros.as_ptr(), zeros.len()) }
        .and_then(|()| device.synchronize(stream, WaitMode::Block));
    device.release_stream(stream);
    done.map_err(failed)
}
