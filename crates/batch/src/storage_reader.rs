//! Fragments that are not in the page cache: many reads of storage in flight.
//!
//! ```text
//!   fragments ──coalesce──> reads of whole units, each serving one or several fragments
//!                       │ packed into groups: the contents of one bounce buffer
//!   caller ── buffer ──>│
//!                    shadow worker: a ring with up to 128 reads in flight, O_DIRECT through the shadow descriptor
//!   caller <── filled ──┘
//!      └─ launch: each fragment to its destination
//! ```
//!
//! If storage may DMA into the device, an aligned read is made there directly (`p2p`), and needs no buffer.
//!
//! The first buffer is read into as soon as it is available, while the pool grows for the next. From then on no more
//! buffers are in use than keep the ring full, and the most recently used ones are taken first: storage writes faster
//! into memory that is in the processor's cache. Seen (virtio disk, 32 MiB of cache, 10000 reads of 64 KiB at this
//! depth): 122 to 126 ms through 8 to 14 MiB of memory in turn, 132 through 20, 154 through 32 and more.
//!
//! If the Linux kernel offers no ring, several shadow workers read one after another. A read that is short or fails is
//! repeated through the page cache, and then has the result of a plain `pread`.
//!
//! Known flaws:
//! - In a batch that is cached in part, storage reads begin when the caller has registered what is worth it: 20 ms per
//!   GiB.
//! - One ring is one thread, which submits about a million reads a second at most.
//! - If a seccomp filter is installed while reads are in flight and forbids waiting for them
//!   (`sys/src/linux/uring.rs`), their buffers are lost, 32 MiB at most and once in a process's life. P2P reads in
//!   flight may still write when the batch returns: the same bytes again, unless the program uses that memory for
//!   something else at once.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spinio_plan::{CoalesceRule, Reason, Route, Span, coalesce};
use spinio_sys::Errno;
use spinio_sys::linux::Ring;

use crate::batch_readers::BatchReaders;
use crate::device_sink::{ENTRY_SIZE, PackBuffer, SinkWriter};
use crate::state::{BatchState, Fragment, MAX_FRAGMENT};
use spinio_host::is_cancelled;
use spinio_host::lock;
use spinio_host::panic_relay::PanicRelay;
use spinio_host::pool::SHADOW_WORKERS;
use spinio_host::pool::Task;
use spinio_host::shares::{MIXED, NO_SERVER, ShareKey};
use spinio_host::task_scope::TaskScope;
use spinio_transfer::bounce::{BUFFER_SIZE, Policy};

/// Reads in flight.
pub(crate) const DEPTH: u32 = 128;

/// The most reads of one group: all of them complete before any is sent on.
const GROUP_MAX_READS: usize = 64;

/// Bytes that are enough for a group of at least `GROUP_MIN_READS` reads: later reads can reuse its buffer.
const GROUP_BYTES: u64 = 1 << 20;
const GROUP_MIN_READS: usize = 16;

/// The most groups in flight.
const MAX_GROUPS: usize = 16;

/// Groups that are ready when the ring is full: it takes one while the caller sends another.
const READY_GROUPS: usize = 2;

/// How long a shadow worker without work waits for the next load.
const IDLE_WAIT: Duration = Duration::from_millis(1);

/// How often a caller that launches for readers looks whether its file system's share has room.
const LENDING_POLL: Duration = Duration::from_micros(50);

/// The most bytes between two fragments that are read too: about the cost of a command to a fast disk.
const MERGE_GAP: u64 = 4096;

/// One read from storage.
struct DiskRead {
    source: u16,
    offset: u64,
    len: u32,
    /// Destination: offset in the group's buffer, or for P2P the address itself.
    dest: u64,
    /// Its fragments: indices into [`StorageReader::wanted`].
    members: Range<usize>,
}

/// Reads that are submitted together.
struct ReadGroup {
    sink: u16,
    reads: Range<usize>,
    /// Bytes of a buffer; 0: straight into the device.
    buffer_len: usize,
}

/// A group that a shadow worker reads.
struct GroupInFlight {
    group: usize,
    base: u64,
    /// Bytes read, for each read.
    got: Vec<u32>,
    /// Storage may still write its buffer.
    dma_unresolved: bool,
    started: Instant,
}

#[derive(Default)]
struct State {
    ready: VecDeque<GroupInFlight>,
    completed: VecDeque<GroupInFlight>,
    /// Shadow workers that were woken and have not left.
    workers: usize,
    /// The caller is submitting the first groups, as many as fill a ring.
    filling: bool,
    closed: bool,
}

