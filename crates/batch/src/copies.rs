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
//! Here by the threads that may call the device, each for itself, through the program's own descriptors: few pieces, or
//! more than one device. Many pieces are read by threads that do nothing else (readers.rs). What is not in the page cache
//! the kernel reads: that is also how everything ends that another route could not bring.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use crate::frontier::Frontier;
use spinio_host::task_scope::Gate;
use crate::outlet::{Page, Pen};
use crate::work::{HOST, Item, Source, Work};
use spinio_host::pool::Task;
use spinio_transfer::bounce::Block;

/// Items a thread takes at once.
pub(super) const STEP: u32 = 128;

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

/// A page that is being filled.
pub(super) struct Sheet {
    page: Page,
    /// Whose bytes lie in it: places in [`Copies::items`].
    items: Vec<u32>,
    bytes: u64,
    begun: Instant,
}

impl Sheet {
    pub(super) fn new(page: Page) -> Sheet {
        Sheet { page, items: Vec::new(), bytes: 0, begun: Instant::now() }
    }

    /// Reads an item into it; false if it has no room for that.
    pub(super) fn add(&mut self, copies: &Copies, fd: Fd, at: usize) -> bool {
        let item = &copies.items[at];
        let Some(room) = self.page.room(item.len as usize, item.to) else { return false };
        // SAFETY: the page has room for as many bytes there.
        let got = unsafe { copies.fill(fd, item, self.page.ptr().wrapping_add(room), Route::Copy) };
        debug_assert!(got <= item.len as usize);
        if got > 0 {
            self.page.put(room, got, item.to);
            self.items.push(at as u32);
            self.bytes += got as u64;
        }
        true
    }

    /// Takes it apart; nothing of it is sent.
    pub(super) fn into_block(self) -> Block {
        self.page.into_block()
    }
}

/// What a thread has open towards one device.
struct Open {
    pen: Pen,
    sheet: Option<Sheet>,
}

/// What a thread has open towards every device.
#[derive(Default)]
pub(super) struct Opens(Vec<Option<Open>>);

impl Copies {
    /// The first `floor` of the items are left to the caller.
    pub(crate) fn new(work: &Arc<Work>, items: Vec<Item>, floor: usize, reason: Reason) -> Arc<Copies> {
        // A batch has fewer items than that: `begin` sees to it.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let frontier = Frontier::new(count(items.len()), count(floor));
        Arc::new(Copies { work: Arc::clone(work), items, frontier, floor, reason, gate: Gate::new() })
    }

    /// Threads that are of use, the caller included.
    pub(super) fn wanted(&self) -> usize {
        // One is worth waking for a few hundred pieces, or a quarter of a MiB.
        let items = &self.items[self.floor..];
        match items.len() / 256 {
            few if few < 64 => few.max((items.iter().map(|i| u64::from(i.len)).sum::<u64>() >> 18) as usize),
            many => many,
        }
    }

    /// Calls helpers, as many as are of use.
    pub(crate) fn call_helpers(self: &Arc<Self>) {
        let wanted = self.wanted();
        if wanted > 1
            && let Some(crew) = self.work.ctx.reader.files.workers().batch_copy()
            && crew.shares_my_table() != Some(false)
        {
            crew.post(Arc::clone(self) as Arc<dyn Task>, wanted - 1);
        }
    }

    /// Nobody begins what nobody has begun.
    pub(crate) fn leave_the_rest(&self) {
        let _ = self.frontier.front(self.items.len());
    }

