//! Pieces that are not in the page cache: many reads of storage in flight.
//!
//! ```text
//!   items ──merge──> reads of whole units, each serving one or several items
//!                       │ packed into loads: what one page of staging holds
//!   caller ── page ────>│
//!                    keeper: a ring with up to 128 reads in flight, O_DIRECT through the twin
//!   caller <── filled ──┘
//!      └─ launch: each item to its place
//! ```
//!
//! Where storage may DMA into the device a read that is aligned goes there itself (`p2p`), and needs no page.
//!
//! The first page is read into as soon as it is there, while staging grows for the next. From then on no more pages are
//! out than keep the ring full, and those that were in use a moment ago come first: what storage writes into memory that
//! the processor's cache has, it writes faster. Seen (virtio disk, 32 MiB of cache, 10000 reads of 64 KiB at this depth):
//! 122 to 126 ms through 8 to 14 MiB of memory in turn, 132 through 20, 154 through 32 and more.
//!
//! Where the kernel offers no ring, several keepers read one after another. What comes back short or not at all is
//! read through the page cache, where the kernel says what a plain `pread` says.
//!
//! Known flaws:
//! - Of a batch that is cached in part storage begins when the caller has registered what is worth it: 20 ms a GiB.
//! - One ring is one thread, which submits about a million reads a second at most.
//! - Where a seccomp filter comes while reads fly and forbids to wait for them (`sys/src/linux/uring.rs`), their pages are
//!   lost, 32 MiB at most and once in a process's life. What flew straight into the device may still be written when the
//!   batch returns: the same bytes again, unless the program uses that memory for something else at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spinio_plan::{Joining, Reason, Route, Wanted, merge};
use spinio_sys::Errno;
use spinio_sys::linux::Ring;

use spinio_host::task_scope::Gate;
use crate::outlet::{ENTRY, Page, Pen};
use spinio_host::panic_relay::Panics;
use crate::readers::Readers;
use crate::work::{CUT, Item, Work};
use spinio_host::pool::SHADOW_WORKERS as KEEPERS;
use spinio_host::pool::Task;
use spinio_host::is_interrupted;
use spinio_host::lock;
use spinio_transfer::bounce::BLOCK;

/// Reads in flight.
pub(crate) const DEPTH: u32 = 128;

/// Reads of one load at most: so many land before any of them is sent on.
const READS: usize = 64;

/// Bytes that are enough for a load, if they are of so many reads: what lands later can lie where this load lay.
const LOAD: u64 = 1 << 20;
const FEW: usize = 16;

/// Loads that keepers have in hand at most.
const AHEAD: usize = 16;

/// Loads that lie ready for a ring when it is full: it takes one while the caller sends another.
const SPARE: usize = 2;

/// How long a keeper without work waits for the next load.
const LINGER: Duration = Duration::from_millis(1);

/// Bytes between two pieces that are read along: about what a command costs a fast disk.
const GAP: u64 = 4096;

/// One read of storage.
struct Read {
    source: u16,
    offset: u64,
    len: u32,
    /// Where it goes: from the start of the load's page, or for P2P the address itself.
    at: u64,
    /// Whom it serves: places in [`Storage::wanted`].
    members: Range<usize>,
}

/// Reads that are handed out together.
struct Load {
    outlet: u16,
    reads: Range<usize>,
    /// Bytes of a page; 0: straight into the device.
    room: usize,
}

/// A load in the hands of a keeper.
struct InHand {
    load: usize,
    base: u64,
    /// Bytes that came, read by read.
    got: Vec<u32>,
    /// Storage may still write its page.
    adrift: bool,
    begun: Instant,
}

#[derive(Default)]
struct State {
    ready: VecDeque<InHand>,
    landed: VecDeque<InHand>,
    /// Keepers that were called and have not gone.
    keepers: usize,
    /// The caller is handing out the first loads, as many as fill a ring.
    filling: bool,
    closed: bool,
}

/// Items to be fetched from storage.
pub(crate) struct Storage {
    work: Arc<Work>,
    items: Vec<Item>,
    wanted: Vec<Wanted>,
    reads: Vec<Read>,
    loads: Vec<Load>,
    state: Mutex<State>,
    changed: Condvar,
    gate: Gate,
}

