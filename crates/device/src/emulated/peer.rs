//! Copies between devices, and kernels that access the memory of another device.
//!
//! ```text
//!   emulated:0  stream ── copy_between ──> engine ── peer_gbps ──> bytes, through both devices' private mappings
//!               kernel ── enable_peer_access ──> the memory of emulated:1 is accessible too while it runs
//! ```
//!
//! A copy is ordered by its stream alone, as on CUDA: not with what streams of the other device do. It needs no access of
//! the devices to each other; kernels do, and get it for memory of [`Emulated::alloc`], not for chunks. A copy from a chunk
//! of another device needs it too, as on CUDA, but not that the other device was made in this process; one that this process
//! has mapped is allowed for each device by itself ([`PeerMemory::allow_loads`]), until it is unmapped.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use super::devices;
use super::engine::Operation;
use super::memory::Direction;
use super::shared_memory::ordinal_of;
use super::{Emulated, Result};
use crate::peer_memory::copy_groups;
use crate::{DeviceAddr, DeviceError, ErrorKind, PeerError, PeerGroup, PeerMemory, StreamId};

impl Emulated {
    /// Whether kernels of this device can access the memory of another one.
    pub fn can_access_peer(&self, peer: &Emulated) -> bool {
        self.ordinal != peer.ordinal && self.config.peer && peer.config.peer
    }

    /// Lets the kernels of this device access the memory of another one. False: they may already.
    ///
    /// # Errors
    /// Unsupported: there is no access between the two.
    pub fn enable_peer_access(&self, peer: &Emulated) -> Result<bool> {
        self.check()?;
        if !self.can_access_peer(peer) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "access to a peer"));
        }
        Ok(self.engine.add_peer(&peer.memory))
    }

    /// Enqueues a copy from device memory to device memory, each of this device or of another one.
    ///
    /// # Safety
    /// Both must stay allocated until the copy is done.
    pub unsafe fn copy_between(&self, stream: StreamId, dst: DeviceAddr, src: DeviceAddr, len: usize) -> Result<()> {
        self.check()?;
        let engine_addr = |addr, direction| {
            let unknown = DeviceError::new(ErrorKind::BadAddress, "copy between devices");
            let owner = devices::owner_of(addr).ok_or(unknown)?;
            let there = owner.memory.engine_addr(addr, len, direction, "copy between devices")?;
            Ok::<_, DeviceError>((owner.ordinal, there))
        };
        let (to, dst) = engine_addr(dst, Direction::Store)?;
        let (from, src) = engine_addr(src, Direction::Load)?;
        let copy = match to == from {
            true => Operation::Bytes { dst, src, len },
            false => Operation::Peer { dst, src, len },
        };
        self.engine.submit(stream.0, copy)
    }
}

impl Emulated {
    /// The number of another device of this process, which this one can access.
    fn accessible(&self, peer: [u8; 16]) -> core::result::Result<u32, PeerError> {
        self.check().map_err(PeerError::Import)?;
        let other = ordinal_of(peer).filter(|ordinal| devices::exists(*ordinal)).ok_or(PeerError::NoDevice)?;
        if other == self.ordinal || !self.config.peer { Err(PeerError::NoAccess) } else { Ok(other) }
    }
}

impl PeerMemory for Emulated {
    fn check_access(&self, peer: [u8; 16]) -> core::result::Result<(), PeerError> {
        self.accessible(peer).map(|_| ())
    }

    fn unmap_imports(&self, mut at: DeviceAddr, lens: &[u64]) -> Result<()> {
        lens.iter().try_for_each(|len| {
            let unmapped = self.memory.chunks.unmap(at, *len);
            at = at.offset(*len);
            unmapped.map(drop)
        })
    }

    fn allow_loads(&self, peer: [u8; 16], at: DeviceAddr, len: u64) -> core::result::Result<(), PeerError> {
        let other = self.accessible(peer)?;
        let unknown = DeviceError::new(ErrorKind::BadAddress, "access to chunks of another device");
        let owner = devices::owner_of(at).filter(|owner| owner.ordinal == other);
        let allowed = owner.ok_or(unknown).and_then(|owner| owner.memory.chunks.allow_loads(at, len, self.ordinal));
        allowed.map_err(PeerError::Import)
    }

    fn copy_from_chunks(&self, groups: &mut dyn Iterator<Item = PeerGroup<'_>>) -> core::result::Result<(), PeerError> {
        const OPERATION: &str = "copy from another device";
        copy_groups(self, groups, |stream, piece| {
            let unknown = DeviceError::new(ErrorKind::BadAddress, OPERATION);
            let owner = devices::owner_of(piece.from).ok_or(unknown)?;
            let is_imported = owner.ordinal == self.ordinal;
            if !is_imported && !owner.memory.chunks.may_load(piece.from, piece.len as u64, self.ordinal) {
                return Err(unknown);
            }
            let src = owner.memory.engine_addr(piece.from, piece.len, Direction::Load, OPERATION)?;
            let dst = self.memory.engine_addr(piece.to, piece.len, Direction::Store, OPERATION)?;
            self.engine.submit(stream.0, Operation::Peer { dst, src, len: piece.len })
        })
    }
}
