//! Pieces that lie close together: their pages are registered for this batch alone, and a kernel gathers them.
//!
//! ```text
//!   items, by the part of the file they lie in
//!     part 0   part 1   part 2   part 3   part 4   part 5     others
//!     caller: register, list ──>       <── copying threads, a few items at a time
//!     │                           meet: frontier.rs
//!     ▼
//!   all has arrived ─> the pins are given back as those of single requests are (pins.rs)
//! ```
//!
//! By the caller: the driver registers one range at a time, whoever asks. Parts are short, because he also launches what
//! the others have read, between two of them: a launch by anybody else would wait until all is registered (readers.rs).
//! Helpers that launch for themselves (copies.rs) therefore come only afterwards. Crowds that are so dense that copying
//! would hardly help lie first, and only the caller takes those. What cannot be registered is copied afterwards.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_device::{Device, ErrorKind, Pin};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::PAGE;

use crate::copies::Copies;
use crate::lay::Parts;
use crate::outlet::{Outlet, Page, Pen};
use crate::readers::Readers;
use crate::work::{Item, Work};
use spinio_transfer::Mapping;

/// Entries of a launch: several parts' as a rule. Each launch costs the caller some microseconds and a block of staging,
/// and what is listed in the last one is fetched when nothing is left to register.
const ENTRIES: usize = 8 << 10;

/// A list that is being written: of one or several parts.
struct Open {
    pen: Pen,
    page: Option<Page>,
    entries: usize,
    bytes: u64,
    /// Whose items stand in the page.
    parts: Vec<Range<usize>>,
    begun: Instant,
}

/// What was registered, and is under way.
pub(crate) struct Registered {
    work: Arc<Work>,
    /// One an outlet.
    opens: Vec<Option<Open>>,
    pins: Vec<(&'static dyn Device, Pin, Arc<Mapping>)>,
    bytes: u64,
    /// What could not be.
    missed: Vec<Item>,
}

/// Takes parts from the front until those meet who copy from the back, and is host to the readers among them.
pub(crate) fn gather(copies: &Copies, parts: &Parts, readers: Option<&Readers>) -> Registered {
    let work = &copies.work;
    let opens = work.outlets.iter().map(|_| None).collect();
    let mut all = Registered { work: Arc::clone(work), opens, pins: Vec::new(), bytes: 0, missed: Vec::new() };
    // Of the part before: its file and device, and the mapping; none if it failed. What failed once is not tried again.
    let (mut last, mut mapping) = (None, None);
    let mut taken = 0;
    for &end in &parts.ends {
        if let Some(readers) = readers {
            readers.serve();
        }
        // What cannot be registered others copy, but for what they must not take.
        if taken >= parts.floor && !all.may_go_on() {
            break;
        }
        let Some(range) = copies.frontier.front(end) else { break };
        taken = range.end;
        let Item { source, outlet, .. } = copies.items[range.start];
        if last.replace((source, outlet)) != Some((source, outlet)) {
            mapping = map(work, source);
        }
        let pinned = mapping.as_ref().and_then(|mapping| all.pin(mapping, &copies.items[range.clone()]));
        let good = match pinned {
            Some((start, view)) => all.list(&copies.items, range, start, view, readers),
            None => all.miss(&copies.items[range]),
        };
        if !good {
            mapping = None;
        }
    }
    for which in 0..all.opens.len() {
        all.send(which, &copies.items);
    }
    all
}

/// A mapping of a file, as long as the file was when the batch began.
fn map(work: &Work, source: u16) -> Option<Arc<Mapping>> {
    let source = &work.sources[source as usize];
    let (kernel, file, size) = (work.ctx.reader.files.sys(), Arc::clone(&source.file), source.size);
    file.kept_mapping(size).or_else(|| work.ctx.reader.files.shadow_workers()?.call(move || file.mapping(kernel, size))?)
}

impl Registered {
    /// Nothing failed, and no more is registered at once than may wait to be given back.
    fn may_go_on(&self) -> bool {
        self.missed.is_empty() && self.bytes <= self.work.ctx.reader.files.unpin().most()
    }

    /// Registers a part: where it begins in the file, and where the device sees it.
    fn pin(&mut self, mapping: &Arc<Mapping>, some: &[Item]) -> Option<(u64, u64)> {
        if self.bytes > self.work.ctx.reader.files.unpin().most() {
            return None;
        }
        let (start, pin) = pin(&self.work, mapping, some)?;
        let device = self.work.outlets[some.first()?.outlet as usize].device;
        let view = device.view_pin(&pin);
        self.bytes += pin.len as u64;
        self.pins.push((device, pin, Arc::clone(mapping)));
        Some((start, view.ok()?))
    }

