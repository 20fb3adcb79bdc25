//! Reads and writes of device memory on every block stack that can be under a file.
//!
//! ```text
//!   file ── file system ── partition ─────────────────────────── NVMe          P2P passes
//!                       ├─ md RAID-0, -1, -10 ── partitions ──── NVMe x 4      P2P passes (7.2 and later)
//!                       ├─ md RAID-5, -6 ─────── partitions ──── NVMe x 4      EREMOTEIO
//!                       ├─ LVM linear, striped ─ partitions ──── NVMe x 4      EREMOTEIO
//!                       ├─ dm-crypt ──────────── a partition ─── NVMe          EREMOTEIO
//!                       ├─ loop ──────────────── a file on ext4 ─ NVMe         EREMOTEIO
//!                       └─ AHCI ──────────────── a SATA disk                   EREMOTEIO
//! ```
//!
//! ```text
//!   kernel         plain system calls: which stack accepts device memory, and the error otherwise
//!   geometry       SPIN's report of a stack: layers, disks, stripes
//!   reads          SPIN's reads over every route: bytes, route, reason
//!   writes         SPIN's writes, against a model of the file
//!   rebuild        members failed and rebuilt during SPIN's reads and concurrent writes
//!   mirror         a mirror whose legs do not all reach the device
//!   final_checks   the disks after all cases: md's check, fsck
//! ```
//!
//! All but `kernel` and `mirror` also run under a kernel without peer-to-peer DMA, with the emulated device's memory.

mod final_checks;
mod geometry;
mod kernel;
mod mirror;
mod reads;
mod rebuild;
mod writes;

use spinio_sys::Errno;

use crate::case::Case;
use crate::memory::{EmulatedMemory, Memory, P2pMemory, has_p2p};
use crate::place::Place;

/// Cases of this machine. The final ones are separate: [`last_cases`].
pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    if has_p2p() {
        all.extend(kernel::cases());
        all.extend(mirror::cases());
    }
    all.extend(geometry::cases());
    all.extend(reads::cases());
    all.extend(writes::cases());
    all.extend(rebuild::cases());
    all
}

/// The cases for an ordinary user.
pub(crate) fn cases_for_users() -> Vec<Case> {
    geometry::cases()
}

/// Run after all other cases: the file systems are unmounted and checked.
pub(crate) fn last_cases() -> Vec<Case> {
    final_checks::cases()
}

/// The Linux kernel's result for direct I/O between this place and device memory.
fn verdict(place: Place) -> Result<(), Errno> {
    match place {
        Place::Raid5 | Place::Raid6 | Place::Linear | Place::Striped | Place::Crypt | Place::Loop | Place::Sata => {
            Err(Errno::REMOTEIO)
        }
        Place::Far | Place::FarRaw => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

/// The device memory for cases of a place. Where there is peer-to-peer DMA the emulated device's is left to the other
/// Linux kernel, but for one array: the suite must finish in minutes.
fn kinds_for(place: Place) -> &'static [MemoryKind] {
    match (has_p2p(), place) {
        (true, Place::Raid5) => &[MemoryKind::P2p, MemoryKind::Emulated],
        (true, _) => &[MemoryKind::P2p],
        (false, _) => &[MemoryKind::Emulated],
    }
}

/// The main kind of device memory of this machine.
pub(crate) fn kind() -> MemoryKind {
    if has_p2p() { MemoryKind::P2p } else { MemoryKind::Emulated }
}

/// A kind of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    P2p,
    Emulated,
}

impl MemoryKind {
    const fn name(self) -> &'static str {
        match self {
            MemoryKind::P2p => "p2pmem",
            MemoryKind::Emulated => "emulated device",
        }
    }

    /// Memory for reads of up to `len` bytes, with room for the guards.
    pub(crate) fn memory(self, len: usize) -> Result<Box<dyn Memory>, crate::case::CaseError> {
        let len = len + 4 * 4096;
        Ok(match self {
            MemoryKind::P2p => Box::new(P2pMemory::of_spin(len)?),
            MemoryKind::Emulated => Box::new(EmulatedMemory::allocate(len)),
        })
    }
}
