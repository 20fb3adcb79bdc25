//! Where an output lies: room for what will come, and the stripes that it fills.

use std::ops::Range;

use spinio_plan::geometry::{Stack, Stripe};
use spinio_plan::shape::{Run, Shape};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

/// What writes have to fit, and what they must not assume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Array {
    /// Bytes of data in a stripe.
    pub(crate) width: u64,
    /// Where in a stripe byte 0 of the device under the file system lies.
    pub(crate) phase: u64,
}

/// Stripes that nobody would put together in memory.
const WIDEST: u64 = 64 << 20;

impl Array {
    /// The array with parity under a file; if there is none, why writes need no shape.
    pub(super) fn of(stack: &Stack) -> Result<Array, String> {
        let top = stack.top.as_ref().ok_or_else(|| format!("{} lies on no block device", stack.file_system))?;
        let stripe = Stripe::of(top).filter(|s| s.parity > 0).ok_or("no array with parity is under the file")?;
        let width = stripe.width();
        let Some(phase) = stripe.phase else {
            return Err("nothing tells where on the array the file's device begins".to_owned());
        };
        if width > WIDEST || !width.is_multiple_of(4096) {
            return Err(format!("stripes of {width} bytes are not put together"));
        }
        Ok(Array { width, phase })
    }
}

/// Room reserved behind a file that grows, where nobody else can see it.
const AHEAD: u64 = 16 << 20;

/// Bytes of the file that are looked at together: moves follow each other.
const WINDOW: u64 = 64 << 20;

/// Extents asked for at once.
const EXTENTS: usize = 4096;

/// Shared with a snapshot or a reflinked copy: a write goes elsewhere.
const SHARED: u32 = 0x2000;

/// A range of the file, and the stripes in it.
#[derive(Clone, Debug)]
pub(super) struct Surveyed {
    /// Bytes of the file that have a place on the device.
    pub(super) range: Range<u64>,
    /// Their stripes.
    pub(super) shape: Shape,
    /// Room was reserved beyond the end of the file.
    pub(super) beyond: bool,
}

/// Finds the stripes of a range, and reserves room where it has none. Runs on a keeper. `alone`: nobody else has the
/// file open, so that room beyond its end can be given back.
pub(super) fn survey(fd: Fd, array: Array, range: Range<u64>, alone: bool) -> Result<Surveyed, Errno> {
    let found = look(fd, array, &range)?;
    if found.range.end >= range.end {
        return Ok(found);
    }
    let size = linux::fstat(fd)?.size;
    let grows = range.end > size;
    let end = if alone && grows { range.end.saturating_add(AHEAD.max(array.width)) } else { range.end };
    // Without room (not every file system has the call) there are fewer extents, and what has none is written as it
    // comes.
    let reserved = linux::reserve_room(fd, range.start, end - range.start, false).is_ok();
    let found = look(fd, array, &(range.start..end))?;
    Ok(Surveyed { range: range.start..found.range.end.max(end), beyond: reserved && end > size, ..found })
}

/// The stripes from the beginning of a range on, as far as the file has a place on the device.
fn look(fd: Fd, array: Array, range: &Range<u64>) -> Result<Surveyed, Errno> {
    let start = range.start.saturating_sub(array.width);
    let end = range.end.max(range.start.saturating_add(WINDOW)).saturating_add(array.width);
    let found = linux::extents(fd, start, end - start, EXTENTS)?;
    let placed: Vec<_> = found.iter().filter(|e| e.flags & (linux::NOT_PLACED | SHARED) == 0).collect();
    let mut reach = range.start;
    for extent in &placed {
        if extent.logical <= reach {
            reach = reach.max(extent.logical.saturating_add(extent.len));
        }
    }
    let runs = placed.iter().map(|e| Run { file: e.logical, device: e.physical, len: e.len });
    let shape = Shape::new(array.width, array.phase, runs);
    // The last stripe of a window may be cut off by it.
    let reach = if reach >= end { end - array.width } else { reach };
    Ok(Surveyed { range: range.start..reach, shape, beyond: false })
}
