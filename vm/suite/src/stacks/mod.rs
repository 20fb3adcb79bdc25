//! Every block stack that a file can stand on, and what reading and writing device memory makes of it.
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
//!   kernel    plain system calls: which stack takes device memory, and what it says if not
//!   geometry  what SPIN tells of a stack: layers, disks, stripes
//!   reads     SPIN's reads over every route: bytes, route, reason
//!   writes    SPIN's writes, against a model of the file
//!   rebuild   members failed and rebuilt while SPIN reads and others write
//!   mirror    a mirror whose legs do not all reach the device
//!   after     what is on the disks when all is done: md's check, fsck
//! ```
//!
//! All but `kernel` and `mirror` also run under a kernel without peer-to-peer DMA, with the emulated device's memory.

mod after;
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

/// Cases of this machine. The last of all are apart: [`last_cases`].
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

/// Those that an ordinary user can run.
pub(crate) fn cases_for_users() -> Vec<Case> {
    geometry::cases()
}

/// To be run when nobody uses the file systems any more: they are unmounted and checked.
pub(crate) fn last_cases() -> Vec<Case> {
    after::cases()
}

/// What the kernel says of direct I/O between this place and device memory.
fn verdict(place: Place) -> Result<(), Errno> {
    match place {
        Place::Raid5 | Place::Raid6 | Place::Linear | Place::Striped | Place::Crypt | Place::Loop | Place::Sata => {
            Err(Errno::REMOTEIO)
        }
        Place::Far | Place::FarRaw => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

/// Device memory that cases of a place use. Where there is peer-to-peer DMA the emulated device's is left to the other
/// kernel, but for one array: the suite shall be over in minutes.
fn kinds_for(place: Place) -> &'static [MemoryKind] {
    match (has_p2p(), place) {
        (true, Place::Raid5) => &[MemoryKind::P2p, MemoryKind::Emulated],
        (true, _) => &[MemoryKind::P2p],
        (false, _) => &[MemoryKind::Emulated],
    }
}

/// Device memory of the kind that this machine is here for.
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
