//! Where the bytes of a file lie in the stripes of an array with parity.
//!
//! ```text
//!   device   │ stripe 7     │ stripe 8     │ stripe 9     │      its phase: where in a stripe byte 0 of it lies (sysfs)
//!   file             0 ..............................>           where each part of the file lies on it (FIEMAP)
//!   offset 0 of the file is no beginning of a stripe, unless by chance
//! ```
//!
//! Who writes around the page cache had better write whole stripes, since the array reads old parity for others, and the
//! writer waits for that. Two ask: large direct writes, which end their portions where a stripe ends (write/long.rs),
//! and NVMMU, which puts stripes together in memory.
//!
//! What was found is kept beside the file, for as long as its length and the room that it takes are what they were then.
//! A file that was moved on the device all the same (defragmented, or written anew in the same length) is cut at other
//! places until it is let go of, and nothing right depends on it.
//!
//! Known flaws: layers between file system and array that do not tell where they begin (LVM, dm-crypt) hide the phase,
//! unless the stripe divides what they begin at. Bytes that have no place yet are taken to follow those before them, and
//! where there are none before them nothing is known.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use spinio_plan::geometry::{Stack, Stripe};
use spinio_plan::shape::{Run, Shape};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind, Stat};

use crate::ctx::FilesCtx;
use spinio_host::shadow_fd::PrivateFd;
use spinio_host::syscalls::Kernel;
use spinio_host::lock;

/// An array with parity under a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Bytes of data in a stripe.
    pub width: u64,
    /// Where in a stripe byte 0 of the device under the file system lies.
    pub phase: u64,
}

/// Why a file has no stripes that writes should keep to, or none that are known.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoStripes {
    /// There is no block device under it: the file system's name.
    NoDevice(String),
    /// No array with parity.
    NoParity,
    /// A layer hides where the file system's device lies on the array.
    Hidden,
    /// Stripes that nobody would put together, of so many bytes.
    Width(u64),
    /// The file system does not tell where the file lies.
    NotTold(Errno),
}

impl fmt::Display for NoStripes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoStripes::NoDevice(name) => write!(f, "{name} lies on no block device"),
            NoStripes::NoParity => f.write_str("no array with parity is under the file"),
            NoStripes::Hidden => f.write_str("nothing tells where on the array the file's device begins"),
            NoStripes::Width(width) => write!(f, "stripes of {width} bytes are not put together"),
            NoStripes::NotTold(errno) => write!(f, "the file system does not tell where the file lies: {errno}"),
        }
    }
}

/// Stripes that nobody would put together in memory.
const WIDEST: u64 = 64 << 20;

/// Bytes of a file that are looked at together: writes follow each other.
const WINDOW: u64 = 64 << 20;

/// Extents asked for at once.
const EXTENTS: usize = 4096;

/// Shared with a snapshot or a reflinked copy: a write goes elsewhere.
const SHARED: u32 = 0x2000;

/// A range of a file, and the stripes in it.
#[derive(Clone, Debug)]
pub struct Surveyed {
    /// Bytes of the file that have a place on the device.
    pub range: Range<u64>,
    /// Their stripes, and what else the file has there.
    pub shape: Shape,
}

impl Array {
    /// The array with parity under a file; if there is none, why writes need no shape.
    pub fn of(stack: &Stack) -> Result<Array, NoStripes> {
        let top = stack.top.as_ref().ok_or_else(|| NoStripes::NoDevice(stack.file_system.clone()))?;
        let stripe = Stripe::of(top).filter(|s| s.parity > 0).ok_or(NoStripes::NoParity)?;
        let width = stripe.width();
        let phase = stripe.phase.ok_or(NoStripes::Hidden)?;
        if width > WIDEST || !width.is_multiple_of(linux::PAGE as u64) {
            return Err(NoStripes::Width(width));
        }
        Ok(Array { width, phase })
    }

