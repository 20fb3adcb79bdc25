//! Copies of chunks between two devices of one machine, a further interface of a device.
//!
//! ```text
//!   descriptor of a chunk of device B ──> import ── map, with access for device A ── copy over the link ──> a chunk of A
//! ```
//!
//! The chunk of B may be another process's, and no work of this process on B is needed: the descriptor is enough. On CUDA
//! the two must be able to access each other's memory (NVLink, or a PCI path that the driver permits). Imported chunks are mapped
//! for the time of the copies.
//!
//! Where this process has the chunk mapped itself, for device B, device A is allowed to load it there. That stays until the
//! chunk is unmapped, so that all further copies are copies only:
//!
//! ```text
//!   chunks of B, mapped side by side ── allow_loads, once ── pieces of them copied, by their addresses ──> chunks of A
//! ```
//!
//! To make memory accessible takes the driver about as long as to copy it over NVLink. So pieces are copied in groups, and
//! what a group needs is done while the groups before it are copied:
//!
//! ```text
//!   caller   import 1, access │ import 2, access │ import 3, access │ ...         wait │ unmap all
//!   engine                    │ copy 1           │ copy 2           │ ...  copy n      │
//! ```
//!
//! The copy trusts the chunk's bytes. So the descriptor must come from where all who can store to it are trusted as much as
//! those who will use the copy: the same user.

use std::fmt;

use crate::{Device, DeviceAddr, DeviceError, SharedMemory, StreamId, WaitMode};

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

/// A part of chunks of another device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPiece {
    /// Where this process has it.
    pub from: DeviceAddr,
    /// Where it goes.
    pub to: DeviceAddr,
    /// Bytes.
    pub len: usize,
}

/// Pieces that are queued together, or why there are no more.
pub type PeerGroup<'a> = Result<&'a [PeerPiece], PeerError>;

/// A device that can copy from chunks of other devices.
pub trait PeerMemory: SharedMemory {
    /// Whether this device can access the memory of the device `peer` (a UUID), and this process has both.
    fn check_access(&self, peer: [u8; 16]) -> Result<(), PeerError>;

    /// Unmaps imported chunks of such a device, which lie side by side and have these lengths. Unlike [`SharedMemory::unmap_chunk`] it
    /// waits for no work: no kernel knows them, and no copy uses them any more.
    fn unmap_imports(&self, at: DeviceAddr, lens: &[u64]) -> Result<(), DeviceError>;

    /// Lets this device load chunks that the device `peer` has mapped side by side in this process: `len` bytes from `at`,
    /// until each chunk is unmapped. On CUDA one call of the driver, which waits for no kernel.
    ///
    /// The caller keeps the chunks mapped meanwhile.
    fn allow_loads(&self, peer: [u8; 16], at: DeviceAddr, len: u64) -> Result<(), PeerError>;

    /// Copies parts of chunks that this device may load (imported ones, or by [`PeerMemory::allow_loads`]) into accessible
    /// memory of this device, and waits until all have arrived, but not for other work of either device. On CUDA one call of the
    /// driver for each piece. After an error no copy is under way.
    ///
    /// Each group is queued before the next one is asked for: what `groups` does to have that runs beside the copies. Its
    /// error ends the call, and is returned if the groups before have arrived. After [`PeerError::Copy`] of a copy the memory of
    /// all groups has undefined bytes.
    ///
    /// The caller keeps the chunks mapped meanwhile.
    fn copy_from_chunks(&self, groups: &mut dyn Iterator<Item = PeerGroup<'_>>) -> Result<(), PeerError>;
}

/// Queues groups of copies on an internal stream of a device, by `copy`, and waits for all that were queued.
pub(crate) fn copy_groups(
    device: &dyn Device,
    groups: &mut dyn Iterator<Item = PeerGroup<'_>>,
    copy: impl Fn(StreamId, &PeerPiece) -> Result<(), DeviceError>,
) -> Result<(), PeerError> {
    let stream = CopyStream { device, id: device.acquire_stream().map_err(PeerError::Copy)? };
    let queue = || {
        for group in groups {
            group?.iter().try_for_each(|piece| copy(stream.id, piece)).map_err(PeerError::Copy)?;
        }
        Ok(())
    };
    let queued = queue();
    // Also after an error: nothing may use the memory any more.
    device.synchronize(stream.id, WaitMode::Block).map_err(PeerError::Copy)?;
    queued
}

/// A stream whose copies are waited for also if the caller unwinds: the memory that they use is unmapped then.
struct CopyStream<'a> {
    device: &'a dyn Device,
    id: StreamId,
}

impl Drop for CopyStream<'_> {
    fn drop(&mut self) {
        let _ = self.device.synchronize(self.id, WaitMode::Block);
        self.device.release_stream(self.id);
    }
}
