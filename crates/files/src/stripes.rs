//! The position of a file in the stripes of an array with parity.
//!
//! ```text
//!   device   │ stripe 7     │ stripe 8     │ stripe 9     │      its phase: the offset of its byte 0 in a stripe (sysfs)
//!   file             0 ..............................>           the extents of the file on the device (FIEMAP)
//!   offset 0 of the file is the start of a stripe only by chance
//! ```
//!
//! Writes that bypass the page cache should cover whole stripes, since for others the array reads old parity, and the
//! writer waits for that. Two callers need this: large direct writes, which end their chunks at stripe boundaries, and
//! NVMMU, which assembles stripes in memory.
//!
//! The result is cached with the file, for as long as its length and its allocated blocks are unchanged. A file that
//! was moved on the device nevertheless (defragmented, or rewritten with the same length) is split at other offsets
//! until its state is dropped; correctness does not depend on it.
//!
//! Known flaws: layers between file system and array that do not report their start offset (LVM, dm-crypt) hide the
//! phase, unless the stripe width divides that offset. Bytes without a position yet are assumed to follow those before
//! them; if there are none before them, nothing is known.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use spinio_plan::geometry::{BlockStack, Stripe};
use spinio_plan::stripe_layout::{DeviceExtent, StripeLayout};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind, Stat};

use crate::ctx::FilesCtx;
use spinio_host::lock;
use spinio_host::shadow_fd::ShadowFd;
use spinio_host::syscalls::Syscalls;

/// An array with parity under a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParityArray {
    /// Bytes of data in a stripe.
    pub width: u64,
    /// The offset in a stripe of byte 0 of the device under the file system.
    pub phase: u64,
}

/// Why a file has no stripes that writes should be aligned to, or no known ones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoStripeMap {
    /// There is no block device under it: the file system's name.
    NoBlockDevice(String),
    /// No array with parity.
    NoParity,
    /// A layer hides the offset of the file system's device on the array.
    UnknownPhase,
    /// Stripes too wide to assemble, or not of whole pages; their width in bytes.
    UnsupportedWidth(u64),
    /// The file system does not report the extents of the file.
    NoExtents(Errno),
}

impl fmt::Display for NoStripeMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoStripeMap::NoBlockDevice(name) => write!(f, "{name} has no block device"),
            NoStripeMap::NoParity => f.write_str("no array with parity is under the file"),
            NoStripeMap::UnknownPhase => f.write_str("the offset of the file's device on the array is unknown"),
            NoStripeMap::UnsupportedWidth(width) => write!(f, "stripes of {width} bytes are not assembled"),
            NoStripeMap::NoExtents(errno) => write!(f, "the file system does not report the file's extents: {errno}"),
        }
    }
}

/// The widest stripe that is assembled in memory.
const MAX_WIDTH: u64 = 64 << 20;

/// Bytes of a file that are surveyed at once: writes are often sequential.
const SURVEY_WINDOW: u64 = 64 << 20;

/// Extents requested at once.
const MAX_EXTENTS: usize = 4096;

/// Shared with a snapshot or a reflinked copy: a write allocates other blocks.
const EXTENT_SHARED: u32 = 0x2000;

/// A range of a file, and the stripes in it.
#[derive(Clone, Debug)]
pub struct StripeMap {
    /// Bytes of the file that have a position on the device.
    pub range: Range<u64>,
    /// Their stripes, and the other extents of the file there.
    pub layout: StripeLayout,
}

impl ParityArray {
    /// The array with parity under a file; if there is none, why writes need no alignment to stripes.
    pub fn from_stack(stack: &BlockStack) -> Result<ParityArray, NoStripeMap> {
        let top = stack.top.as_ref().ok_or_else(|| NoStripeMap::NoBlockDevice(stack.file_system.clone()))?;
        let stripe = Stripe::from_layer(top).filter(|s| s.parity > 0).ok_or(NoStripeMap::NoParity)?;
        let width = stripe.width();
        let phase = stripe.phase.ok_or(NoStripeMap::UnknownPhase)?;
        if width > MAX_WIDTH || !width.is_multiple_of(linux::PAGE as u64) {
            return Err(NoStripeMap::UnsupportedWidth(width));
        }
        Ok(ParityArray { width, phase })
    }

