//! Shared by all moves: the direction, and the loop that writes a range.

use spinio_device::DeviceAddr;
use spinio_io::settings::next_part;
use spinio_io::{Runtime, Target};
use spinio_sys::linux;

/// The length of the next request to `io` of a move of which `left` bytes are left.
pub(crate) fn next_request(left: u64) -> u64 {
    next_part(usize::try_from(left).unwrap_or(usize::MAX)) as u64
}

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
        let piece = next_request(len - done);
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