/// Fragments to be read from storage.
pub(crate) struct StorageReader {
    work: Arc<BatchState>,
    fragments: Vec<Fragment>,
    wanted: Vec<Span>,
    reads: Vec<DiskRead>,
    groups: Vec<ReadGroup>,
    state: Mutex<State>,
    changed: Condvar,
    scope: TaskScope,
    /// The share of the shadow workers that it takes.
    share: ShareKey,
}

impl StorageReader {
    /// Coalesces and packs. Fragments of one file and device are consecutive.
    pub(crate) fn new(work: &Arc<BatchState>, items: Vec<Fragment>) -> Arc<StorageReader> {
        let mut packer =
            GroupPacker { work, wanted: Vec::with_capacity(items.len()), reads: Vec::new(), groups: Vec::new() };
        let mut tag = 0;
        let mut share = NO_SERVER;
        for some in items.chunk_by(|a, b| (a.source, a.sink) == (b.source, b.sink)) {
            let key = work.sources[some[0].source as usize].file.storage;
            // Each combination of file systems has its share.
            share = if share == NO_SERVER || share == key { key } else { share | key | MIXED };
            let (mut staged, mut p2p) = (Vec::new(), Vec::new());
            for item in some {
                let span = Span { offset: item.offset, len: u64::from(item.len), tag };
                if packer.can_p2p(item) {
                    p2p.push(span)
                } else {
                    staged.push(span)
                }
                tag += 1;
            }
            let group = (some[0].source, some[0].sink);
            packer.pack_staged(group, &mut staged);
            packer.add_p2p(group, &items, p2p);
        }
        let GroupPacker { wanted, reads, groups, .. } = packer;
        Arc::new(StorageReader {
            work: Arc::clone(work),
            fragments: items,
            wanted,
            reads,
            groups,
            state: Mutex::default(),
            changed: Condvar::new(),
            scope: TaskScope::new(),
            share,
        })
    }

    /// Wakes a shadow worker, or several if there is no ring, unless they are already at work.
    fn wake_workers(self: &Arc<Self>) {
        let count = if self.work.ctx.reader.files.workers().io_uring_denied.load(Relaxed) { SHADOW_WORKERS } else { 1 };
        let mut state = lock(&self.state);
        let more = count.min(state.ready.len()).saturating_sub(state.workers);
        state.workers += more;
        drop(state);
        if more > 0
            && let Some(shadow) = self.work.ctx.reader.files.shadow_workers()
        {
            shadow.for_key(self.share).submit(Arc::clone(self) as Arc<dyn Task>, more);
        }
    }

    /// Supplies buffers and sends completed ones, until all is done; returns the fragments that storage could not
    /// deliver. `readers`: readers that may have buffers of the pool meanwhile.
    pub(crate) fn finish(self: &Arc<Self>, readers: Option<&BatchReaders>) -> Vec<Fragment> {
        let mut buffers: Vec<Option<PackBuffer>> = self.groups.iter().map(|_| None).collect();
        let mut relay = PanicRelay::default();
        let fallback = relay.catch(|| self.transfer(&mut buffers, readers));
        let not_begun = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        self.changed.notify_all();
        // After a panic too: storage writes no memory of the program from here on.
        relay.catch(|| self.scope.join());
        // Only after a panic of the batch. A read of a shadow worker may still write if that worker panicked itself.
        let completed = std::mem::take(&mut lock(&self.state).completed);
        for in_hand in not_begun.into_iter().chain(completed).filter(|in_hand| !in_hand.dma_unresolved) {
            if let Some(buffer) = self.take_buffer(&mut buffers, in_hand.group) {
                self.work.sinks[self.groups[in_hand.group].sink as usize].staging.release(buffer.into_block());
            }
        }
        for group in 0..buffers.len() {
            if let Some(buffer) = self.take_buffer(&mut buffers, group) {
                self.work.sinks[self.groups[group].sink as usize].staging.quarantine(buffer.into_block());
            }
        }
        relay.resume();
        fallback.unwrap_or_default()
    }

