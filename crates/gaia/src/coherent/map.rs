//! A map whose addresses are those of a mapping of the file.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use spinio_device::{Device, PAGE_BYTES, PageableAccess};
use spinio_host::lock;
use spinio_pagecache::messages::MapKind;
use spinio_pagecache::page_runs::PageRuns;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::mapping::{Mapping, MappingAdvice};
use super::source::Source;
use crate::call_checks::{pages_within, wait_for_stream};
use crate::map::{check_descriptor, spec};
use crate::page_states::{count_blocks, end_reading_without_block};
use crate::process_owned::ProcessOwned;
use crate::queued_calls::Queue;
use crate::state::{InPlaceWay, Info};
use crate::table_thread::TableThread;
use crate::{Access, Advice, Error, Result};

/// A range of a file, which kernels load and store in the page cache. It is unmapped when dropped.
pub struct Map {
    pub(crate) device: &'static dyn Device,
    access: Access,
    /// First byte in the file.
    offset: u64,
    bytes: u64,
    address: u64,
    // Dropped in this order.
    state: ProcessOwned<Mutex<State>>,
    thread: ProcessOwned<TableThread<Source>>,
    /// Releases in stream order.
    pub(super) queue: Arc<Queue>,
}

/// What changes, under one lock: calls on one map run one after another.
struct State {
    mapping: Mapping,
    /// Pages in an epoch for writing.
    writing: PageRuns<bool>,
    /// Pages that were acquired for reading.
    reading: PageRuns<bool>,
    /// Blocks of the program that read them.
    blocks: PageRuns<u32>,
    info: Info,
}

impl Map {
    /// Maps `bytes` bytes of the file from `offset`, which must be a multiple of 4096.
    ///
    /// # Errors
    /// ENOTSUP: kernels of the device do not access such memory; or the file is below no mount, and either is to be
    /// written, or not regular, or of a file system that other machines change. EACCES: the descriptor is not open for
    /// this access. EINVAL: offset, an empty range. Otherwise those of the mount's server.
    pub fn new(fd: Fd, offset: u64, bytes: u64, access: Access, device: &'static dyn Device) -> Result<Map> {
        let way = match device.pageable_access() {
            PageableAccess::None => {
                let sentence = format!("Kernels of {} do not access memory that is not registered", device.id());
                return Err(Error::new(Errno::NOTSUP, sentence));
            }
            PageableAccess::Faults => InPlaceWay::Faults,
            PageableAccess::HostPageTables => InPlaceWay::HostPageTables,
        };
        check_descriptor(fd, access)?;
        let (tid, spec) = (linux::gettid(), spec(offset, bytes, access, MapKind::Coherent)?);
        let thread = TableThread::spawn(move || Source::open(tid, fd, spec))?;
        let len = spec.pages.checked_mul(PAGE_BYTES).ok_or_else(|| Error::of(Errno::NOMEM, "reserve addresses"))?;
        let mut mapping = Mapping::reserve(offset, len, access)?;
        let size = thread.run(Source::visit)?.size;
        mapping.fit(&thread, size)?;
        let address = mapping.start();
        let info = Info { file_size: size, in_place: way as u64, ..Info::default() };
        let (writing, reading, blocks) = (PageRuns::new(false), PageRuns::new(false), PageRuns::new(0));
        let state = State { mapping, writing, reading, blocks, info };
        Ok(Map {
            device,
            access,
            offset,
            bytes,
            address,
            state: ProcessOwned::new(Mutex::new(state)),
            thread: ProcessOwned::new(thread),
            queue: Arc::default(),
        })
    }

    /// The address of the first byte, for kernels and for the CPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Begins an epoch. Returns the bytes of the range that are in the file; the others are zeros, and stores to whole
    /// pages of them are dropped.
    pub fn acquire(&self, offset: u64, len: u64, access: Access) -> Result<u64> {
        let pages = self.pages_of(offset, len)?;
        if access == Access::Write && self.access == Access::Read {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        let mut state = lock(&self.state);
        let found = self.thread.run(Source::visit)?;
        state.mapping.fit(&self.thread, found.size)?;
        state.info.file_size = found.size;
        state.info.reattached += u64::from(found.new_server);
        state.info.acquires += 1;
        match access {
            Access::Read => state.reading.set(pages, true),
            Access::Write => state.writing.set(pages, true),
        }
        Ok(found.size.saturating_sub(self.offset + offset).min(len))
    }

    /// Ends the epoch of the pages of a range, after the work that this thread's stream has queued: its stores have been
    /// visible since they were done.
    pub fn release(&self, offset: u64, len: u64) -> Result<()> {
        self.end_after_stream(offset, len, false)
    }

    /// Ends the epoch as [`Map::release`] does, but of pages that were not acquired too.
    ///
    /// # Errors
    /// ENOTSUP: a page was in an epoch for writing, whose stores stay.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.end_after_stream(offset, len, true)
    }

