//! From operations to fragments: the file, the memory and the length of each, and the results that are already known.
//!
//! Most operations of a batch have the file and the allocation of the one before, so both are remembered; a million
//! operations are resolved in about ten milliseconds. Where many consecutive ones are alike, and each is one fragment,
//! threads share them (`spinio_host::parallel`):
//!
//! ```text
//!   operations   first | like it ........................ | another | like that ......
//!   fragments    slow path | by all threads, each into its slot | and so on
//! ```

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use spinio_device::{Allocation, Device, DeviceAddr, registry};
use spinio_plan::Reason;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use crate::ctx::BatchCtx;
use crate::device_sink::DeviceSink;
use crate::op_list::OpList;
use crate::pinned_gather::PinnedGather;
use crate::state::{Fragment, HOST_SINK, MAX_FRAGMENT, Source};
use spinio_device::Target;
use spinio_files::{FdIdentity, is_shadow};
use spinio_host::parallel::{self, UninitSlots};

/// Operations of this length and more are separate requests.
const LARGE_OP: u64 = 4 << 20;

/// The number of operations from which a gather kernel is worth having if it has to be compiled first.
const MIN_FOR_KERNEL: usize = 64;

/// How often threads are woken for operations that are alike: mixed ones are resolved by one thread.
const MAX_PARALLEL_PASSES: usize = 4;

/// How a descriptor can be read.
#[derive(Clone, Copy)]
enum FdKind {
    Refused(Errno),
    /// Only by reads one at a time.
    Single,
    /// An index into the sources.
    File(u16),
}

/// The destination of a range of addresses.
#[derive(Clone, Copy)]
pub(crate) struct DestRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) sink: u16,
    p2p: bool,
    pub(crate) allocation: Option<Allocation>,
    refused: Option<Errno>,
}

impl DestRange {
    #[inline(always)]
    fn contains(&self, address: u64, len: u64) -> bool {
        self.start <= address && address.checked_add(len).is_some_and(|end| end <= self.end)
    }
}

/// A fragment whose storage might DMA into its device: the first of its file and device.
pub(crate) struct P2pSample {
    pub(crate) source: u16,
    pub(crate) sink: u16,
    pub(crate) dest: Target,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Resolves the operations of a batch.
pub(crate) struct Resolver<'a> {
    ctx: &'a Arc<BatchCtx>,
    list: OpList,
    known: &'a [Allocation],
    fd_kinds: HashMap<Fd, FdKind>,
    last_fd: Option<(Fd, FdKind)>,
    /// Of devices, by their first byte.
    pub(crate) ranges: BTreeMap<u64, DestRange>,
    last_range: Option<DestRange>,
    pub(crate) sources: Vec<Source>,
    pub(crate) sinks: Vec<Arc<DeviceSink>>,
    pub(crate) fragments: Vec<Fragment>,
    /// Operations that are read one at a time.
    pub(crate) single_reads: Vec<u32>,
    pub(crate) samples: Vec<P2pSample>,
    pub(crate) pinned: PinnedGather,
    /// All fragments are of one file and one device.
    pub(crate) uniform: bool,
    /// Storage may DMA to some of the destinations.
    pub(crate) p2p: bool,
    /// Bytes of all fragments.
    pub(crate) bytes: u64,
    passes_left: usize,
}