impl Storage {
    /// Joins and packs. Items of one file and device lie together.
    pub(crate) fn new(work: &Arc<Work>, items: Vec<Item>) -> Arc<Storage> {
        let mut packed = Packed { work, wanted: Vec::with_capacity(items.len()), reads: Vec::new(), loads: Vec::new() };
        let mut tag = 0;
        for some in items.chunk_by(|a, b| (a.source, a.outlet) == (b.source, b.outlet)) {
            let (mut staged, mut straight) = (Vec::new(), Vec::new());
            for item in some {
                let one = Wanted { offset: item.offset, len: u64::from(item.len), tag };
                if packed.goes_straight(item) {
                    straight.push(one)
                } else {
                    staged.push(one)
                }
                tag += 1;
            }
            let group = (some[0].source, some[0].outlet);
            packed.stage(group, &mut staged);
            packed.straighten(group, &items, straight);
        }
        let Packed { wanted, reads, loads, .. } = packed;
        Arc::new(Storage {
            work: Arc::clone(work),
            items,
            wanted,
            reads,
            loads,
            state: Mutex::default(),
            changed: Condvar::new(),
            gate: Gate::new(),
        })
    }

    /// Calls a keeper, or several where there is no ring, unless they are here.
    fn call_helpers(self: &Arc<Self>) {
        let count = if self.work.ctx.reader.files.workers().io_uring_denied.load(Relaxed) { KEEPERS } else { 1 };
        let mut state = lock(&self.state);
        let more = count.min(state.ready.len()).saturating_sub(state.keepers);
        state.keepers += more;
        drop(state);
        if more > 0
            && let Some(crew) = self.work.ctx.reader.files.shadow_workers()
        {
            crew.post(Arc::clone(self) as Arc<dyn Task>, more);
        }
    }

    /// Hands out pages and sends what comes back, until all is done; what storage could not bring. `readers`: who may have
    /// blocks of the ring meanwhile.
    pub(crate) fn finish(self: &Arc<Self>, readers: Option<&Readers>) -> Vec<Item> {
        let mut pages: Vec<Option<Page>> = self.loads.iter().map(|_| None).collect();
        let mut panics = Panics::default();
        let missed = panics.keep(|| self.move_all(&mut pages, readers));
        let not_begun = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        self.changed.notify_all();
        // Whatever happened, storage writes nothing of the program's from here on.
        panics.keep(|| self.gate.close());
        // Only of a batch that panicked. What a keeper had in hand may still be written if it panicked itself.
        let landed = std::mem::take(&mut lock(&self.state).landed);
        for in_hand in not_begun.into_iter().chain(landed).filter(|in_hand| !in_hand.adrift) {
            if let Some(page) = pages[in_hand.load].take() {
                self.work.outlets[self.loads[in_hand.load].outlet as usize].staging.give_back(page.into_block());
            }
        }
        for (load, page) in pages.into_iter().enumerate() {
            if let Some(page) = page {
                self.work.outlets[self.loads[load].outlet as usize].staging.lose(page.into_block());
            }
        }
        panics.go_on();
        missed.unwrap_or_default()
    }

    /// The caller's part; the pages that are out lie in `pages`.
    fn move_all(self: &Arc<Self>, pages: &mut [Option<Page>], readers: Option<&Readers>) -> Vec<Item> {
        let mut pens: Vec<Option<Pen>> = self.work.outlets.iter().map(|_| None).collect();
        let mut missed = Vec::new();
        let (mut next, mut out, mut reads) = (0, 0, 0);
        lock(&self.state).filling = true;
        while next < self.loads.len() || out > 0 {
            if next < self.loads.len() && self.is_interrupted() {
                self.leave_out(next);
                next = self.loads.len();
            }
            let mut dry = false;
            while next < self.loads.len() && out < AHEAD && (reads < DEPTH as usize || self.is_short()) {
                match self.page(next, out, readers) {
                    Ok(Some(page)) => pages[next] = page,
                    Ok(None) => {
                        dry = true;
                        break;
                    }
                    Err(()) => {
                        self.miss(next, &mut missed);
                        next += 1;
                        continue;
                    }
                }
                let base = pages[next].as_ref().map_or(0, |p| p.ptr() as u64);
                let got = vec![0; self.loads[next].reads.len()];
                lock(&self.state).ready.push_back(InHand {
                    load: next,
                    base,
                    got,
                    adrift: false,
                    begun: Instant::now(),
                });
                self.changed.notify_all();
                // At once: the first loads are read while the ring of staging grows for the next.
                self.call_helpers();
                reads += self.loads[next].reads.len();
                next += 1;
                out += 1;
            }
            self.filled();
            if out == 0 {
                continue;
            }
            self.call_helpers();
            let more = next < self.loads.len() && out < AHEAD && !dry;
            let Some(landed) = self.landed(more) else {
                if self.gate.is_broken() {
                    // What it had in hand never lands.
                    break;
                }
                continue;
            };
            out -= 1;
            reads -= landed.got.len();
            let page = pages[landed.load].take();
            self.deliver(landed, page, &mut pens, &mut missed);
        }
        pens.into_iter().flatten().for_each(Pen::finish);
        missed
    }