    fn end_after_stream(&self, offset: u64, len: u64, discard: bool) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        if lock(&self.state).has_open(&pages) {
            wait_for_stream(self.device)?;
        }
        self.end_epoch(offset, len, discard)
    }

    /// Ends the epoch, whatever the stream has queued.
    pub(super) fn end_epoch(&self, offset: u64, len: u64, discard: bool) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        let mut state = lock(&self.state);
        if !discard && !state.is_acquired(&pages) {
            return Err(Error::new(Errno::INVAL, "The range was not acquired"));
        }
        let stored = state.has_open(&pages);
        state.end(pages);
        if stored && discard {
            let sentence =
                "The stores of the epoch are in the file already: those of a coherent map cannot be discarded";
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        state.info.releases += u64::from(stored);
        Ok(())
    }

    /// Kernels no longer load pages of a range, unless a block reads them, or they are in an epoch for writing, which goes on.
    pub fn end_reading(&self, offset: u64, len: u64) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        lock(&self.state).end_reading(pages);
        Ok(())
    }

    /// A block of the program begins that will acquire a range for reading. Until its end no release, and no end of another
    /// block, ends that.
    pub fn begin_block(&self, offset: u64, len: u64) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        count_blocks(&mut lock(&self.state).blocks, pages, |blocks| blocks.saturating_add(1));
        Ok(())
    }

    /// It has ended, or could not acquire them; [`Map::end_reading`] with the last one.
    pub fn end_block(&self, offset: u64, len: u64) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        let mut state = lock(&self.state);
        count_blocks(&mut state.blocks, pages.clone(), |blocks| blocks.saturating_sub(1));
        state.end_reading(pages);
        Ok(())
    }

    /// Returns when all bytes of the file are on storage.
    pub fn sync(&self, offset: u64, len: u64) -> Result<()> {
        self.pages_of(offset, len)?;
        self.wait_for_queued();
        self.thread.run(Source::sync)
    }

    /// Says what the program will do with a range.
    pub fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        let bytes = pages.start as usize * PAGE_BYTES..pages.end as usize * PAGE_BYTES;
        let state = lock(&self.state);
        match advice {
            Advice::WillNeed => state.mapping.advise(bytes, MappingAdvice::WillNeed),
            Advice::Sequential => state.mapping.advise(0..usize::MAX, MappingAdvice::Sequential),
            Advice::Random => state.mapping.advise(0..usize::MAX, MappingAdvice::Random),
            Advice::DontNeed => {
                drop(state);
                self.end_reading(offset, len)
            }
            Advice::Lend => Err(Error::new(Errno::NOTSUP, "A map in place has no device memory to lend")),
        }
    }

    /// What the map has done.
    pub fn info(&self) -> Info {
        lock(&self.state).info
    }

    /// The pages of `len` bytes from byte `offset` of the map.
    pub(crate) fn pages_of(&self, offset: u64, len: u64) -> Result<Range<u64>> {
        pages_within(offset, len, self.bytes)
    }
}

impl State {
    /// Whether each page is in an epoch, or was acquired for reading.
    fn is_acquired(&self, pages: &Range<u64>) -> bool {
        self.writing.runs(pages.clone()).all(|(run, open)| open || self.reading.runs(run).all(|(_, reading)| reading))
    }

    fn has_open(&self, pages: &Range<u64>) -> bool {
        self.writing.runs(pages.clone()).any(|(_, open)| open)
    }

    fn end(&mut self, pages: Range<u64>) {
        self.writing.set(pages.clone(), false);
        self.end_reading(pages);
    }

    fn end_reading(&mut self, pages: Range<u64>) {
        end_reading_without_block(&mut self.reading, &self.blocks, pages);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.state.is_own_process() {
            let _ = wait_for_stream(self.device);
        }
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "coherent::Map {{ address: {:#x}, bytes: {} }}", self.address, self.bytes)
    }
}