    /// Lists the items of a part that is registered; false if they, or others before them, are missed.
    fn list(&mut self, items: &[Item], range: Range<usize>, start: u64, view: u64, readers: Option<&Readers>) -> bool {
        let mut rest = &items[range.clone()];
        while let Some(first) = rest.first() {
            let which = first.outlet as usize;
            // Who may have to wait for a block holds none.
            if self.opens[which].as_ref().is_none_or(|open| open.page.is_none()) {
                (0..self.opens.len()).for_each(|other| _ = self.send(other, items));
            }
            let open = self.opens[which].get_or_insert_with(|| Open::new(&self.work.outlets[which]));
            if !open.has_page(readers) {
                return self.miss(&items[range]);
            }
            open.parts.push(range.clone());
            let (few, behind) = rest.split_at(rest.len().min(ENTRIES - open.entries));
            open.list(few, start, view);
            rest = behind;
            if open.entries == ENTRIES && !self.send(which, items) {
                return false;
            }
        }
        true
    }

    fn miss(&mut self, some: &[Item]) -> bool {
        self.missed.extend_from_slice(some);
        false
    }

    /// Sends the list towards an outlet, if there is one; false if that failed: its parts are missed.
    fn send(&mut self, which: usize, items: &[Item]) -> bool {
        let Some(open) = &mut self.opens[which] else { return true };
        let Some(page) = open.page.take() else { return true };
        let (parts, bytes) = (std::mem::take(&mut open.parts), std::mem::take(&mut open.bytes));
        open.entries = 0;
        match open.pen.send(page) {
            Ok(()) => {
                let stats = self.work.ctx.reader.files.stats();
                stats.piece(&self.work.watch, Route::Gather, Reason::CachedLarge, 0, bytes, open.begun);
                true
            }
            Err(_) => {
                parts.into_iter().for_each(|part| self.missed.extend_from_slice(&items[part]));
                false
            }
        }
    }

    /// Waits for what is under way; the items that could not be registered.
    pub(crate) fn finish(mut self) -> Vec<Item> {
        std::mem::take(&mut self.opens).into_iter().flatten().for_each(|open| open.pen.finish());
        std::mem::take(&mut self.missed)
    }
}

impl Open {
    fn new(outlet: &Arc<Outlet>) -> Open {
        let parts = Vec::new();
        Open { pen: Pen::new(outlet), page: None, entries: 0, bytes: 0, parts, begun: Instant::now() }
    }

    /// Whether there is a page to write in, an empty one if need be.
    fn has_page(&mut self, readers: Option<&Readers>) -> bool {
        if self.page.is_some() {
            return true;
        }
        let outlet = &self.pen.outlet;
        let Ok(block) = readers.map_or_else(|| outlet.staging.take(), Readers::block) else { return false };
        let page = Page::new(outlet, block);
        // Memory that a kernel cannot read holds no list.
        if !page.gathers() {
            outlet.staging.give_back(page.into_block());
            return false;
        }
        self.page = Some(page);
        self.begun = Instant::now();
        true
    }

    /// Adds items of a part that begins at `start` in the file and is seen at `view`.
    fn list(&mut self, items: &[Item], start: u64, view: u64) {
        let Some(page) = &mut self.page else { return };
        for item in items {
            page.list(view + (item.offset - start), item.to, u64::from(item.len));
            self.bytes += u64::from(item.len);
        }
        self.entries += items.len();
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // After a panic they are here still: a kernel may be reading the pages.
        for open in self.opens.drain(..).flatten() {
            if let Some(page) = open.page {
                open.pen.outlet.staging.give_back(page.into_block());
            }
        }
        let ctx = &self.work.ctx;
        let any = !self.pins.is_empty();
        for (device, pin, mapping) in self.pins.drain(..) {
            ctx.reader.files.unpin().retire(device, pin, mapping);
        }
        if any {
            ctx.reader.files.unpin().watch();
        }
    }
}

/// Registers the pages of some items; the offset in the file where they begin.
fn pin(work: &Work, mapping: &Mapping, some: &[Item]) -> Option<(u64, Pin)> {
    let outlet = &work.outlets[some.first()?.outlet as usize];
    let (device, kept) = (outlet.device, &work.ctx.reader.files.unpin());
    let start = some.iter().map(|i| i.offset).min()? / PAGE as u64 * PAGE as u64;
    let end = some.iter().map(|i| i.offset + u64::from(i.len)).max()?;
    let len = ((end - start) as usize).next_multiple_of(PAGE);
    if start + len as u64 > mapping.len as u64 || len as u64 > device.abilities().max_pin {
        return None;
    }
    let ptr = mapping.ptr.wrapping_add(start as usize);
    kept.give_back_overlap(ptr, len);
    if kept.is_full() {
        kept.give_back_all();
    }
    mapping.populate(start..start + len as u64);
    // SAFETY: the mapping lives until the pins are given back: `Pins` holds it.
    match unsafe { device.pin(ptr, len) } {
        Ok(pin) => Some((start, pin)),
        Err(e) => {
            if e.kind == ErrorKind::Unsupported {
                work.sources[some.first()?.source as usize].file.pins_refused.store(true, Relaxed);
            }
            None
        }
    }
}
