//! Dense fragments: their pages are registered for this batch alone, and a GPU kernel gathers them.
//!
//! ```text
//!   fragments, by the part of the file that they are in
//!     part 0   part 1   part 2   part 3   part 4   part 5     others
//!     caller: register, list ──>       <── copying threads, a few fragments at a time
//!     │                           meet: split_range.rs
//!     ▼
//!   all bytes have arrived ─> the pages are unpinned as those of single requests are (transfer/src/unpin.rs)
//! ```
//!
//! Run by the caller: the driver registers one range at a time, from any thread. Parts are short, because the caller
//! also launches the buffers of the readers, between two of them: a launch by another thread would wait until all is
//! registered (batch_readers.rs). Copy workers, which launch themselves (copy_engine.rs), therefore start only
//! afterwards. Fragments so dense that copying would hardly be faster come first, and only the caller takes those.
//! Fragments that cannot be registered are copied afterwards.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_device::{Device, ErrorKind, Pin};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::PAGE;

use crate::batch_readers::BatchReaders;
use crate::copy_engine::CopyEngine;
use crate::device_sink::{DeviceSink, PackBuffer, SinkWriter};
use crate::partition::Partitions;
use crate::state::{BatchState, Fragment};
use spinio_transfer::Mapping;

/// Entries per launch: usually those of several parts. Each launch costs the caller some microseconds and a bounce
/// buffer, and the entries of the last one are gathered when nothing is left to register.
const MAX_ENTRIES: usize = 8 << 10;

/// A list that is being written, of one or several parts.
struct OpenList {
    writer: SinkWriter,
    buffer: Option<PackBuffer>,
    entries: usize,
    bytes: u64,
    /// Parts whose fragments are in the buffer.
    parts: Vec<Range<usize>>,
    started: Instant,
}

/// Ranges that were registered, and are in flight.
pub(crate) struct RegisteredParts {
    work: Arc<BatchState>,
    /// One per sink.
    lists: Vec<Option<OpenList>>,
    pins: Vec<(&'static dyn Device, Pin, Arc<Mapping>)>,
    bytes: u64,
    /// Fragments that could not be registered.
    fallback: Vec<Fragment>,
}

/// Takes parts from the front until it meets the threads that copy from the back, and is launcher for the readers.
pub(crate) fn run(copies: &CopyEngine, partitions: &Partitions, readers: Option<&BatchReaders>) -> RegisteredParts {
    let work = &copies.work;
    let lists = work.sinks.iter().map(|_| None).collect();
    let mut all = RegisteredParts { work: Arc::clone(work), lists, pins: Vec::new(), bytes: 0, fallback: Vec::new() };
    // File, device and mapping of the part before; none if it failed. A failed registration is not repeated.
    let (mut last, mut mapping) = (None, None);
    let mut taken = 0;
    for &end in &partitions.ends {
        if let Some(readers) = readers {
            readers.pump();
        }
        // Fragments that cannot be registered are copied by the other threads, except those that they must not take.
        if taken >= partitions.caller_only && !all.within_limits() {
            break;
        }
        let Some(range) = copies.range.take_front(end) else { break };
        taken = range.end;
        let Fragment { source, sink, .. } = copies.fragments[range.start];
        if last.replace((source, sink)) != Some((source, sink)) {
            mapping = map_source(work, source);
        }
        let pinned = mapping.as_ref().and_then(|mapping| all.register_part(mapping, &copies.fragments[range.clone()]));
        let listed = match pinned {
            Some((start, device_ptr)) => all.add_fragments(&copies.fragments, range, start, device_ptr, readers),
            None => all.fall_back(&copies.fragments[range]),
        };
        if !listed {
            mapping = None;
        }
    }
    for which in 0..all.lists.len() {
        all.send(which, &copies.fragments);
    }
    all
}

/// A mapping of a file, as long as the file was when the batch began.
fn map_source(work: &BatchState, source: u16) -> Option<Arc<Mapping>> {
    let source = &work.sources[source as usize];
    let (kernel, file, size) = (work.ctx.reader.files.sys(), Arc::clone(&source.file), source.size);
    file.cached_mapping(size).or_else(|| {
        work.ctx
            .reader
            .files
            .shadow_workers()?
            .for_key(source.file.storage)
            .run_blocking(move || file.mapping(kernel, size))?
    })
}

impl RegisteredParts {
    /// True if nothing has failed, and no more bytes are registered than may wait to be unpinned.
    fn within_limits(&self) -> bool {
        self.fallback.is_empty() && self.bytes <= self.work.ctx.reader.files.unpin().max_pending()
    }

    /// Registers a part: its offset in the file, and its device address.
    fn register_part(&mut self, mapping: &Arc<Mapping>, some: &[Fragment]) -> Option<(u64, u64)> {
        if self.bytes > self.work.ctx.reader.files.unpin().max_pending() {
            return None;
        }
        let (start, pin) = pin_fragments(&self.work, mapping, some)?;
        let device = self.work.sinks[some.first()?.sink as usize].device;
        let device_ptr = device.pin_device_ptr(&pin);
        self.bytes += pin.len as u64;
        self.pins.push((device, pin, Arc::clone(mapping)));
        Some((start, device_ptr.ok()?))
    }

