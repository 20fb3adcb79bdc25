//! The addresses of a map: the mapping of the file, and zeros past its end.

#![expect(unsafe_code, reason = "mappings of a file, at addresses that are reserved")]

use std::ops::Range;

use spinio_device::PAGE_BYTES;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::source::Source;
use crate::table_thread::TableThread;
use crate::{Access, Error, Result};

const PROT_READ: u32 = 1;
const PROT_WRITE: u32 = 2;
const MAP_SHARED: u32 = 1;
const MAP_PRIVATE: u32 = 2;
const MAP_FIXED: u32 = 0x10;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_NORESERVE: u32 = 0x4000;
const MADV_DONTFORK: u32 = 10;

/// Advice of `madvise` about a mapping of a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum MappingAdvice {
    Random = 1,
    Sequential = 2,
    WillNeed = 3,
}

/// The addresses; they are unmapped when this is dropped.
pub(super) struct Mapping {
    start: *mut u8,
    len: usize,
    /// The first byte in the file.
    offset: u64,
    protection: u32,
    /// Bytes from the start that are the file's, in whole pages; the others are private zeros.
    inside: usize,
}

// SAFETY: the pointer is to addresses that this value owns, and never dereferenced here.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Addresses for `len` bytes, whole pages; all of them zeros until [`Mapping::fit`].
    pub(super) fn reserve(offset: u64, len: usize, access: Access) -> Result<Mapping> {
        let protection = match access {
            Access::Read => PROT_READ,
            Access::Write => PROT_READ | PROT_WRITE,
        };
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the Linux kernel's choice.
        let start = unsafe { linux::mmap(core::ptr::null_mut(), len, protection, flags, -1, 0) };
        let start = start.map_err(|e| Error::of(e, "reserve addresses"))?;
        let mapping = Mapping { start, len, offset, protection, inside: 0 };
        mapping.keep_from_children(0..len)?;
        Ok(mapping)
    }

    /// The address of the first byte.
    pub(super) fn start(&self) -> u64 {
        self.start as u64
    }

    /// Maps the file up to its size, and zeros from there on. What kernels have stored past the old end is dropped.
    pub(super) fn fit(&mut self, thread: &TableThread<Source>, size: u64) -> Result<()> {
        let pages = size.saturating_sub(self.offset).div_ceil(PAGE_BYTES as u64);
        let wanted = pages.saturating_mul(PAGE_BYTES as u64).min(self.len as u64) as usize;
        if wanted > self.inside {
            let (part, to) = (self.inside..wanted, Placement::of(self));
            thread.run(move |source| to.map(part, MAP_SHARED, source.descriptor()))?;
            self.keep_from_children(self.inside..wanted)?;
        } else if wanted < self.inside {
            Placement::of(self).map(wanted..self.inside, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)?;
            self.keep_from_children(wanted..self.inside)?;
        }
        self.inside = wanted;
        Ok(())
    }

    /// Passes advice about the bytes of a range that are the file's on to the Linux kernel.
    pub(super) fn advise(&self, range: Range<usize>, advice: MappingAdvice) -> Result<()> {
        let end = range.end.min(self.inside);
        if range.start >= end {
            return Ok(());
        }
        // SAFETY: its own mapping, whose bytes this advice does not change.
        unsafe { linux::madvise(self.start.wrapping_add(range.start), end - range.start, advice as u32) }
            .map_err(|e| Error::of(e, "advise the Linux kernel"))
    }

    /// A forked child has no maps.
    fn keep_from_children(&self, part: Range<usize>) -> Result<()> {
        // SAFETY: its own mapping; in this process nothing changes.
        unsafe { linux::madvise(self.start.wrapping_add(part.start), part.len(), MADV_DONTFORK) }
            .map_err(|e| Error::of(e, "keep a map from forked children"))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: its own mapping, which no kernel uses any more.
        let _ = unsafe { linux::munmap(self.start, self.len) };
    }
}

/// Where a part of the mapping goes, for the thread that has the descriptor.
#[derive(Clone, Copy)]
struct Placement {
    address: usize,
    offset: u64,
    protection: u32,
}

impl Placement {
    fn of(mapping: &Mapping) -> Placement {
        Placement { address: mapping.start as usize, offset: mapping.offset, protection: mapping.protection }
    }

    fn map(self, part: Range<usize>, flags: u32, fd: Fd) -> Result<()> {
        let (at, offset) = (self.address + part.start, if fd < 0 { 0 } else { self.offset + part.start as u64 });
        // SAFETY: addresses of the mapping, which `Mapping` owns. Kernels that touch them meanwhile find either pages.
        let mapped = unsafe { linux::mmap(at as *mut u8, part.len(), self.protection, flags | MAP_FIXED, fd, offset) };
        mapped.map(drop).map_err(|e| match e {
            Errno::NODEV => Error::new(Errno::NOTSUP, "Files of this file system cannot be mapped"),
            e => Error::of(e, "map the file"),
        })
    }
}
