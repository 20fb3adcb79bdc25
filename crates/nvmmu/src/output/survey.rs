//! The blocks of an output: reservation for later writes, and the stripes that it fills.

use std::ops::Range;

use spinio_io::kernel::LinuxSyscalls;
use spinio_io::{ParityArray, StripeMap};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

/// Bytes reserved past the end of a file that grows, where no other process can see them.
const PREALLOCATE_BYTES: u64 = 16 << 20;

/// Finds the stripes of a range, and reserves space where it has none; true: some of it may be past the end of the
/// file. Runs on a shadow worker. `exclusive`: no other process has the file open, so that the reservation can be
/// released.
pub(super) fn survey(
    fd: Fd,
    array: ParityArray,
    range: Range<u64>,
    exclusive: bool,
) -> Result<(StripeMap, bool), Errno> {
    let stripe_map = array.survey(&LinuxSyscalls, fd, &range)?;
    if stripe_map.range.end >= range.end {
        return Ok((stripe_map, false));
    }
    let size = linux::fstat(fd)?.size;
    let ahead = range.end.saturating_add(PREALLOCATE_BYTES.max(array.width));
    let end_candidates = if exclusive && range.end > size { [ahead, range.end] } else { [range.end, range.end] };
    // Queried first: a file system that runs out of space half way may leave all of it allocated to the file (ext4
    // does).
    let available = linux::available_bytes(fd)?;
    let end = end_candidates.into_iter().find(|end| end - range.start <= available);
    // Without a reservation (not every file system supports the call) there are fewer extents, and bytes without an
    // extent are written unaligned.
    let preallocated = end.is_some_and(|end| {
        let _ = linux::preallocate(fd, range.start, end - range.start, false);
        end > size
    });
    let end = end.unwrap_or(range.end);
    let found = array.survey(&LinuxSyscalls, fd, &(range.start..end))?;
    let end_surveyed = found.range.end.max(end);
    Ok((StripeMap { range: range.start..end_surveyed, ..found }, preallocated))
}
