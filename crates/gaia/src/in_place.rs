//! Memory of a map that is read in place: the mapping of the mounted file itself, registered with the device. Kernels load
//! the pages of the Linux kernel's page cache over the bus, and no byte is copied.
//!
//! ```text
//!   reserved addresses  ├── chunk ──┼── chunk ──┼── chunk ──┤   each: mapped, faulted in, registered, by its first acquire
//!                            │
//!   page cache of the mount [p][p][p]    `write` and stores to mappings: the same pages, seen at once
//!                            └─ INVAL (a release), truncation: other pages, and the registration keeps the old ones
//! ```
//!
//! So an acquire registers again what has changed, as the server knows it: it lists the pages as for a replica, and what
//! would be a fetch is a new registration of their chunk, at the same address. The server answers between releases only,
//! because a page that is registered after a commit and before its INVAL would be the old one.
//!
//! Known flaws: while a program punches a hole, cuts the file, or writes with O_DIRECT, an acquire may register a page
//! that the Linux kernel replaces before that call returns; it is registered again after the next change of the page. A
//! chunk is registered as a whole, with pages that were not acquired.

#![expect(unsafe_code, reason = "mappings of a file, at addresses that are reserved")]

use std::sync::Mutex;

use spinio_device::{DeviceAddr, ErrorKind, PAGE_BYTES, Pin, ReplicaMemory, StreamId, WaitMode};
use spinio_host::lock;
use spinio_pagecache::messages::Run;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::link::{Link, LinkState};
use crate::{Error, Result};

/// A chunk is a 64th of the map, in these bounds: registering one takes longer than its bytes, and unregistering waits
/// for kernels.
const CHUNK_MIN: usize = 2 << 20;
const CHUNK_MAX: usize = 64 << 20;
/// Times that the file is cut while its pages are faulted in.
const ATTEMPTS: usize = 16;

const PROT_NONE: u32 = 0;
const PROT_READ: u32 = 1;
const MAP_SHARED: u32 = 1;
const MAP_PRIVATE: u32 = 2;
const MAP_FIXED: u32 = 0x10;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_NORESERVE: u32 = 0x4000;
const MADV_DONTFORK: u32 = 10;
const MADV_POPULATE_READ: u32 = 22;

/// Addresses for all pages of a map, and what is registered of them.
pub(crate) struct InPlace {
    device: &'static dyn ReplicaMemory,
    start: *mut u8,
    bytes: usize,
    /// Bytes of a chunk.
    chunk: usize,
    pins: Mutex<Vec<Option<Pin>>>,
}

// SAFETY: the pointer is to addresses that this value owns; what is mapped there is changed under the lock.
unsafe impl Send for InPlace {}
// SAFETY: as above.
unsafe impl Sync for InPlace {}

impl InPlace {
    /// Reserves addresses.
    pub(crate) fn reserve(device: &'static dyn ReplicaMemory, pages: usize) -> Result<InPlace> {
        let capabilities = device.capabilities();
        if !capabilities.can_pin {
            return Err(not_supported(device));
        }
        let bytes = pages.checked_mul(PAGE_BYTES).ok_or_else(|| Error::of(Errno::NOMEM, "reserve addresses"))?;
        let wanted = (bytes / 64).clamp(CHUNK_MIN, CHUNK_MAX) as u64;
        let chunk = 1usize << wanted.min(capabilities.max_pin).max(PAGE_BYTES as u64).ilog2();
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the Linux kernel's choice.
        let start = unsafe { linux::mmap(core::ptr::null_mut(), bytes, PROT_NONE, flags, -1, 0) };
        let start = start.map_err(|e| Error::of(e, "reserve addresses"))?;
        let pins = (0..bytes.div_ceil(chunk)).map(|_| None).collect();
        Ok(InPlace { device, start, bytes, chunk, pins: Mutex::new(pins) })
    }

    /// The address of the first page.
    pub(crate) fn start(&self) -> u64 {
        self.start as u64
    }

    /// Maps and registers the chunks of these pages, again if they were; returns the bytes. No kernel uses the pages;
    /// where kernels use others, it waits for them.
    pub(crate) fn register(&self, link: &Link, runs: &[Run]) -> Result<u64> {
        let mut pins = lock(&self.pins);
        let (mut next, mut registered) = (0, 0);
        for run in runs {
            let first = run.pages().start * PAGE_BYTES / self.chunk;
            let end = (run.pages().end * PAGE_BYTES).div_ceil(self.chunk);
            for (number, pin) in pins.iter_mut().enumerate().take(end).skip(first.max(next)) {
                if let Some(old) = pin.take() {
                    self.device.unpin(old);
                }
                let (new, bytes) = self.register_chunk(link, number)?;
                (*pin, registered) = (Some(new), registered + bytes);
            }
            next = next.max(end);
        }
        Ok(registered)
    }

