//! Pieces of the page cache, copied by the CPU and taken to their places together.
//!
//! ```text
//!   caller ┐                                                          ┌─ piece ─> its place
//!   helper ├─ pread, pread, pread ... into a page of staging ─ launch ┼─ piece ─> its place
//!   helper ┘                            one a thread                  └─ piece ─> its place
//! ```
//!
//! They take items from the back, while the caller may be registering others from the front (frontier.rs).
//!
//! A `pread` of 512 bytes costs 0.4 us and one of 4 KiB a whole one, mostly memory that no cache of the CPU has, so this
//! is a work for many threads: `SPINIO_BATCH_THREADS`. They read through the program's own descriptors. What is not in
//! the page cache the kernel reads: that is also how everything ends that another route could not bring.
//!
//! Known flaw: every `pread` counts its use of the descriptor up and down, and all threads share that counter. Seen
//! (H200, 1 M reads out of 8 GiB): 512 bytes at 1.7 GB/s with 6 threads and 1.9 with 12 or 15, 4 KiB at 10.4, 16.0 and
//! 15.2 GB/s, and from 6 threads to 15 twice the time of the CPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;

use crate::batch::frontier::Frontier;
use crate::batch::gate::Gate;
use crate::batch::outlet::{Page, Pen};
use crate::batch::work::{HOST, Item, Work};
use crate::crew::Task;

/// Items a thread takes at once.
const STEP: u32 = 128;

/// Items to be copied, by however many threads.
pub(crate) struct Copies {
    pub(crate) work: Arc<Work>,
    pub(crate) items: Vec<Item>,
    pub(crate) frontier: Frontier,
    /// Items that only the caller takes, to register them.
    floor: usize,
    reason: Reason,
    gate: Gate,
}

/// What a thread has open towards one device.
struct Open {
    pen: Pen,
    page: Option<Page>,
    /// Whose bytes lie in the page: places in [`Copies::items`].
    items: Vec<u32>,
    bytes: u64,
    begun: Instant,
}

impl Copies {
    /// The first `floor` of the items are left to the caller.
    pub(crate) fn new(work: &Arc<Work>, items: Vec<Item>, floor: usize, reason: Reason) -> Arc<Copies> {
        // A batch has fewer items than that: `begin` sees to it.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let frontier = Frontier::new(count(items.len()), count(floor));
        Arc::new(Copies { work: Arc::clone(work), items, frontier, floor, reason, gate: Gate::new() })
    }

    /// Calls helpers, as many as are of use.
    pub(crate) fn call_helpers(self: &Arc<Self>) {
        // A helper is worth waking for a few hundred pieces, or a quarter of a MiB.
        let items = &self.items[self.floor..];
        let wanted = match items.len() / 256 {
            few if few < 64 => few.max((items.iter().map(|i| u64::from(i.len)).sum::<u64>() >> 18) as usize),
            many => many,
        };
        if wanted > 1
            && let Some(crew) = self.work.core.batchers()
        {
            crew.post(Arc::clone(self) as Arc<dyn Task>, wanted - 1);
        }
    }

    /// Works until everything is done.
    pub(crate) fn finish(&self) {
        // Whatever happens to the caller, helpers are out before he is: they store into his memory. The gate passes a panic on.
        let _ = catch_unwind(AssertUnwindSafe(|| self.help()));
        self.gate.close();
    }

    fn work(&self) {
        let mut open: Vec<Option<Open>> = self.work.outlets.iter().map(|_| None).collect();
        while let Some(range) = self.frontier.back(STEP) {
            for at in range.clone() {
                self.one(at, &mut open);
            }
            self.check(range);
        }
        for open in open.into_iter().flatten() {
            let mut open = open;
            self.send(&mut open);
            open.pen.finish();
        }
    }

    fn one(&self, at: usize, open: &mut [Option<Open>]) {
        let item = &self.items[at];
        let len = item.len as usize;
        if item.outlet == HOST || !self.work.outlets[item.outlet as usize].device.abilities().copies {
            let begun = Instant::now();
            // SAFETY: host-mapped memory inside its allocation, or memory of the host for the kernel to judge.
            let got = unsafe { self.fill(item, item.to as *mut u8, Route::Store) };
            self.count(Route::Store, got as u64, begun);
            return;
        }
        let Some((page_at, page)) = self.room(item, open) else {
            return self.work.ended(item, 0, Some(Errno::NOMEM));
        };
        // SAFETY: the page has room for `len` bytes there.
        let got = unsafe { self.fill(item, page.wrapping_add(page_at), Route::Copy) };
        debug_assert!(got <= len);
        if got > 0
            && let Some(open) = &mut open[item.outlet as usize]
            && let Some(page) = &mut open.page
        {
            page.put(page_at, got, item.to);
            open.items.push(at as u32);
            open.bytes += got as u64;
        }
    }