    /// Lists the fragments of a registered part; false if they, or others before them, are to be read again.
    fn add_fragments(
        &mut self,
        items: &[Fragment],
        range: Range<usize>,
        start: u64,
        device_ptr: u64,
        readers: Option<&BatchReaders>,
    ) -> bool {
        let mut rest = &items[range.clone()];
        while let Some(first) = rest.first() {
            let which = first.sink as usize;
            // A thread that may have to wait for a buffer must not have any.
            if self.lists[which].as_ref().is_none_or(|open| open.buffer.is_none()) {
                (0..self.lists.len()).for_each(|other| _ = self.send(other, items));
            }
            let list = self.lists[which].get_or_insert_with(|| OpenList::new(&self.work.sinks[which]));
            if !list.ensure_buffer(readers) {
                return self.fall_back(&items[range]);
            }
            list.parts.push(range.clone());
            let (few, tail) = rest.split_at(rest.len().min(MAX_ENTRIES - list.entries));
            list.push_fragments(few, start, device_ptr);
            rest = tail;
            if list.entries == MAX_ENTRIES && !self.send(which, items) {
                return false;
            }
        }
        true
    }

    fn fall_back(&mut self, some: &[Fragment]) -> bool {
        self.fallback.extend_from_slice(some);
        false
    }

    /// Sends the list to a sink, if there is one; false if that failed: its parts are to be read again.
    fn send(&mut self, which: usize, items: &[Fragment]) -> bool {
        let Some(list) = &mut self.lists[which] else { return true };
        let Some(buffer) = list.buffer.take() else { return true };
        let (parts, bytes) = (std::mem::take(&mut list.parts), std::mem::take(&mut list.bytes));
        list.entries = 0;
        match list.writer.send(buffer) {
            Ok(()) => {
                let stats = self.work.ctx.reader.files.stats();
                stats.record_piece(&self.work.span, Route::Gather, Reason::CachedLarge, 0, bytes, list.started);
                true
            }
            Err(_) => {
                parts.into_iter().for_each(|part| self.fallback.extend_from_slice(&items[part]));
                false
            }
        }
    }

    /// Waits for launches in flight; returns the fragments that could not be registered.
    pub(crate) fn finish(mut self) -> Vec<Fragment> {
        std::mem::take(&mut self.lists).into_iter().flatten().for_each(|open| open.writer.finish());
        std::mem::take(&mut self.fallback)
    }
}

impl OpenList {
    fn new(sink: &Arc<DeviceSink>) -> OpenList {
        let parts = Vec::new();
        OpenList { writer: SinkWriter::new(sink), buffer: None, entries: 0, bytes: 0, parts, started: Instant::now() }
    }

    /// Whether there is a buffer for the list; acquires an empty one if needed.
    fn ensure_buffer(&mut self, readers: Option<&BatchReaders>) -> bool {
        if self.buffer.is_some() {
            return true;
        }
        let sink = &self.writer.sink;
        let Ok(block) = readers.map_or_else(|| sink.staging.acquire(), BatchReaders::acquire_block) else {
            return false;
        };
        let buffer = PackBuffer::new(sink, block);
        // A list must be in memory that a GPU kernel can read.
        if !buffer.gathers() {
            sink.staging.release(buffer.into_block());
            return false;
        }
        self.buffer = Some(buffer);
        self.started = Instant::now();
        true
    }

    /// Adds fragments of a part that begins at `start` in the file and has the device address `view`.
    fn push_fragments(&mut self, items: &[Fragment], start: u64, device_ptr: u64) {
        let Some(buffer) = &mut self.buffer else { return };
        for item in items {
            buffer.push_entry(device_ptr + (item.offset - start), item.dest, u64::from(item.len));
            self.bytes += u64::from(item.len);
        }
        self.entries += items.len();
    }
}

impl Drop for RegisteredParts {
    fn drop(&mut self) {
        // After a panic these are still here: a GPU kernel may be reading the pages.
        for open in self.lists.drain(..).flatten() {
            if let Some(buffer) = open.buffer {
                open.writer.sink.staging.release(buffer.into_block());
            }
        }
        let ctx = &self.work.ctx;
        let any = !self.pins.is_empty();
        for (device, pin, mapping) in self.pins.drain(..) {
            ctx.reader.files.unpin().defer(device, pin, mapping);
        }
        if any {
            ctx.reader.files.unpin().watch();
        }
    }
}

/// Registers the pages of some fragments; the offset in the file where they begin.
fn pin_fragments(work: &BatchState, mapping: &Mapping, some: &[Fragment]) -> Option<(u64, Pin)> {
    let sink = &work.sinks[some.first()?.sink as usize];
    let (device, pins) = (sink.device, &work.ctx.reader.files.unpin());
    let start = some.iter().map(|i| i.offset).min()? / PAGE as u64 * PAGE as u64;
    let end = some.iter().map(|i| i.offset + u64::from(i.len)).max()?;
    let len = ((end - start) as usize).next_multiple_of(PAGE);
    if start + len as u64 > mapping.len as u64 || len as u64 > device.capabilities().max_pin {
        return None;
    }
    let ptr = mapping.ptr.wrapping_add(start as usize);
    // Threads of a batch hold no signals.
    pins.unpin_overlapping(ptr, len, || ());
    if pins.is_full() {
        pins.unpin_all();
    }
    mapping.prefault(start..start + len as u64);
    // SAFETY: the mapping lives until the pages are unpinned: `Pins` keeps it.
    match unsafe { device.pin(ptr, len) } {
        Ok(pin) => Some((start, pin)),
        Err(e) => {
            if e.kind == ErrorKind::Unsupported {
                work.sources[some.first()?.source as usize].file.pin_refused.store(true, Relaxed);
            }
            None
        }
    }
}
