//! Operations on pinned files: a GPU kernel gathers them straight out of the registered pages.
//!
//! ```text
//!   operation i ── same file, same allocation as the last, inside one chunk? ── yes ──> an entry of the list: 5 ns
//!             └─ no ──> the slow path: which file, which memory, split where a chunk ends
//!
//!   list [from, to, len] [from, to, len] ...   32768 entries, then a launch; the next are written meanwhile
//! ```
//!
//! This is all that the processor does for such an operation: it never reads the bytes.
//!
//! The result is valid if the file was still pinned when all bytes had arrived; otherwise the whole batch is read
//! again, on other routes.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::sync::Arc;
use std::time::Instant;

use spinio_sys::linux::Fd;

use crate::ctx::BatchCtx;
use crate::device_sink::{DeviceSink, PackBuffer, SinkWriter};
use crate::op_list::OpList;
use crate::state::Source;
use spinio_io::PinGuard;
use spinio_transfer::bounce::Policy;

/// Entries per launch.
const MAX_ENTRIES: usize = 32 << 10;

/// The most bytes of an entry: a longer one keeps one warp busy while the others are idle.
const MAX_ENTRY: u64 = 64 << 10;

/// What the next operation probably has in common with the last one.
struct FastPath {
    fd: Fd,
    size: u64,
    /// The allocation.
    start: u64,
    end: u64,
    /// The device address of each chunk of the file, and the length of a chunk: a power of two.
    device_ptrs: *const u64,
    shift: u32,
}

/// A pinned file, on a device.
struct PinnedSource {
    source: u16,
    sink: u16,
    fd: Fd,
    /// `None`: it is not pinned.
    guard: Option<PinGuard>,
    bytes: u64,
}

/// A device that operations are gathered into.
struct OpenList {
    sink: u16,
    writer: SinkWriter,
    buffer: Option<PackBuffer>,
    entries: usize,
    /// The first operation in the list.
    first_op: usize,
}

/// The operations of a batch on pinned files.
pub(crate) struct PinnedGather {
    enabled: bool,
    /// Declared before the sources: if this is dropped by a panic, the device must be done before the pages are
    /// unpinned.
    lists: Vec<OpenList>,
    sources: Vec<PinnedSource>,
    fast_path: Option<(FastPath, usize, usize)>,
    failed_at: Option<usize>,
    pub(crate) started: Instant,
}

// SAFETY: the pointer is into `device_ptrs` of a `PinGuard` of `sources`, which stays as long.
unsafe impl Send for PinnedGather {}

impl PinnedGather {
    pub(crate) fn new(on: bool) -> PinnedGather {
        PinnedGather {
            enabled: on,
            lists: Vec::new(),
            sources: Vec::new(),
            fast_path: None,
            failed_at: None,
            started: Instant::now(),
        }
    }

    /// Whether a file might be pinned.
    #[inline(always)]
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Takes operations from `i` on while they are like the last; returns the first that is not.
    pub(crate) fn run_fast(&mut self, list: &OpList, mut i: usize) -> usize {
        let Some((fast, at, source)) = &self.fast_path else { return i };
        let (mask, shift) = ((1u64 << fast.shift) - 1, fast.shift);
        let mut bytes = 0;
        let n = list.len();
        while i < n {
            let open = &mut self.lists[*at];
            let Some(buffer) = &mut open.buffer else { break };
            // As many as the list has space for.
            let end = n.min(i + MAX_ENTRIES - open.entries);
            let before = i;
            while i < end {
                let op = list.get(i);
                let matches = op.fd == fast.fd
                    && op.len.wrapping_sub(1) < MAX_ENTRY
                    && op.offset < fast.size
                    && op.len <= fast.size - op.offset
                    && (op.offset & mask) + op.len <= mask + 1
                    && op.address >= fast.start
                    && op.address < fast.end
                    && op.len <= fast.end - op.address;
                if !matches {
                    break;
                }
                // SAFETY: the offset is in the file, which `device_ptrs` covers; it stays with the source's `PinGuard`.
                let view = unsafe { *fast.device_ptrs.add((op.offset >> shift) as usize) };
                buffer.push_entry(view + (op.offset & mask), op.address, op.len);
                list.set(i, op.len as i64);
                bytes += op.len;
                i += 1;
            }
            open.entries += i - before;
            if open.entries < MAX_ENTRIES {
                break;
            }
            let first_op = open.first_op;
            let sent = open.send().map_err(|()| first_op);
            if let Err(from) = sent.and_then(|()| next_list(&mut self.lists, *at, i)) {
                self.failed_at = Some(from);
                break;
            }
        }
        self.sources[*source].bytes += bytes;
        i
    }

    /// A launch failed: the first operation that has to be read again. From then on nothing is gathered.
    pub(crate) fn take_failure(&mut self) -> Option<usize> {
        let retry_from = self.failed_at.take()?;
        self.enabled = false;
        self.fast_path = None;
        Some(retry_from)
    }

