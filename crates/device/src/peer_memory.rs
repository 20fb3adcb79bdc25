//! Copies of chunks between two devices of one machine, a further interface of a device.
//!
//! ```text
//!   descriptor of a chunk of device B ──> import ── map, with access for device A ── copy over the link ──> a chunk of A
//! ```
//!
//! The chunk of B may be another process's, and no work of this process on B is needed: the descriptor is enough. On CUDA
//! the two must be able to access each other's memory (NVLink, or a PCI path that the driver permits).
//!
//! Where this process has the chunk mapped itself, for device B, its address is enough, and parts of several chunks are
//! copied by one call.
//!
//! The copy trusts the chunk's bytes. So the descriptor must come from where all who can store to it are trusted as much as
//! those who will use the copy: the same user.

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::{DeviceAddr, DeviceError, SharedMemory};

/// Why a chunk of another device was not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerError {
    /// This process has no such device.
    NoDevice,
    /// The two devices cannot access each other's memory.
    NoAccess,
    /// The chunk could not be imported or mapped.
    Import(DeviceError),
    /// The copy failed.
    Copy(DeviceError),
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerError::NoDevice => f.write_str("This process has no such device"),
            PeerError::NoAccess => f.write_str("The devices cannot access each other's memory"),
            PeerError::Import(why) => write!(f, "The chunk of the other device cannot be mapped: {why}"),
            PeerError::Copy(why) => write!(f, "The copy from the other device failed: {why}"),
        }
    }
}

impl std::error::Error for PeerError {}

/// A chunk of another device, by the address where this process has it mapped, and the parts to copy.
#[derive(Clone, Debug)]
pub struct PeerChunk {
    /// Its first byte.
    pub at: DeviceAddr,
    /// All of its bytes.
    pub len: u64,
    /// The parts.
    pub pieces: Vec<PeerPiece>,
}

impl PeerChunk {
    /// Whether a part is inside it.
    pub(crate) fn contains(&self, piece: &PeerPiece) -> bool {
        piece.from.checked_add(piece.len as u64).is_some_and(|end| end <= self.len)
    }
}

/// A part of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPiece {
    /// Its offset in the chunk.
    pub from: u64,
    /// Where it goes.
    pub to: DeviceAddr,
    /// Bytes.
    pub len: usize,
}

/// A device that can copy from chunks of other devices.
pub trait PeerMemory: SharedMemory {
    /// Copies all `len` bytes of a chunk of the device `peer` (a UUID) into mapped memory of this device, and waits until
    /// they have arrived. The descriptor is in the caller's table, and may be closed afterwards. After an error the memory
    /// has undefined bytes.
    fn copy_from_peer(&self, peer: [u8; 16], chunk: BorrowedFd<'_>, len: u64, to: DeviceAddr) -> Result<(), PeerError>;

    /// Copies parts of chunks that the device `peer` has in this process into mapped memory of this device, and waits until
    /// they have arrived, but not for other work of either device. On CUDA that takes a few driver calls for each chunk,
    /// whose mapping is one of them, and one for each piece. After an error the memory has undefined bytes.
    ///
    /// The caller keeps the chunks mapped meanwhile.
    fn copy_from_chunks(&self, peer: [u8; 16], chunks: &[PeerChunk]) -> Result<(), PeerError>;
}