    /// Works until everything is done.
    pub(crate) fn finish(&self) {
        // Whatever happens to the caller, helpers are out before he is: they store into his memory. The gate passes a panic on.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            if let Some(_inside) = self.gate.enter() {
                self.work();
            }
        }));
        self.gate.close();
    }

    /// Whether the descriptors mean on this thread what they mean on the caller's: a thread of the program may have left the
    /// table that it had when the helpers were made.
    pub(super) fn can_be_seen(&self) -> bool {
        self.work.sources.iter().all(|source| self.is_there(source))
    }

    fn is_there(&self, source: &Source) -> bool {
        self.work.ctx.reader.files.sys().names(source.fd, source.file.key())
    }

    fn work(&self) {
        let mut opens = self.open();
        while self.step(&mut opens) {}
        self.close(opens);
    }

    pub(super) fn open(&self) -> Opens {
        Opens(self.work.outlets.iter().map(|_| None).collect())
    }

    /// Copies some items; false if there are none left.
    pub(super) fn step(&self, opens: &mut Opens) -> bool {
        let Some(range) = self.frontier.back(STEP) else { return false };
        for at in range.clone() {
            self.one(at, opens);
        }
        self.check(range);
        true
    }

    /// Sends what is not sent, and waits until it has arrived.
    pub(super) fn close(&self, mut opens: Opens) {
        self.send_all(&mut opens);
        opens.0.into_iter().flatten().for_each(|open| open.pen.finish());
    }

    pub(super) fn send_all(&self, opens: &mut Opens) {
        for Open { pen, sheet } in opens.0.iter_mut().flatten() {
            if let Some(sheet) = sheet.take() {
                self.send(pen, sheet);
            }
        }
    }

    /// The pen for the items of an outlet.
    pub(super) fn pen<'a>(&self, opens: &'a mut Opens, outlet: u16) -> &'a mut Pen {
        &mut self.opened(opens, outlet).pen
    }

    fn opened<'a>(&self, opens: &'a mut Opens, outlet: u16) -> &'a mut Open {
        let fresh = || Open { pen: Pen::new(&self.work.outlets[outlet as usize]), sheet: None };
        opens.0[outlet as usize].get_or_insert_with(fresh)
    }

    fn one(&self, at: usize, opens: &mut Opens) {
        let item = &self.items[at];
        let fd = self.work.sources[item.source as usize].fd;
        if item.outlet == HOST || !self.work.outlets[item.outlet as usize].device.abilities().copies {
            let begun = Instant::now();
            // SAFETY: host-mapped memory inside its allocation, or memory of the host for the kernel to judge.
            let got = unsafe { self.fill(fd, item, item.to as *mut u8, Route::Store) };
            self.count(Route::Store, got as u64, begun);
            return;
        }
        if let Some(sheet) = &mut self.opened(opens, item.outlet).sheet
            && sheet.add(self, fd, at)
        {
            return;
        }
        let Some(page) = self.turn(item.outlet, opens) else {
            return self.work.ended(item, 0, Some(Errno::NOMEM));
        };
        let sheet = self.opened(opens, item.outlet).sheet.insert(Sheet::new(page));
        if !sheet.add(self, fd, at) {
            self.work.ended(item, 0, Some(Errno::NOMEM));
        }
    }

    /// Sends the page towards an outlet, and takes a new one.
    fn turn(&self, which: u16, opens: &mut Opens) -> Option<Page> {
        let Open { pen, sheet } = self.opened(opens, which);
        if let Some(full) = sheet.take() {
            self.send(pen, full);
        }
        let outlet = &self.work.outlets[which as usize];
        let block = match outlet.staging.try_take() {
            Ok(Some(block)) => block,
            // Who waits must not hold what others wait for.
            Ok(None) => {
                self.send_all(opens);
                outlet.staging.take().ok()?
            }
            Err(_) => return None,
        };
        Some(Page::new(outlet, block))
    }

    /// Sends a page. What cannot be gathered is read and copied one by one; what cannot be copied has failed.
    pub(super) fn send(&self, pen: &mut Pen, sheet: Sheet) {
        let Sheet { page, items, bytes, begun } = sheet;
        let gathered = page.gathers();
        match pen.send(page) {
            Ok(()) => self.count(Route::Copy, bytes, begun),
            Err(e) if !gathered => pen.outlet.fail(e),
            Err(_) => {
                for at in items {
                    if let Err(e) = self.again(&self.items[at as usize], pen) {
                        pen.outlet.fail(e);
                        break;
                    }
                    self.check(at as usize..at as usize + 1);
                }
            }
        }
    }

    /// One item in a page of its own.
    fn again(&self, item: &Item, pen: &mut Pen) -> Result<(), spinio_device::DeviceError> {
        let begun = Instant::now();
        let mut page = Page::new(&pen.outlet, pen.outlet.staging.take()?);
        let Some(at) = page.room(item.len as usize, item.to) else { return Ok(()) };
        let fd = self.work.sources[item.source as usize].fd;
        // SAFETY: the page has room for as many bytes there.
        let got = unsafe { self.fill(fd, item, page.ptr().wrapping_add(at), Route::Copy) };
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
    pub(super) unsafe fn fill(&self, fd: Fd, item: &Item, into: *mut u8, route: Route) -> usize {
        let kernel = self.work.ctx.reader.files.sys();
        let len = item.len as usize;
        let mut got = 0;
        while got < len {
            let at = item.offset + got as u64;
            // SAFETY: passed on to the caller.
            match unsafe { kernel.pread(route, fd, into.wrapping_add(got), len - got, at, 0) } {
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
                _ => self.is_there(source) && source.number.is_unchanged(),
            };
            last = Some((item.source, good));
            if !good {
                self.work.ended(item, 0, Some(Errno::BADF));
            }
        }
    }

    fn count(&self, route: Route, bytes: u64, begun: Instant) {
        self.work.ctx.reader.files.stats().piece(&self.work.watch, route, self.reason, 0, bytes, begun);
    }
}

impl Task for Copies {
    fn help(&self) {
        if let Some(_inside) = self.gate.enter()
            && self.can_be_seen()
        {
            self.work();
        }
    }
}