    /// Whether the batch shall end early. Who is asked may want to read too, and must find blocks that it does not hold.
    fn is_interrupted(&self) -> bool {
        self.work.ctx.reader.bounce.limit() >= 2 * (AHEAD * BLOCK) as u64 && is_interrupted()
    }

    /// Nobody begins the loads from this one on.
    fn leave_out(&self, from: usize) {
        let reads = self.loads[from..].iter().flat_map(|load| &self.reads[load.reads.clone()]);
        for item in reads.flat_map(|read| self.members(read)) {
            self.work.ended(item, 0, Some(Errno::INTR));
        }
    }

    /// A page for a load: `Ok(None)`: not now. The inner `None`: it needs none.
    fn page(&self, load: usize, out: usize, readers: Option<&Readers>) -> Result<Option<Option<Page>>, ()> {
        let load = &self.loads[load];
        if load.room == 0 {
            return Ok(Some(None));
        }
        let outlet = &self.work.outlets[load.outlet as usize];
        let block = match outlet.staging.try_take_warm() {
            Ok(None) if out == 0 => match readers.filter(|readers| readers.serves(load.outlet)) {
                // It may be that nobody else sends what they have read.
                Some(readers) => readers.block().map(Some),
                None => outlet.staging.take().map(Some),
            },
            other => other,
        };
        match block {
            Ok(Some(block)) => {
                let mut page = Page::new(outlet, block);
                page.reserve(load.room);
                Ok(Some(Some(page)))
            }
            Ok(None) => Ok(None),
            Err(_) => Err(()),
        }
    }

    /// Loads that lie ready while there are more.
    fn spare(&self) -> usize {
        // Without a ring each load keeps a keeper busy.
        if self.work.ctx.reader.files.workers().io_uring_denied.load(Relaxed) { AHEAD } else { SPARE }
    }

    /// No keeper need wait for a load before it looks what has landed.
    fn filled(&self) {
        if std::mem::take(&mut lock(&self.state).filling) {
            self.changed.notify_all();
        }
    }

    /// Whether keepers could soon be without a load.
    fn is_short(&self) -> bool {
        lock(&self.state).ready.len() < self.spare()
    }

    /// A load to be sent on; waits for one, and with `more` no longer than until none lies ready.
    fn landed(&self, more: bool) -> Option<InHand> {
        let state = lock(&self.state);
        // The time limit lets the caller look whether there is a ring, and whether there are keepers.
        let limit = Duration::from_millis(5);
        let waiting = |s: &mut State| s.landed.is_empty() && !(more && s.ready.is_empty());
        let (mut state, _) =
            self.changed.wait_timeout_while(state, limit, waiting).unwrap_or_else(PoisonError::into_inner);
        state.landed.pop_front()
    }

    fn members(&self, read: &Read) -> impl Iterator<Item = &Item> {
        self.wanted[read.members.clone()].iter().map(|w| &self.items[w.tag as usize])
    }

    fn miss(&self, load: usize, missed: &mut Vec<Item>) {
        for read in &self.reads[self.loads[load].reads.clone()] {
            missed.extend(self.members(read).copied());
        }
    }

    fn deliver(&self, landed: InHand, page: Option<Page>, pens: &mut [Option<Pen>], missed: &mut Vec<Item>) {
        let load = &self.loads[landed.load];
        let stats = self.work.ctx.reader.files.stats();
        let reads = self.reads[load.reads.clone()].iter().zip(&landed.got);
        let Some(mut page) = page else {
            for (read, &got) in reads {
                if got == read.len {
                    let bytes = u64::from(got);
                    stats.piece(&self.work.watch, Route::P2p, Reason::Absent, 0, bytes, landed.begun);
                } else {
                    missed.extend(self.members(read).copied());
                }
            }
            return;
        };
        let outlet = &self.work.outlets[load.outlet as usize];
        if landed.adrift {
            outlet.staging.lose(page.into_block());
            return self.miss(landed.load, missed);
        }
        let mut bytes = 0;
        for (read, &got) in reads {
            for item in self.members(read) {
                let skip = item.offset - read.offset;
                if skip + u64::from(item.len) <= u64::from(got) {
                    page.put_within((read.at + skip) as usize, item.len as usize, item.to);
                    bytes += u64::from(item.len);
                } else {
                    missed.push(*item);
                }
            }
        }
        let pen = pens[load.outlet as usize].get_or_insert_with(|| Pen::new(outlet));
        match pen.send(page) {
            Ok(()) => stats.piece(&self.work.watch, Route::Direct, Reason::Absent, 0, bytes, landed.begun),
            Err(_) => self.miss(landed.load, missed),
        }
    }

