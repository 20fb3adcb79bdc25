//! What a call on a map of any kind checks first: the range that it names, and the stream of the calling thread.

use std::ops::Range;

use spinio_device::{AppStream, Device, PAGE_BYTES, WaitMode};
use spinio_sys::Errno;

use crate::{Error, Result};

/// The `len` bytes from byte `offset` of a map of `bytes` bytes.
pub(crate) fn range_within(offset: u64, len: u64, bytes: u64) -> Result<Range<u64>> {
    let end = offset.checked_add(len).filter(|end| len > 0 && *end <= bytes);
    let end = end.ok_or_else(|| Error::new(Errno::INVAL, "The range is not within one map"))?;
    Ok(offset..end)
}

/// The pages of them.
pub(crate) fn pages_within(offset: u64, len: u64, bytes: u64) -> Result<Range<u64>> {
    const PAGE: u64 = PAGE_BYTES as u64;
    range_within(offset, len, bytes).map(|range| range.start / PAGE..range.end.div_ceil(PAGE))
}

/// Waits for the work that the calling thread has queued.
pub(crate) fn wait_for_stream<D: Device + ?Sized>(device: &D) -> Result<()> {
    match device.app_stream() {
        AppStream::Capturing(_) => Err(captured()),
        AppStream::Named(stream) => {
            device.synchronize(stream, WaitMode::Context).map_err(|e| Error::device(e, "wait for the stream"))
        }
    }
}

/// A call cannot be part of a graph.
pub(crate) fn captured() -> Error {
    Error::new(Errno::BUSY, "The stream is being captured into a graph")
}
