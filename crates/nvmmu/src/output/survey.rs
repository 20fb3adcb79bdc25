//! Where an output lies: room for what will come, and the stripes that it fills.

use std::ops::Range;

use spinio_io::kernel::Linux;
use spinio_io::{Array, Surveyed};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

/// Room reserved behind a file that grows, where nobody else can see it.
const AHEAD: u64 = 16 << 20;

/// Finds the stripes of a range, and reserves room where it has none; true: some of it beyond the end of the file. Runs
/// on a keeper. `alone`: nobody else has the file open, so that such room can be given back.
pub(super) fn survey(fd: Fd, array: Array, range: Range<u64>, alone: bool) -> Result<(Surveyed, bool), Errno> {
    let found = array.survey(&Linux, fd, &range)?;
    if found.range.end >= range.end {
        return Ok((found, false));
    }
    let size = linux::fstat(fd)?.size;
    let grows = range.end > size;
    let end = if alone && grows { range.end.saturating_add(AHEAD.max(array.width)) } else { range.end };
    // Without room (not every file system has the call) there are fewer extents, and what has none is written as it
    // comes.
    let reserved = linux::reserve_room(fd, range.start, end - range.start, false).is_ok();
    let found = array.survey(&Linux, fd, &(range.start..end))?;
    let reach = found.range.end.max(end);
    Ok((Surveyed { range: range.start..reach, ..found }, reserved && end > size))
}