    /// The stripes from the start of a range on, as far as the file has a position on the device. `fd` is a descriptor
    /// of the calling thread.
    pub fn survey(self, sys: &dyn Syscalls, fd: Fd, range: &Range<u64>) -> Result<StripeMap, Errno> {
        let start = range.start.saturating_sub(self.width);
        let end = range.end.max(range.start.saturating_add(SURVEY_WINDOW)).saturating_add(self.width);
        let extents = sys.extents(fd, start, end - start, MAX_EXTENTS)?;
        let mapped: Vec<_> =
            extents.iter().filter(|e| e.flags & (linux::EXTENT_NOT_IN_PLACE | EXTENT_SHARED) == 0).collect();
        let mut mapped_end = range.start;
        for extent in &mapped {
            if extent.logical <= mapped_end {
                mapped_end = mapped_end.max(extent.logical.saturating_add(extent.len));
            }
        }
        let runs = mapped.iter().map(|e| DeviceExtent { file: e.logical, device: e.physical, len: e.len });
        let layout = StripeLayout::new(self.width, self.phase, runs);
        // The last stripe of a window may be truncated by it.
        let mapped_end = if mapped_end >= end { end - self.width } else { mapped_end };
        Ok(StripeMap { range: range.start..mapped_end, layout })
    }

    /// The same for the array itself, or for a device on it.
    fn whole_device(self, len: u64) -> StripeMap {
        StripeMap {
            range: 0..len,
            layout: StripeLayout::new(self.width, self.phase, [DeviceExtent { file: 0, device: 0, len }]),
        }
    }
}

/// The last result, and the length and allocated blocks of the file at that time.
struct CachedMap {
    size: u64,
    blocks: u64,
    map: Arc<StripeMap>,
}

/// The stripes of a file, as far as they were surveyed.
pub struct FileStripes {
    /// The array under the file, or why there is none.
    pub array: Result<ParityArray, NoStripeMap>,
    extents_errno: OnceLock<Errno>,
    cached: Mutex<Option<CachedMap>>,
}

impl FileStripes {
    /// Nothing is surveyed yet.
    pub fn new(stack: &BlockStack) -> FileStripes {
        FileStripes { array: ParityArray::from_stack(stack), extents_errno: OnceLock::new(), cached: Mutex::default() }
    }

    /// The cached result, if length and allocated blocks of the file are unchanged.
    pub fn cached(&self, stat: &Stat) -> Option<Arc<StripeMap>> {
        let cached = lock(&self.cached);
        let same = cached.as_ref().filter(|k| (k.size, k.blocks) == (stat.size, stat.blocks))?;
        Some(Arc::clone(&same.map))
    }

    /// Why the stripes of a range are unknown, although there are some. `file`: its shadow descriptor, and the length
    /// of a block device.
    pub fn unknown_reason(
        &self,
        ctx: &FilesCtx,
        file: (&Arc<ShadowFd>, u64),
        stat: &Stat,
        range: Range<u64>,
    ) -> Option<NoStripeMap> {
        match &self.array {
            Err(NoStripeMap::NoBlockDevice(_) | NoStripeMap::NoParity) => None,
            Err(other) => Some(other.clone()),
            Ok(_) => {
                if self.cached(stat).is_none() {
                    self.survey_and_cache(ctx, file, stat, range);
                }
                self.extents_errno.get().map(|errno| NoStripeMap::NoExtents(*errno))
            }
        }
    }

    /// Surveys a range and caches the result. `stat`: of the file before anything of the range is written.
    pub fn survey_and_cache(
        &self,
        ctx: &FilesCtx,
        (fd, size): (&Arc<ShadowFd>, u64),
        stat: &Stat,
        range: Range<u64>,
    ) -> Option<Arc<StripeMap>> {
        let array = *self.array.as_ref().ok().filter(|_| self.extents_errno.get().is_none())?;
        let map = if stat.kind == FileKind::Block {
            array.whole_device(size)
        } else {
            let (sys, key, fd) = (ctx.sys, fd.share_key(), Arc::clone(fd));
            match ctx.workers.shadow()?.for_key(key).run_blocking(move || array.survey(sys, fd.get(), &range))? {
                Ok(map) => map,
                Err(errno) => {
                    let _ = self.extents_errno.set(errno);
                    return None;
                }
            }
        };
        let map = Arc::new(map);
        let cached = CachedMap { size: stat.size, blocks: stat.blocks, map: Arc::clone(&map) };
        *lock(&self.cached) = Some(cached);
        Some(map)
    }
}
