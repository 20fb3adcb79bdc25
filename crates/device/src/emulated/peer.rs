//! Copies between devices, and kernels that access the memory of another device.
//!
//! ```text
//!   emulated:0  stream ── copy_between ──> engine ── peer_gbps ──> bytes, through both devices' private mappings
//!               kernel ── enable_peer_access ──> the memory of emulated:1 is accessible too while it runs
//! ```
//!
//! A copy is ordered by its stream alone, as on CUDA: not with what streams of the other device do. It needs no access of
//! the devices to each other; kernels do, and get it for memory of [`Emulated::alloc`], not for chunks.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use super::devices;
use super::engine::Operation;
use super::memory::Direction;
use super::{Emulated, Result};
use crate::{DeviceAddr, DeviceError, ErrorKind, StreamId};

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