    /// The caller's part; `buffers` has those in flight.
    fn transfer(self: &Arc<Self>, buffers: &mut [Option<PackBuffer>], readers: Option<&BatchReaders>) -> Vec<Fragment> {
        let mut writers: Vec<Option<SinkWriter>> = self.work.sinks.iter().map(|_| None).collect();
        let mut fallback = Vec::new();
        let (mut next, mut in_flight, mut reads) = (0, 0, 0);
        lock(&self.state).filling = true;
        while next < self.groups.len() || in_flight > 0 {
            if next < self.groups.len() && self.is_cancelled() {
                self.cancel_from(next);
                next = self.groups.len();
            }
            let mut out_of_buffers = false;
            while next < self.groups.len() && in_flight < MAX_GROUPS && (reads < DEPTH as usize || self.needs_groups())
            {
                match self.acquire_buffer(next, in_flight, readers) {
                    Ok(Some(buffer)) => buffers[next] = buffer,
                    Ok(None) => {
                        out_of_buffers = true;
                        break;
                    }
                    Err(()) => {
                        self.fall_back(next, &mut fallback);
                        next += 1;
                        continue;
                    }
                }
                let base = buffers[next].as_ref().map_or(0, |p| p.ptr() as u64);
                let got = vec![0; self.groups[next].reads.len()];
                lock(&self.state).ready.push_back(GroupInFlight {
                    group: next,
                    base,
                    got,
                    dma_unresolved: false,
                    started: Instant::now(),
                });
                self.changed.notify_all();
                // At once: the first groups are read while the pool grows for the next.
                self.wake_workers();
                reads += self.groups[next].reads.len();
                next += 1;
                in_flight += 1;
            }
            self.finish_filling();
            if in_flight == 0 {
                continue;
            }
            self.wake_workers();
            let more = next < self.groups.len() && in_flight < MAX_GROUPS && !out_of_buffers;
            let Some(group) = self.next_completed(more) else {
                if self.scope.is_poisoned() {
                    // The groups of a worker that panicked never complete.
                    break;
                }
                continue;
            };
            in_flight -= 1;
            reads -= group.got.len();
            let buffer = self.take_buffer(buffers, group.group);
            self.deliver(group, buffer, &mut writers, &mut fallback);
        }
        writers.into_iter().flatten().for_each(SinkWriter::finish);
        fallback
    }

    /// Whether the batch is to end early. The poll may read too, and must find buffers that this batch does not have.
    fn is_cancelled(&self) -> bool {
        let enough = self.work.ctx.reader.bounce.limit() >= 2 * (MAX_GROUPS * BUFFER_SIZE) as u64;
        enough && self.work.sinks.iter().all(|sink| sink.staging.can_lend(self.share)) && is_cancelled()
    }

    /// Groups from this one on are not begun.
    fn cancel_from(&self, from: usize) {
        let reads = self.groups[from..].iter().flat_map(|group| &self.reads[group.reads.clone()]);
        for item in reads.flat_map(|read| self.fragments_of(read)) {
            self.work.record_short(item, 0, Some(Errno::INTR));
        }
    }

    /// A buffer for a group: `Ok(None)`: not at the moment. The inner `None`: it needs none.
    fn acquire_buffer(
        &self,
        group: usize,
        in_flight: usize,
        readers: Option<&BatchReaders>,
    ) -> Result<Option<Option<PackBuffer>>, ()> {
        let group = &self.groups[group];
        if group.buffer_len == 0 {
            return Ok(Some(None));
        }
        let sink = &self.work.sinks[group.sink as usize];
        let staging = &sink.staging;
        // The server may never answer: others must find buffers then.
        if !staging.begin_lending(self.share, false) {
            if in_flight > 0 {
                return Ok(None);
            }
            match readers {
                // Perhaps no other thread sends the buffers that they have filled, for which other batches wait.
                Some(readers) => {
                    while !staging.begin_lending(self.share, false) {
                        readers.pump();
                        std::thread::sleep(LENDING_POLL);
                    }
                }
                None => drop(staging.begin_lending(self.share, true)),
            }
        }
        let block = match staging.try_acquire(Policy::WithinLimit) {
            Ok(None) if in_flight == 0 => match readers {
                Some(readers) if readers.uses_sink(group.sink) => readers.acquire_block().map(Some),
                Some(readers) => readers.acquire_other(staging).map(Some),
                None => staging.acquire().map(Some),
            },
            other => other,
        };
        if !matches!(block, Ok(Some(_))) {
            staging.end_lending(self.share, 1);
        }
        match block {
            Ok(Some(block)) => {
                let mut buffer = PackBuffer::new(sink, block);
                buffer.reserve(group.buffer_len);
                Ok(Some(Some(buffer)))
            }
            Ok(None) => Ok(None),
            Err(_) => Err(()),
        }
    }

