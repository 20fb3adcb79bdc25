//! Pieces that lie close together: their pages are registered for this batch alone, and a kernel gathers them.
//!
//! ```text
//!   items, by the part of the file they lie in
//!     │ part 0: register ─ launch
//!     │ part 1: register ─ launch       while the device fetches what lies in part 0
//!     ▼
//!   all has arrived ─> the pins are given back as those of single requests are (pins.rs)
//! ```
//!
//! By the caller: the driver registers one range at a time, whoever asks. What cannot be registered is copied.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_device::{ErrorKind, Pin};
use spinio_plan::{Crowd, Reason, Route};
use spinio_sys::linux::{self, PAGE};

use crate::batch::outlet::{Page, Pen};
use crate::batch::work::{HOST, Item, Work};
use crate::file::Mapping;

/// Bytes of a part at most.
const PART: u64 = 128 << 20;

/// Entries of a launch at most.
const ENTRIES: usize = 32 << 10;

/// Items of one file and device that are worth registering; the others stay. Those of one file and device lie together.
pub(crate) fn choose(work: &Work, items: &mut Vec<Item>) -> Vec<Vec<Item>> {
    let core = &work.core;
    let threads = core.batch_threads() as u64;
    // Many threads are no reason here: the choice below counts them.
    if matches!(core.may_register(), Err(reason) if reason != Reason::ManyThreads) {
        return Vec::new();
    }
    let mut chosen = Vec::new();
    let mut rest = Vec::new();
    for some in items.chunk_by(|a, b| (a.source, a.outlet) == (b.source, b.outlet)) {
        if pays(work, some, threads) { chosen.push(some.to_vec()) } else { rest.push((some[0].source, some[0].outlet)) }
    }
    if !chosen.is_empty() {
        items.retain(|i| rest.binary_search(&(i.source, i.outlet)).is_ok());
    }
    chosen
}

/// Whether items of one file and device are worth registering, and may be.
fn pays(work: &Work, some: &[Item], threads: u64) -> bool {
    if some[0].outlet == HOST {
        return false;
    }
    let (file, to) = (&work.sources[some[0].source as usize].file, &work.outlets[some[0].outlet as usize]);
    let refused = file.pins_refused.load(Relaxed);
    if !to.gathers() || !to.device.abilities().pins || !file.is_mappable() || refused {
        return false;
    }
    let first = some.iter().map(|i| i.offset).min().unwrap_or(0);
    let end = some.iter().map(|i| i.offset + u64::from(i.len)).max().unwrap_or(0);
    let bytes = some.iter().map(|i| u64::from(i.len)).sum();
    Crowd { pieces: some.len() as u64, bytes, span: end - first, threads }.pays_to_register()
}

/// Gathers items of one file and one device; those that could not be.
pub(crate) fn gather(work: &Arc<Work>, mut items: Vec<Item>) -> Vec<Item> {
    let Some(any) = items.first() else { return items };
    let core = &work.core;
    let (source, outlet) = (&work.sources[any.source as usize], &work.outlets[any.outlet as usize]);
    let device = outlet.device;
    let end = items.iter().map(|i| i.offset + u64::from(i.len)).max().unwrap_or(0);
    let (kernel, file) = (core.kernel, Arc::clone(&source.file));
    let mapping = file.kept_mapping(end).or_else(|| core.keepers()?.call(move || file.mapping(kernel, end))?);
    let Some(mapping) = mapping else { return items };
    let part = 1u64 << PART.min(device.abilities().max_pin).max(PAGE as u64).ilog2();
    // Items end where a unit of 256 KiB of the file does, so none lies in two parts unless these are shorter.
    items.sort_by_key(|i| i.offset / part);
    let mut pen = Pen::new(outlet);
    let mut pins: Vec<Pin> = Vec::new();
    let mut missed = Vec::new();
    for some in items.chunk_by(|a, b| a.offset / part == b.offset / part) {
        let begun = Instant::now();
        let sent = pin(work, &mapping, some, &mut pins).and_then(|(start, view)| list(&mut pen, some, start, view));
        match sent {
            Some(bytes) => {
                core.stats().piece(&work.watch, Route::Gather, Reason::CachedLarge, 0, bytes, begun);
            }
            None => missed.extend_from_slice(some),
        }
    }
    pen.finish();
    for pin in pins {
        core.pins.retire(device, pin, Arc::clone(&mapping));
    }
    core.watch_pins();
    missed
}

/// Registers the pages of some items; the offset in the file where they begin, and where the device sees them.
fn pin(work: &Work, mapping: &Mapping, some: &[Item], pins: &mut Vec<Pin>) -> Option<(u64, u64)> {
    let outlet = &work.outlets[some.first()?.outlet as usize];
    let (device, kept) = (outlet.device, &work.core.pins);
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
    // Fills the page tables in the kernel, without a lock of the driver.
    // SAFETY: reading advice on a live mapping destroys nothing.
    let _ = unsafe { linux::madvise(ptr, len, linux::MADV_POPULATE_READ) };
    // SAFETY: the mapping lives until the pins are given back: `Pins` holds it.
    let pin = unsafe { device.pin(ptr, len) };
    let pin = match pin {
        Ok(pin) => pin,
        Err(e) => {
            if e.kind == ErrorKind::Unsupported {
                let file = &work.sources[some.first()?.source as usize].file;
                file.pins_refused.store(true, Relaxed);
            }
            return None;
        }
    };
    let view = device.view_pin(&pin);
    pins.push(pin);
    view.ok().map(|view| (start, view))
}

/// Queues the items; how many bytes.
fn list(pen: &mut Pen, some: &[Item], start: u64, view: u64) -> Option<u64> {
    let mut bytes = 0;
    for few in some.chunks(ENTRIES) {
        let mut page = Page::new(&pen.outlet, pen.outlet.staging.take().ok()?);
        if !page.gathers() {
            pen.outlet.staging.give_back(page.into_block());
            return None;
        }
        for item in few {
            page.list(view + (item.offset - start), item.to, u64::from(item.len));
            bytes += u64::from(item.len);
        }
        pen.send(page).ok()?;
    }
    Some(bytes)
}
