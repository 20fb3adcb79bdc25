//! Where an output lies: room for what will come, and the stripes that it fills.

use std::ops::Range;

use spinio_io::kernel::LinuxSyscalls;
use spinio_io::{ParityArray, StripeMap};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

/// Room reserved behind a file that grows, where nobody else can see it.
const AHEAD: u64 = 16 << 20;

/// Finds the stripes of a range, and reserves room where it has none; true: some of it may lie beyond the end of the file.
/// Runs on a keeper. `alone`: nobody else has the file open, so that such room can be given back.
pub(super) fn survey(fd: Fd, array: ParityArray, range: Range<u64>, alone: bool) -> Result<(StripeMap, bool), Errno> {
    let found = array.survey(&LinuxSyscalls, fd, &range)?;
    if found.range.end >= range.end {
        return Ok((found, false));
    }
    let size = linux::fstat(fd)?.size;
    let ahead = range.end.saturating_add(AHEAD.max(array.width));
    let ends = if alone && range.end > size { [ahead, range.end] } else { [range.end, range.end] };
    // Asked before: a file system that runs out of room half way may leave the file all that there was (ext4 does).
    let free = linux::free_room(fd)?;
    let end = ends.into_iter().find(|end| end - range.start <= free);
    // Without room (not every file system has the call) there are fewer extents, and what has none is written as it
    // comes.
    let asked = end.is_some_and(|end| {
        let _ = linux::reserve_room(fd, range.start, end - range.start, false);
        end > size
    });
    let end = end.unwrap_or(range.end);
    let found = array.survey(&LinuxSyscalls, fd, &(range.start..end))?;
    let reach = found.range.end.max(end);
    Ok((StripeMap { range: range.start..reach, ..found }, asked))
}