    /// Takes one operation, if its file is pinned on its device.
    #[expect(clippy::too_many_arguments, reason = "one operation, resolved")]
    pub(crate) fn try_add(
        &mut self,
        ctx: &Arc<BatchCtx>,
        (source, from): (u16, &Source),
        (outlet, to): (u16, &Arc<DeviceSink>),
        (start, end): (u64, u64),
        i: usize,
        offset: u64,
        address: u64,
        len: u64,
    ) -> bool {
        self.fast_path = None;
        if !to.gathers() {
            return false;
        }
        let source_index = match self.sources.iter().position(|l| (l.source, l.sink) == (source, outlet)) {
            Some(lane) => lane,
            None => {
                let using = ctx.reader.pinned.acquire(from.fd, from.file.key(), to.device);
                let using = using.filter(|u| u.size() == from.size && !u.pages.device_ptrs.is_empty());
                self.sources.push(PinnedSource { source, sink: outlet, fd: from.fd, guard: using, bytes: 0 });
                self.sources.len() - 1
            }
        };
        let Some(using) = &self.sources[source_index].guard else { return false };
        let on = Arc::clone(&using.pages);
        let open = match self.lists.iter().position(|o| o.sink == outlet) {
            Some(open) => open,
            None => {
                self.lists.push(OpenList {
                    sink: outlet,
                    writer: SinkWriter::new(to),
                    buffer: None,
                    entries: 0,
                    first_op: i,
                });
                self.lists.len() - 1
            }
        };
        let mut done = 0;
        while done < len {
            let list = &mut self.lists[open];
            let mut ready = Ok(());
            if list.entries == MAX_ENTRIES {
                ready = list.send().map_err(|()| list.first_op.min(i));
            }
            if ready.is_ok() && list.buffer.is_none() {
                ready = next_list(&mut self.lists, open, i);
            }
            if let Err(from) = ready {
                self.failed_at = Some(from);
                return true;
            }
            let list = &mut self.lists[open];
            let at = offset + done;
            let within = at % on.chunk;
            let part = (on.chunk - within).min(len - done).min(MAX_ENTRY);
            if let Some(buffer) = &mut list.buffer {
                buffer.push_entry(on.device_ptrs[(at / on.chunk) as usize] + within, address + done, part);
            }
            list.entries += 1;
            done += part;
        }
        self.sources[source_index].bytes += len;
        let (fd, size, shift) = (from.fd, from.size, on.chunk.ilog2());
        self.fast_path =
            Some((FastPath { fd, size, start, end, device_ptrs: on.device_ptrs.as_ptr(), shift }, open, source_index));
        true
    }

    /// Sends the rest of the list; the first operation that has to be read again, if that fails.
    pub(crate) fn flush(&mut self) -> Option<usize> {
        let mut retry_from = self.take_failure();
        for open in &mut self.lists {
            if open.send().is_err() {
                retry_from = Some(retry_from.map_or(open.first_op, |i| i.min(open.first_op)));
            }
        }
        self.fast_path = None;
        self.enabled &= retry_from.is_none();
        retry_from
    }

    /// Waits until all bytes have arrived; whether every file was pinned until then. Records the bytes of each file.
    pub(crate) fn finish(self, ctx: &Arc<BatchCtx>, report: impl Fn(u64)) -> bool {
        self.lists.into_iter().for_each(|open| open.writer.finish());
        self.sources.iter().all(|source| {
            report(source.bytes);
            source
                .guard
                .as_ref()
                .is_none_or(|using| source.bytes == 0 || using.is_still_valid(&ctx.reader.files, source.fd))
        })
    }
}

impl OpenList {
    fn send(&mut self) -> Result<(), ()> {
        self.entries = 0;
        self.buffer.take().map_or(Ok(()), |page| self.writer.send(page).map_err(drop))
    }
}

/// Gives the list at `at` an empty buffer; its first operation will be `i`. If that fails: the first operation that has
/// to be read again.
fn next_list(lists: &mut [OpenList], at: usize, i: usize) -> Result<(), usize> {
    let sink = Arc::clone(&lists[at].writer.sink);
    let block = match sink.staging.try_acquire(Policy::WithinLimit) {
        Ok(Some(block)) => block,
        // A thread that waits for a buffer must not have any that other threads wait for.
        Ok(None) => {
            let unsent = lists.iter_mut().filter_map(|list| list.send().is_err().then_some(list.first_op));
            if let Some(first) = unsent.min() {
                return Err(first.min(i));
            }
            sink.staging.acquire().map_err(|_| i)?
        }
        Err(_) => return Err(i),
    };
    let page = PackBuffer::new(&sink, block);
    // A list must be in memory that a GPU kernel can read.
    if !page.gathers() {
        sink.staging.release(page.into_block());
        return Err(i);
    }
    (lists[at].first_op, lists[at].buffer) = (i, Some(page));
    Ok(())
}