    /// The stripes from the beginning of a range on, as far as the file has a place on the device. Of a descriptor of
    /// the calling thread.
    pub fn survey(self, kernel: &dyn Kernel, fd: Fd, range: &Range<u64>) -> Result<Surveyed, Errno> {
        let start = range.start.saturating_sub(self.width);
        let end = range.end.max(range.start.saturating_add(WINDOW)).saturating_add(self.width);
        let found = kernel.extents(fd, start, end - start, EXTENTS)?;
        let placed: Vec<_> = found.iter().filter(|e| e.flags & (linux::NOT_PLACED | SHARED) == 0).collect();
        let mut reach = range.start;
        for extent in &placed {
            if extent.logical <= reach {
                reach = reach.max(extent.logical.saturating_add(extent.len));
            }
        }
        let runs = placed.iter().map(|e| Run { file: e.logical, device: e.physical, len: e.len });
        let shape = Shape::new(self.width, self.phase, runs);
        // The last stripe of a window may be cut off by it.
        let reach = if reach >= end { end - self.width } else { reach };
        Ok(Surveyed { range: range.start..reach, shape })
    }

    /// The same of the array itself, or of a device on it.
    fn device(self, len: u64) -> Surveyed {
        Surveyed { range: 0..len, shape: Shape::new(self.width, self.phase, [Run { file: 0, device: 0, len }]) }
    }
}

/// What was found last, and what the file looked like before: length and room.
struct Kept {
    size: u64,
    blocks: u64,
    surveyed: Arc<Surveyed>,
}

/// The stripes of a file, as far as anybody has asked.
pub struct Stripes {
    pub array: Result<Array, NoStripes>,
    refused: OnceLock<Errno>,
    kept: Mutex<Option<Kept>>,
}

impl Stripes {
    pub fn new(stack: &Stack) -> Stripes {
        Stripes { array: Array::of(stack), refused: OnceLock::new(), kept: Mutex::default() }
    }

    /// What was found before, if the file is still what it was.
    pub fn kept(&self, stat: &Stat) -> Option<Arc<Surveyed>> {
        let kept = lock(&self.kept);
        let same = kept.as_ref().filter(|k| (k.size, k.blocks) == (stat.size, stat.blocks))?;
        Some(Arc::clone(&same.surveyed))
    }

    /// Why nothing is known of the stripes of a range, though there are some. `file`: its shadow descriptor, and the length
    /// of a block device.
    pub fn why_unknown(
        &self,
        ctx: &FilesCtx,
        file: (&Arc<PrivateFd>, u64),
        stat: &Stat,
        range: Range<u64>,
    ) -> Option<NoStripes> {
        match &self.array {
            Err(NoStripes::NoDevice(_) | NoStripes::NoParity) => None,
            Err(other) => Some(other.clone()),
            Ok(_) => {
                if self.kept(stat).is_none() {
                    self.look(ctx, file, stat, range);
                }
                self.refused.get().map(|errno| NoStripes::NotTold(*errno))
            }
        }
    }

    /// Looks, and keeps what is found. `stat`: the file before anything was written of what is found.
    pub fn look(
        &self,
        ctx: &FilesCtx,
        (fd, size): (&Arc<PrivateFd>, u64),
        stat: &Stat,
        range: Range<u64>,
    ) -> Option<Arc<Surveyed>> {
        let array = *self.array.as_ref().ok().filter(|_| self.refused.get().is_none())?;
        let surveyed = if stat.kind == FileKind::Block {
            array.device(size)
        } else {
            let (kernel, fd) = (ctx.sys, Arc::clone(fd));
            match ctx.workers.shadow()?.call(move || array.survey(kernel, fd.get(), &range))? {
                Ok(surveyed) => surveyed,
                Err(errno) => {
                    let _ = self.refused.set(errno);
                    return None;
                }
            }
        };
        let surveyed = Arc::new(surveyed);
        let kept = Kept { size: stat.size, blocks: stat.blocks, surveyed: Arc::clone(&surveyed) };
        *lock(&self.kept) = Some(kept);
        Some(surveyed)
    }
}