impl<'a> Resolver<'a> {
    /// `known`: allocations that need not be looked up.
    /// `use_pinned`: whether pinned files are read out of their registered pages.
    pub(crate) fn new(ctx: &'a Arc<BatchCtx>, list: OpList, known: &'a [Allocation], use_pinned: bool) -> Resolver<'a> {
        Resolver {
            ctx,
            list,
            known,
            fd_kinds: HashMap::new(),
            last_fd: None,
            ranges: BTreeMap::new(),
            last_range: None,
            sources: Vec::new(),
            sinks: Vec::new(),
            fragments: Vec::new(),
            single_reads: Vec::new(),
            samples: Vec::new(),
            pinned: PinnedGather::new(use_pinned && !ctx.reader.pinned.is_empty()),
            uniform: true,
            p2p: false,
            bytes: 0,
            passes_left: MAX_PARALLEL_PASSES,
        }
    }

    /// Resolves every operation; empty and invalid ones have their results.
    pub(crate) fn resolve_all(&mut self) {
        let mut i = 0;
        while i < self.list.len() {
            let result = self.resolve_op(i).unwrap_or_else(|errno| -i64::from(errno.raw_os_error()));
            self.list.set(i, result);
            i += 1;
            if self.passes_left > 0 && self.list.len() - i >= parallel::SHARE_MIN && !self.pinned.is_enabled() {
                i = self.resolve_uniform(i);
            }
            if self.pinned.is_enabled() {
                i = self.pinned.run_fast(&self.list, i);
                if let Some(retry_from) = self.pinned.take_failure() {
                    i = retry_from;
                }
            }
        }
        if let Some(retry_from) = self.pinned.flush() {
            (retry_from..self.list.len()).for_each(|i| {
                let result = self.resolve_op(i).unwrap_or_else(|errno| -i64::from(errno.raw_os_error()));
                self.list.set(i, result);
            });
        }
    }

    /// Resolves operations from `i` on while they are like the last, by all threads; returns the first that is not.
    fn resolve_uniform(&mut self, i: usize) -> usize {
        let (Some((fd, FdKind::File(source))), Some(range)) = (self.last_fd, self.last_range) else { return i };
        // Destinations that storage may reach are resolved one by one.
        if range.allocation.is_none() || range.refused.is_some() || range.sink == HOST_SINK || range.p2p {
            return i;
        }
        let (DestRange { start, end, sink, .. }, size) = (range, self.sources[source as usize].size);
        let (ctx, list) = (self.ctx, self.list);
        let (n, first_odd, bytes) = (list.len() - i, AtomicUsize::new(list.len()), AtomicU64::new(0));
        self.passes_left -= 1;
        self.fragments.reserve(n);
        let slots = UninitSlots::spare_of(&mut self.fragments);
        parallel::share(
            || ctx.reader.files.workers().batch_readers(),
            crate::batch_readers::BatchReaders::max_readers(ctx.reader.files.workers().batch_threads()),
            n,
            |chunk| {
                let mut sum = 0;
                for at in parallel::chunk_range(chunk, n) {
                    let index = i + at;
                    let op = list.get(index);
                    let (offset, len, to) = (op.offset, op.len, op.address);
                    let uniform = op.fd == fd
                        && len.wrapping_sub(1) < MAX_FRAGMENT
                        && offset < size
                        && len <= size - offset
                        && offset % MAX_FRAGMENT + len <= MAX_FRAGMENT
                        && start <= to
                        && to < end
                        && len <= end - to;
                    if !uniform {
                        first_odd.fetch_min(index, Relaxed);
                    }
                    // Later ones are resolved again.
                    if !uniform || (at % 1024 == 0 && first_odd.load(Relaxed) < index) {
                        break;
                    }
                    let fragment = Fragment {
                        op: index as u32,
                        source,
                        sink,
                        len: len as u32,
                        p2p: false,
                        offset_in_op: 0,
                        offset,
                        dest: to,
                    };
                    // SAFETY: each slot belongs to one chunk, and each chunk to one thread; the fragments are not used
                    // meanwhile.
                    unsafe { slots.write(at, fragment) };
                    list.set(index, len as i64);
                    sum += len;
                }
                bytes.fetch_add(sum, Relaxed);
            },
        );
        let next = first_odd.into_inner();
        if next > i {
            // SAFETY: there is space for them, and every chunk has filled its slots up to the first odd operation: a
            // chunk stops only there, or after it.
            unsafe { self.fragments.set_len(self.fragments.len() + next - i) };
            self.update_uniform(source, sink);
            let all = next == list.len();
            let sum = |from: usize| self.fragments[from..].iter().map(|i| u64::from(i.len)).sum();
            self.bytes += if all { bytes.into_inner() } else { sum(self.fragments.len() - (next - i)) };
        }
        next
    }

    /// Whether a fragment is of the file and device of the others.
    #[inline(always)]
    fn update_uniform(&mut self, source: u16, sink: u16) {
        self.uniform &= self.fragments.first().is_none_or(|i| (i.source, i.sink) == (source, sink));
    }

    fn resolve_op(&mut self, i: usize) -> Result<i64, Errno> {
        let op = self.list.get(i);
        let kind = match self.last_fd {
            Some((fd, kind)) if fd == op.fd => kind,
            _ => self.fd_kind(op.fd),
        };
        let source = match kind {
            FdKind::Refused(errno) => return Err(errno),
            FdKind::Single => {
                self.single_reads.push(i as u32);
                return Ok(0);
            }
            FdKind::File(source) => source,
        };
        if op.offset > i64::MAX as u64 || op.len > i64::MAX as u64 {
            return Err(Errno::INVAL);
        }
        let within = op.len.min(self.sources[source as usize].size.saturating_sub(op.offset));
        if within == 0 {
            return Ok(0);
        }
        let range = self.dest_range(op.address, within);
        if let Some(errno) = range.refused {
            return Err(errno);
        }
        // A buffer that ends early takes as much as fits, as with a single read.
        let len = within.min(range.end - op.address);
        let (sink, p2p) = (range.sink, range.p2p);
        if self.pinned.is_enabled() && sink != HOST_SINK {
            let (from, to) = (&self.sources[source as usize], &self.sinks[sink as usize]);
            let range = (range.start, range.end);
            if self.pinned.try_add(self.ctx, (source, from), (sink, to), range, i, op.offset, op.address, len) {
                return Ok(len as i64);
            }
        }
        if p2p {
            self.add_p2p_sample(source, &range, op.offset, op.address, len);
        }
        if len >= LARGE_OP && sink != HOST_SINK {
            self.single_reads.push(i as u32);
            return Ok(0);
        }
        if self.fragments.is_empty() {
            self.fragments.reserve(self.list.len() - i);
        }
        self.update_uniform(source, sink);
        self.p2p |= p2p;
        self.bytes += len;
        let mut done = 0;
        while done < len {
            let offset = op.offset + done;
            // Split at multiples in the file, so that parts are whole units of direct I/O.
            let part = (len - done).min((offset / MAX_FRAGMENT + 1) * MAX_FRAGMENT - offset);
            let to = op.address + done;
            self.fragments.push(Fragment {
                op: i as u32,
                source,
                sink,
                len: part as u32,
                p2p,
                offset_in_op: done,
                offset,
                dest: to,
            });
            done += part;
        }
        Ok(len as i64)
    }

    /// Remembers the first aligned operation of a file into a device that storage may reach.
    fn add_p2p_sample(&mut self, source: u16, range: &DestRange, offset: u64, address: u64, len: u64) {
        let align = self.sources[source as usize].file.direct_align;
        let unit = u64::from(align.offset.max(align.memory)).max(512);
        let known = self.samples.iter().any(|s| (s.source, s.sink) == (source, range.sink));
        if let Some(allocation) = range.allocation.filter(|_| !known && (offset | address | len).is_multiple_of(unit)) {
            let to = Target { allocation, addr: DeviceAddr(address) };
            self.samples.push(P2pSample { source, sink: range.sink, dest: to, offset, len });
        }
    }

    fn fd_kind(&mut self, fd: Fd) -> FdKind {
        let known = self.fd_kinds.get(&fd).copied();
        let kind = known.unwrap_or_else(|| {
            let found = self.open_source(fd).unwrap_or_else(FdKind::Refused);
            self.fd_kinds.insert(fd, found);
            found
        });
        self.last_fd = Some((fd, kind));
        kind
    }

    fn open_source(&mut self, fd: Fd) -> Result<FdKind, Errno> {
        // Programs make batches, and may not name files of SPIN's.
        if is_shadow(fd) {
            return Err(Errno::BADF);
        }
        let kernel = self.ctx.reader.files.sys();
        let number = FdIdentity::of(fd);
        let stat = kernel.fstat(fd)?;
        let flags = kernel.status_flags(fd)? as u32;
        let unreadable = flags & linux::O_ACCMODE == linux::O_WRONLY || flags & linux::O_PATH != 0;
        // The Linux kernel decides the result of these reads; also for files whose size is not known.
        let empty_file = stat.kind == FileKind::Regular && stat.size == 0;
        if unreadable || empty_file || stat.kind == FileKind::Other || flags & linux::O_DIRECT != 0 {
            return Ok(FdKind::Single);
        }
        let file = self.ctx.reader.files.shadow_workers().ok_or(Reason::NoWorkers);
        let Ok(file) = file.and_then(|_| self.ctx.reader.files.get(fd, stat)) else {
            return Ok(FdKind::Single);
        };
        let Ok(which) = u16::try_from(self.sources.len()) else { return Ok(FdKind::Single) };
        let size = if stat.kind == FileKind::Regular { stat.size } else { file.size };
        self.sources.push(Source { fd, number, file, size });
        Ok(FdKind::File(which))
    }

    /// The destination of an address.
    #[inline]
    fn dest_range(&mut self, address: u64, len: u64) -> DestRange {
        match &self.last_range {
            Some(range) if range.contains(address, len) => *range,
            _ => self.dest_range_slow(address, len),
        }
    }

    #[cold]
    fn dest_range_slow(&mut self, address: u64, len: u64) -> DestRange {
        let known = self.ranges.range(..=address).next_back().map(|(_, place)| *place);
        let place = match known.filter(|place| place.contains(address, len)) {
            Some(place) => place,
            None => {
                let place = self.find_range(address, len);
                if place.allocation.is_some() {
                    self.ranges.insert(place.start, place);
                }
                place
            }
        };
        self.last_range = Some(place);
        place
    }

    fn find_range(&mut self, address: u64, len: u64) -> DestRange {
        let inside = |a: &&Allocation| a.start.0 <= address && address < a.start.0 + a.len;
        let want = usize::try_from(len).unwrap_or(usize::MAX);
        let known = self.known.iter().find(inside).copied();
        let found = known.or_else(|| registry::find_or_query(address as *const u8, want));
        let Some(allocation) = found else {
            // Host memory, which the Linux kernel validates.
            let end = address.saturating_add(want as u64);
            return DestRange { start: address, end, sink: HOST_SINK, p2p: false, allocation: None, refused: None };
        };
        let (start, end) = (allocation.start.0, allocation.start.0 + allocation.len);
        let p2p = allocation.p2p_mapped;
        let place = DestRange { start, end, sink: HOST_SINK, p2p, allocation: Some(allocation), refused: None };
        match self.sink_for(allocation.device) {
            Ok(outlet) => DestRange { sink: outlet, ..place },
            Err(errno) => DestRange { refused: Some(errno), ..place },
        }
    }

    fn sink_for(&mut self, device: &'static dyn Device) -> Result<u16, Errno> {
        if let Some(at) = self.sinks.iter().position(|o| core::ptr::addr_eq(o.device, device)) {
            return Ok(at as u16);
        }
        let which = u16::try_from(self.sinks.len()).map_err(|_| Errno::NOMEM)?;
        let use_kernel = self.list.len() >= MIN_FOR_KERNEL || device.is_gather_ready();
        let gathers = use_kernel
            && device.capabilities().can_gather
            && device.load_gather_kernel(&self.ctx.kernel_cache()).is_ok();
        let sink = DeviceSink::new(self.ctx, device, gathers);
        let error = |e| spinio_transfer::Error::device(e, "read", 0, 0).kind.errno();
        self.sinks.push(Arc::new(sink.map_err(error)?));
        Ok(which)
    }

    /// Where an operation is read to by a single read.
    pub(crate) fn op_target(&mut self, i: usize) -> Option<Target> {
        let op = self.list.get(i);
        let allocation = self.dest_range(op.address, op.len.max(1)).allocation?;
        Some(Target { allocation, addr: DeviceAddr(op.address) })
    }
}