    /// A load to read, if there is one. `last`: the keeper has nothing else to do; it waits a little, and goes without
    /// one. It must not wait for ever: the caller may be waiting for pages that another batch has, and that for keepers.
    fn take(&self, last: bool) -> Option<InHand> {
        let mut state = lock(&self.state);
        if last {
            state = self.linger(state, |_| true);
        }
        let taken = self.pop(&mut state);
        if last && taken.is_none() {
            // With the lock in hand, so that who finds something for it from now on calls it again.
            state.keepers -= 1;
        }
        taken
    }

    /// One of the first loads, if there is or soon will be one.
    fn take_first(&self) -> Option<InHand> {
        self.pop(&mut self.linger(lock(&self.state), |state| state.filling))
    }

    fn linger<'a>(&self, state: MutexGuard<'a, State>, while_: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        let idle = |s: &mut State| s.ready.is_empty() && !s.closed && while_(s);
        self.changed.wait_timeout_while(state, LINGER, idle).unwrap_or_else(PoisonError::into_inner).0
    }

    fn pop(&self, state: &mut State) -> Option<InHand> {
        let taken = state.ready.pop_front()?;
        if state.ready.is_empty() {
            // The caller shall make others ready, even if nothing lands.
            self.changed.notify_all();
        }
        Some(taken)
    }

    fn hand_in(&self, in_hand: InHand) {
        lock(&self.state).landed.push_back(in_hand);
        self.changed.notify_all();
    }

    /// A load for the ring.
    fn next(&self, ring: &mut Ring) -> Option<InHand> {
        let taken = self.take(ring.under_way() == 0);
        // The first ones fly while the caller makes others ready. An error comes again when the ring is waited for.
        if taken.is_none() && ring.under_way() > 0 && lock(&self.state).filling && ring.submit(0).is_ok() {
            return self.take_first();
        }
        taken
    }

    /// Everything through one ring.
    fn fly(&self, mut ring: Ring) {
        let kernel = self.work.ctx.reader.files.sys();
        let mut flights: Vec<Option<(InHand, usize)>> = Vec::new();
        let mut pending: VecDeque<(usize, usize)> = VecDeque::new();
        loop {
            while ring.room() > 0 {
                let Some((slot, which)) = pending.pop_front() else {
                    let Some(in_hand) = self.next(&mut ring) else { break };
                    let slot = flights.iter().position(Option::is_none).unwrap_or_else(|| {
                        flights.push(None);
                        flights.len() - 1
                    });
                    let count = in_hand.got.len();
                    flights[slot] = Some((in_hand, count));
                    pending.extend((0..count).map(|which| (slot, which)));
                    continue;
                };
                let Some((in_hand, _)) = &flights[slot] else { continue };
                let read = &self.reads[self.loads[in_hand.load].reads.start + which];
                let token = (slot as u64) << 32 | which as u64;
                let fd = self.work.sources[read.source as usize].file.direct.as_ref().map_or(-1, |twin| twin.get());
                let to = in_hand.base.wrapping_add(read.at) as *mut u8;
                // SAFETY: the caller lent the page, which has room for the read, until the load is handed in; a P2P
                // address lies inside its allocation.
                if !unsafe { ring.read(fd, to, read.len, read.offset, token) } {
                    pending.push_front((slot, which));
                    break;
                }
            }
            if ring.under_way() == 0 {
                // Nothing was to be had, waiting for it: it is over.
                return;
            }
            if let Err(errno) = ring.submit(1) {
                // A shortage of memory passes.
                if !matches!(errno, Errno::AGAIN | Errno::BUSY | Errno::NOMEM) {
                    self.work.ctx.reader.files.workers().io_uring_denied.store(true, Relaxed);
                }
                let adrift = !ring.settle();
                drop(ring);
                // Every load counts as not read.
                for (mut in_hand, _) in flights.into_iter().flatten() {
                    in_hand.got.fill(0);
                    in_hand.adrift = adrift;
                    self.hand_in(in_hand);
                }
                return self.plod();
            }
            while let Some((token, result)) = ring.landed() {
                let (slot, which) = ((token >> 32) as usize, token as u32 as usize);
                match kernel.landed(result) {
                    Err(Errno::INTR | Errno::AGAIN) => pending.push_back((slot, which)),
                    landed => {
                        let Some((in_hand, left)) = &mut flights[slot] else { continue };
                        in_hand.got[which] = landed.unwrap_or(0) as u32;
                        *left -= 1;
                        if *left == 0
                            && let Some((in_hand, _)) = flights[slot].take()
                        {
                            self.hand_in(in_hand);
                        }
                    }
                }
            }
        }
    }

    /// One read after another.
    fn plod(&self) {
        let kernel = self.work.ctx.reader.files.sys();
        while let Some(mut in_hand) = self.take(true) {
            let load = &self.loads[in_hand.load];
            let route = if load.room == 0 { Route::P2p } else { Route::Direct };
            for (read, got) in self.reads[load.reads.clone()].iter().zip(&mut in_hand.got) {
                let Ok(twin) = &self.work.sources[read.source as usize].file.direct else { continue };
                let to = in_hand.base.wrapping_add(read.at) as *mut u8;
                // SAFETY: as in `fly`.
                let n = unsafe { kernel.pread(route, twin.get(), to, read.len as usize, read.offset, 0) };
                *got = n.unwrap_or(0) as u32;
            }
            self.hand_in(in_hand);
        }
    }
}