    /// A buffer in flight comes back: it is this batch's alone from here on.
    fn take_buffer(&self, buffers: &mut [Option<PackBuffer>], group: usize) -> Option<PackBuffer> {
        let buffer = buffers[group].take()?;
        self.work.sinks[self.groups[group].sink as usize].staging.end_lending(self.share, 1);
        Some(buffer)
    }

    /// Groups that are ready while there are more.
    fn queue_ahead(&self) -> usize {
        // Without a ring each group keeps a shadow worker busy.
        if self.work.ctx.reader.files.workers().io_uring_denied.load(Relaxed) { MAX_GROUPS } else { READY_GROUPS }
    }

    /// Shadow workers need not wait for a group before they check for completions.
    fn finish_filling(&self) {
        if std::mem::take(&mut lock(&self.state).filling) {
            self.changed.notify_all();
        }
    }

    /// Whether shadow workers could soon be without a group.
    fn needs_groups(&self) -> bool {
        lock(&self.state).ready.len() < self.queue_ahead()
    }

    /// A completed group; waits for one, and with `more` only until a group is ready.
    fn next_completed(&self, more: bool) -> Option<GroupInFlight> {
        let state = lock(&self.state);
        // The time limit lets the caller check whether there is a ring, and whether there are shadow workers.
        let limit = Duration::from_millis(5);
        let waiting = |s: &mut State| s.completed.is_empty() && !(more && s.ready.is_empty());
        let (mut state, _) =
            self.changed.wait_timeout_while(state, limit, waiting).unwrap_or_else(PoisonError::into_inner);
        state.completed.pop_front()
    }

    fn fragments_of(&self, read: &DiskRead) -> impl Iterator<Item = &Fragment> {
        self.wanted[read.members.clone()].iter().map(|w| &self.fragments[w.tag as usize])
    }

    fn fall_back(&self, group: usize, fallback: &mut Vec<Fragment>) {
        for read in &self.reads[self.groups[group].reads.clone()] {
            fallback.extend(self.fragments_of(read).copied());
        }
    }

    fn deliver(
        &self,
        group: GroupInFlight,
        buffer: Option<PackBuffer>,
        writers: &mut [Option<SinkWriter>],
        fallback: &mut Vec<Fragment>,
    ) {
        let read_group = &self.groups[group.group];
        let stats = self.work.ctx.reader.files.stats();
        let reads = self.reads[read_group.reads.clone()].iter().zip(&group.got);
        let Some(mut page) = buffer else {
            for (read, &got) in reads {
                if got == read.len {
                    let bytes = u64::from(got);
                    stats.record_piece(&self.work.span, Route::P2p, Reason::Absent, 0, bytes, group.started);
                } else {
                    fallback.extend(self.fragments_of(read).copied());
                }
            }
            return;
        };
        let sink = &self.work.sinks[read_group.sink as usize];
        if group.dma_unresolved {
            sink.staging.quarantine(page.into_block());
            return self.fall_back(group.group, fallback);
        }
        let mut bytes = 0;
        for (read, &got) in reads {
            for item in self.fragments_of(read) {
                let skip = item.offset - read.offset;
                if skip + u64::from(item.len) <= u64::from(got) {
                    page.push_within((read.dest + skip) as usize, item.len as usize, item.dest);
                    bytes += u64::from(item.len);
                } else {
                    fallback.push(*item);
                }
            }
        }
        let writer = writers[read_group.sink as usize].get_or_insert_with(|| SinkWriter::new(sink));
        match writer.send(page) {
            Ok(()) => stats.record_piece(&self.work.span, Route::Direct, Reason::Absent, 0, bytes, group.started),
            Err(_) => self.fall_back(group.group, fallback),
        }
    }

    /// A group to read, if there is one. `idle`: the worker has nothing else to do; it waits briefly, and leaves
    /// without one. It must not wait forever: the caller may wait for buffers of another batch, and that batch for
    /// shadow workers.
    fn take_group(&self, idle: bool) -> Option<GroupInFlight> {
        let mut state = lock(&self.state);
        if idle {
            state = self.wait_briefly(state, |_| true);
        }
        let next = self.pop_ready(&mut state);
        if idle && next.is_none() {
            // Under the lock, so that a thread that adds a group from now on wakes it again.
            state.workers -= 1;
        }
        next
    }