    fn register_chunk(&self, link: &Link, number: usize) -> Result<(Pin, u64)> {
        let at = number * self.chunk;
        let len = self.chunk.min(self.bytes - at);
        let start = self.start.wrapping_add(at);
        let address = start as usize;
        for attempt in 1.. {
            link.run(move |link| link.map_in_place(address, at, len))?;
            // SAFETY: the mapping was just made. Loads of pages that are not in memory ask the server.
            match unsafe { linux::madvise(start, len, MADV_POPULATE_READ) } {
                Ok(()) => break,
                // Pages past the end of the file: it was cut meanwhile.
                Err(Errno::FAULT) if attempt < ATTEMPTS => {}
                Err(Errno::FAULT) => return Err(Error::new(Errno::IO, "The pages of the file cannot be read")),
                Err(e) => return Err(Error::of(e, "read the pages of the file")),
            }
        }
        // SAFETY: the mapping stays until the pin is unpinned.
        let pin = unsafe { self.device.pin(start, len) }.map_err(|e| match e.kind {
            ErrorKind::Unsupported => not_supported(self.device),
            _ => Error::device(e, "register the pages of the file"),
        })?;
        // Kernels see one range, whose addresses the program has.
        if self.device.map_pin(&pin).ok() != Some(start as u64) {
            self.device.unpin(pin);
            return Err(not_supported(self.device));
        }
        Ok((pin, len as u64))
    }

    /// Copies registered bytes, as the device has them, into memory of the device.
    pub(crate) fn copy(&self, to: DeviceAddr, at: u64, len: usize) -> Result<()> {
        let (pins, stream) = (lock(&self.pins), StreamId(0));
        let (chunk, within) = (at as usize / self.chunk, at as usize % self.chunk);
        let pin = pins.get(chunk).and_then(Option::as_ref).filter(|pin| within + len <= pin.len);
        let pin = pin.ok_or_else(|| Error::new(Errno::INVAL, "The bytes are not registered"))?;
        // SAFETY: waited for below, while the pin stays.
        let copied = unsafe { self.device.copy_pinned(stream, to, pin, within, len) };
        let waited = self.device.synchronize(stream, WaitMode::Block);
        copied.and(waited).map_err(|e| Error::device(e, "copy registered bytes"))
    }

    /// Unregisters, which waits for kernels, and unmaps.
    pub(crate) fn end(&self) {
        let pins: Vec<Pin> = lock(&self.pins).iter_mut().filter_map(Option::take).collect();
        pins.into_iter().for_each(|pin| self.device.unpin(pin));
        // SAFETY: its own mapping; nothing is registered any more, and no kernel uses it.
        let _ = unsafe { linux::munmap(self.start, self.bytes) };
    }
}

fn not_supported(device: &'static dyn ReplicaMemory) -> Error {
    Error::new(Errno::NOTSUP, format!("Kernels of {} cannot read the page cache: map without IN_PLACE", device.id()))
}

impl LinkState {
    /// Maps the file over `len` reserved bytes at an address, from byte `at` of the map; zeros past the end of the file.
    fn map_in_place(&mut self, address: usize, at: usize, len: usize) -> Result<()> {
        let offset = (self.spec.first * PAGE_BYTES as u64) + at as u64;
        let inside =
            self.file.size()?.saturating_sub(offset).next_multiple_of(PAGE_BYTES as u64).min(len as u64) as usize;
        let map = |at: usize, len: usize, flags: u32, fd: Fd, offset: u64| {
            if len == 0 {
                return Ok(());
            }
            // SAFETY: addresses that the map has reserved. What was there is not registered any more, and no kernel uses it.
            let mapped = unsafe { linux::mmap(at as *mut u8, len, PROT_READ, flags | MAP_FIXED, fd, offset) };
            // A forked child has no maps.
            // SAFETY: the mapping that was just made.
            mapped.and_then(|start| unsafe { linux::madvise(start, len, MADV_DONTFORK) })
        };
        map(address, inside, MAP_SHARED, self.file.descriptor(), offset)
            .and_then(|()| map(address + inside, len - inside, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
            .map_err(|e| Error::of(e, "map the file"))
    }
}