impl Task for Storage {
    fn help(&self) {
        let Some(_inside) = self.gate.enter() else { return };
        let ctx = &self.work.ctx;
        if !ctx.reader.files.workers().io_uring_denied.load(Relaxed) {
            match ctx.reader.files.sys().ring(DEPTH) {
                Ok(ring) => return self.fly(ring),
                // Too little memory, or too many files open: that passes.
                Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN) => {}
                Err(_) => ctx.reader.files.workers().io_uring_denied.store(true, Relaxed),
            }
        }
        self.plod();
    }
}

/// Reads and loads in the making.
struct Packed<'a> {
    work: &'a Work,
    wanted: Vec<Wanted>,
    reads: Vec<Read>,
    loads: Vec<Load>,
}

impl Packed<'_> {
    fn align(&self, source: u16) -> (u64, u64) {
        let align = &self.work.sources[source as usize].file.align;
        (u64::from(align.offset).max(512), u64::from(align.memory).max(512))
    }

    /// Whether storage may write an item to its place itself.
    fn goes_straight(&self, item: &Item) -> bool {
        let (unit, memory) = self.align(item.source);
        item.p2p && (item.offset | u64::from(item.len)).is_multiple_of(unit) && item.to.is_multiple_of(memory)
    }

    fn stage(&mut self, (source, outlet): (u16, u16), wanted: &mut [Wanted]) {
        let (unit, memory) = self.align(source);
        // Not longer than an item and the units it lies in, so that any fits a page beside the list of its members.
        let how = Joining { unit, gap: GAP, most: CUT + 2 * unit, members: 4096 };
        let runs = merge(wanted, &how);
        let base = self.wanted.len();
        self.wanted.extend_from_slice(wanted);
        let mut load = Load { outlet, reads: self.reads.len()..self.reads.len(), room: 0 };
        let (mut room, mut entries) = (0u64, 0);
        for run in runs {
            let at = room.next_multiple_of(memory);
            let full = at + run.len + ((entries + run.members.len()) * ENTRY) as u64 > BLOCK as u64;
            let enough = load.reads.len() == READS || load.reads.len() >= FEW && room >= LOAD;
            let at = if full || enough {
                let next = self.reads.len();
                self.loads.push(Load { room: room as usize, ..load });
                load = Load { outlet, reads: next..next, room: 0 };
                entries = 0;
                0
            } else {
                at
            };
            room = at + run.len;
            entries += run.members.len();
            load.reads.end += 1;
            let members = base + run.members.start..base + run.members.end;
            self.reads.push(Read { source, offset: run.offset, len: run.len as u32, at, members });
        }
        if !load.reads.is_empty() {
            self.loads.push(Load { room: room as usize, ..load });
        }
    }

    fn straighten(&mut self, (source, outlet): (u16, u16), items: &[Item], wanted: Vec<Wanted>) {
        for some in wanted.chunks(READS) {
            let first = self.reads.len();
            for one in some {
                let at = self.wanted.len();
                self.wanted.push(*one);
                let item = &items[one.tag as usize];
                let (offset, len, to) = (item.offset, item.len, item.to);
                self.reads.push(Read { source, offset, len, at: to, members: at..at + 1 });
            }
            self.loads.push(Load { outlet, reads: first..self.reads.len(), room: 0 });
        }
    }
}