    /// One of the first loads, if there is or soon will be one.
    fn take_while_filling(&self) -> Option<GroupInFlight> {
        self.pop_ready(&mut self.wait_briefly(lock(&self.state), |state| state.filling))
    }

    fn wait_briefly<'a>(&self, state: MutexGuard<'a, State>, while_: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        let must_wait = |s: &mut State| s.ready.is_empty() && !s.closed && while_(s);
        self.changed.wait_timeout_while(state, IDLE_WAIT, must_wait).unwrap_or_else(PoisonError::into_inner).0
    }

    fn pop_ready(&self, state: &mut State) -> Option<GroupInFlight> {
        let next = state.ready.pop_front()?;
        if state.ready.is_empty() {
            // The caller has to prepare others, even if nothing completes.
            self.changed.notify_all();
        }
        Some(next)
    }

    fn complete_group(&self, in_hand: GroupInFlight) {
        lock(&self.state).completed.push_back(in_hand);
        self.changed.notify_all();
    }

    /// A load for the ring.
    fn next_for_ring(&self, ring: &mut Ring) -> Option<GroupInFlight> {
        let next = self.take_group(ring.outstanding() == 0);
        // The first ones are in flight while the caller prepares others. An error is returned again when the ring is
        // waited for.
        if next.is_none() && ring.outstanding() > 0 && lock(&self.state).filling && ring.submit(0).is_ok() {
            return self.take_while_filling();
        }
        next
    }

    /// Everything through one ring.
    fn run_uring(&self, mut ring: Ring) {
        let kernel = self.work.ctx.reader.files.sys();
        let mut in_flight: Vec<Option<(GroupInFlight, usize)>> = Vec::new();
        let mut pending: VecDeque<(usize, usize)> = VecDeque::new();
        loop {
            while ring.free_slots() > 0 {
                let Some((slot, which)) = pending.pop_front() else {
                    let Some(group) = self.next_for_ring(&mut ring) else { break };
                    let slot = in_flight.iter().position(Option::is_none).unwrap_or_else(|| {
                        in_flight.push(None);
                        in_flight.len() - 1
                    });
                    let count = group.got.len();
                    in_flight[slot] = Some((group, count));
                    pending.extend((0..count).map(|which| (slot, which)));
                    continue;
                };
                let Some((group, _)) = &in_flight[slot] else { continue };
                let read = &self.reads[self.groups[group.group].reads.start + which];
                let token = (slot as u64) << 32 | which as u64;
                let fd =
                    self.work.sources[read.source as usize].file.direct_fd.as_ref().map_or(-1, |shadow| shadow.get());
                let to = group.base.wrapping_add(read.dest) as *mut u8;
                // SAFETY: the buffer of the caller has space for the read, and is this worker's until the group is
                // complete; a P2P address is inside its allocation.
                if !unsafe { ring.read(fd, to, read.len, read.offset, token) } {
                    pending.push_front((slot, which));
                    break;
                }
            }
            if ring.outstanding() == 0 {
                // No group arrived while it waited: all are done.
                return;
            }
            if let Err(errno) = ring.submit(1) {
                // A shortage of memory passes.
                if !matches!(errno, Errno::AGAIN | Errno::BUSY | Errno::NOMEM) {
                    self.work.ctx.reader.files.workers().io_uring_denied.store(true, Relaxed);
                }
                let unresolved = !ring.drain();
                drop(ring);
                // Every group counts as not read.
                for (mut group, _) in in_flight.into_iter().flatten() {
                    group.got.fill(0);
                    group.dma_unresolved = unresolved;
                    self.complete_group(group);
                }
                return self.run_sync();
            }
            while let Some((token, result)) = ring.next_completion() {
                let (slot, which) = ((token >> 32) as usize, token as u32 as usize);
                match kernel.on_completion(result) {
                    Err(Errno::INTR) => pending.push_back((slot, which)),
                    // EAGAIN too: a server that answers so could do it for ever. The page cache is read instead.
                    landed => {
                        let Some((group, reads_left)) = &mut in_flight[slot] else { continue };
                        group.got[which] = landed.unwrap_or(0) as u32;
                        *reads_left -= 1;
                        if *reads_left == 0
                            && let Some((group, _)) = in_flight[slot].take()
                        {
                            self.complete_group(group);
                        }
                    }
                }
            }
        }
    }

    /// One read after another.
    fn run_sync(&self) {
        let kernel = self.work.ctx.reader.files.sys();
        while let Some(mut group) = self.take_group(true) {
            let read_group = &self.groups[group.group];
            let route = if read_group.buffer_len == 0 { Route::P2p } else { Route::Direct };
            for (read, got) in self.reads[read_group.reads.clone()].iter().zip(&mut group.got) {
                let Ok(shadow) = &self.work.sources[read.source as usize].file.direct_fd else { continue };
                let to = group.base.wrapping_add(read.dest) as *mut u8;
                // SAFETY: as in `run_uring`.
                let n = unsafe { kernel.pread(route, shadow.get(), to, read.len as usize, read.offset, 0) };
                *got = n.unwrap_or(0) as u32;
            }
            self.complete_group(group);
        }
    }
}