    /// Room for an item: where in which memory.
    fn room(&self, item: &Item, open: &mut [Option<Open>]) -> Option<(usize, *mut u8)> {
        let which = item.outlet as usize;
        let outlet = &self.work.outlets[which];
        if let Some(Open { page: Some(page), .. }) = &open[which]
            && let Some(at) = page.room(item.len as usize, item.to)
        {
            return Some((at, page.ptr()));
        }
        if let Some(full) = &mut open[which] {
            self.send(full);
        }
        let block = match outlet.staging.try_take() {
            Ok(Some(block)) => block,
            // Who waits must not hold what others wait for.
            Ok(None) => {
                open.iter_mut().flatten().for_each(|o| self.send(o));
                outlet.staging.take().ok()?
            }
            Err(_) => return None,
        };
        let page = Page::new(outlet, block);
        let room = page.room(item.len as usize, item.to).map(|at| (at, page.ptr()));
        let fresh = || Open { pen: Pen::new(outlet), page: None, items: Vec::new(), bytes: 0, begun: Instant::now() };
        let slot = open[which].get_or_insert_with(fresh);
        slot.begun = Instant::now();
        slot.page = Some(page);
        room
    }

    /// Sends a page. What cannot be gathered is read and copied one by one; what cannot be copied has failed.
    fn send(&self, open: &mut Open) {
        let Some(page) = open.page.take() else { return };
        let items = std::mem::take(&mut open.items);
        let gathered = page.gathers();
        match open.pen.send(page) {
            Ok(()) => self.count(Route::Copy, open.bytes, open.begun),
            Err(e) if !gathered => open.pen.outlet.fail(e),
            Err(_) => {
                for at in items {
                    if let Err(e) = self.again(&self.items[at as usize], &mut open.pen) {
                        open.pen.outlet.fail(e);
                        break;
                    }
                }
            }
        }
        open.bytes = 0;
    }

    /// One item in a page of its own.
    fn again(&self, item: &Item, pen: &mut Pen) -> Result<(), spinio_device::DeviceError> {
        let begun = Instant::now();
        let mut page = Page::new(&pen.outlet, pen.outlet.staging.take()?);
        let Some(at) = page.room(item.len as usize, item.to) else { return Ok(()) };
        // SAFETY: the page has room for as many bytes there.
        let got = unsafe { self.fill(item, page.ptr().wrapping_add(at), Route::Copy) };
        if got > 0 {
            page.put(at, got, item.to);
        }
        pen.send(page)?;
        self.count(Route::Copy, got as u64, begun);
        Ok(())
    }

    /// Reads an item into memory; the bytes that came. If they are not all, that is told.
    ///
    /// # Safety
    /// `into` must have as many bytes, or be an address that the kernel may refuse.
    unsafe fn fill(&self, item: &Item, into: *mut u8, route: Route) -> usize {
        let kernel = self.work.core.kernel;
        let source = &self.work.sources[item.source as usize];
        let len = item.len as usize;
        let mut got = 0;
        while got < len {
            let at = item.offset + got as u64;
            // SAFETY: passed on to the caller.
            match unsafe { kernel.pread(route, source.fd, into.wrapping_add(got), len - got, at, 0) } {
                Ok(0) => {
                    self.work.ended(item, got as u64, None);
                    break;
                }
                Ok(n) => got += n,
                Err(Errno::INTR) => {}
                Err(errno) => {
                    self.work.ended(item, got as u64, Some(errno));
                    break;
                }
            }
        }
        got
    }

    /// Whether the bytes came from the files they were meant to come from: the program may have closed a descriptor
    /// under its own batch, and opened another file as the same number.
    fn check(&self, range: std::ops::Range<usize>) {
        let mut last = None;
        for at in range {
            let item = &self.items[at];
            let source = &self.work.sources[item.source as usize];
            let good = match last {
                Some((which, good)) if which == item.source => good,
                _ => self.work.core.kernel.fstat(source.fd).is_ok_and(|s| (s.dev, s.ino) == source.file.key()),
            };
            last = Some((item.source, good));
            if !good {
                self.work.ended(item, 0, Some(Errno::BADF));
            }
        }
    }

    fn count(&self, route: Route, bytes: u64, begun: Instant) {
        self.work.core.stats().piece(&self.work.watch, route, self.reason, 0, bytes, begun);
    }
}

impl Task for Copies {
    fn help(&self) {
        if let Some(_inside) = self.gate.enter() {
            self.work();
        }
    }
}
