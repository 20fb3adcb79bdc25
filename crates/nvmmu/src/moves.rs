//! Shared by all moves: the direction, and the loop that writes a range.

use spinio_device::DeviceAddr;
use spinio_io::{Runtime, Target};
use spinio_sys::linux;

/// Bytes of one request to `io`: a system call moves a little less than 2 GiB.
pub(crate) const MAX_MOVE: u64 = 1 << 30;

/// The direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file to the device.
    Upload,
    /// From the device to the file.
    Download,
}

impl Direction {
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Direction::Upload => "upload",
            Direction::Download => "download",
        }
    }
}

/// Writes all of a range.
pub(crate) fn write_all(
    runtime: &Runtime,
    fd: linux::Fd,
    from: Target,
    offset: u64,
    len: u64,
) -> Result<(), spinio_io::Error> {
    let mut done = 0;
    while done < len {
        let piece = MAX_MOVE.min(len - done);
        let from = Target { addr: DeviceAddr(from.addr.0 + done), ..from };
        match runtime.write(fd, Some(offset + done), from, piece as usize)? as u64 {
            0 => return Err(spinio_io::Error::kernel(spinio_sys::Errno::IO, "write", offset + done, piece)),
            wrote => done += wrote,
        }
        if done < len && spinio_io::is_cancelled() {
            return Err(spinio_io::Error::kernel(spinio_sys::Errno::INTR, "write", offset + done, len - done));
        }
    }
    Ok(())
}