impl Task for StorageReader {
    fn execute(&self) {
        let Some(_scope) = self.scope.enter() else { return };
        let ctx = &self.work.ctx;
        if !ctx.reader.files.workers().io_uring_denied.load(Relaxed) {
            match ctx.reader.files.sys().new_io_uring(DEPTH) {
                Ok(ring) => return self.run_uring(ring),
                // Too little memory, or too many open files: that is temporary.
                Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN) => {}
                Err(_) => ctx.reader.files.workers().io_uring_denied.store(true, Relaxed),
            }
        }
        self.run_sync();
    }
}

/// Reads and groups being packed.
struct GroupPacker<'a> {
    work: &'a BatchState,
    wanted: Vec<Span>,
    reads: Vec<DiskRead>,
    groups: Vec<ReadGroup>,
}

impl GroupPacker<'_> {
    fn align(&self, source: u16) -> (u64, u64) {
        let align = &self.work.sources[source as usize].file.direct_align;
        (u64::from(align.offset).max(512), u64::from(align.memory).max(512))
    }

    /// Whether storage may write a fragment to its destination itself.
    fn can_p2p(&self, item: &Fragment) -> bool {
        let (unit, memory) = self.align(item.source);
        item.p2p && (item.offset | u64::from(item.len)).is_multiple_of(unit) && item.dest.is_multiple_of(memory)
    }

    fn pack_staged(&mut self, (source, sink): (u16, u16), wanted: &mut [Span]) {
        let (unit, memory) = self.align(source);
        // At most the length of a fragment and its units, so that any fits a buffer next to the list of its members.
        let rule = CoalesceRule { unit, gap: MERGE_GAP, max_len: MAX_FRAGMENT + 2 * unit, max_members: 4096 };
        let runs = coalesce(wanted, &rule);
        let base = self.wanted.len();
        self.wanted.extend_from_slice(wanted);
        let mut group = ReadGroup { sink, reads: self.reads.len()..self.reads.len(), buffer_len: 0 };
        let (mut used, mut entries) = (0u64, 0);
        for run in runs {
            let at = used.next_multiple_of(memory);
            let full = at + run.len + ((entries + run.members.len()) * ENTRY_SIZE) as u64 > BUFFER_SIZE as u64;
            let enough =
                group.reads.len() == GROUP_MAX_READS || group.reads.len() >= GROUP_MIN_READS && used >= GROUP_BYTES;
            let at = if full || enough {
                let next = self.reads.len();
                self.groups.push(ReadGroup { buffer_len: used as usize, ..group });
                group = ReadGroup { sink, reads: next..next, buffer_len: 0 };
                entries = 0;
                0
            } else {
                at
            };
            used = at + run.len;
            entries += run.members.len();
            group.reads.end += 1;
            let members = base + run.members.start..base + run.members.end;
            self.reads.push(DiskRead { source, offset: run.offset, len: run.len as u32, dest: at, members });
        }
        if !group.reads.is_empty() {
            self.groups.push(ReadGroup { buffer_len: used as usize, ..group });
        }
    }

    fn add_p2p(&mut self, (source, sink): (u16, u16), items: &[Fragment], wanted: Vec<Span>) {
        for some in wanted.chunks(GROUP_MAX_READS) {
            let first = self.reads.len();
            for span in some {
                let at = self.wanted.len();
                self.wanted.push(*span);
                let item = &items[span.tag as usize];
                let (offset, len, to) = (item.offset, item.len, item.dest);
                self.reads.push(DiskRead { source, offset, len, dest: to, members: at..at + 1 });
            }
            self.groups.push(ReadGroup { sink, reads: first..self.reads.len(), buffer_len: 0 });
        }
    }
}
