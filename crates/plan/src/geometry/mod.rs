//! The storage under a file: layers of block devices down to disks, and the positions of its stripes.
//!
//! ```text
//!   file
//!   └─ ext4
//!      └─ md0p1        partition from 1 MiB
//!         └─ md0       raid5, 64 KiB x 3+1          sysfs.rs    sysfs ──> tree
//!            ├─ nvme0n1   NVMe, 0000:03:00.0        stripe.rs  tree ──> chunk, width, members of a range
//!            ├─ nvme1n1   NVMe, 0000:04:00.0        p2p.rs     tree ──> may storage DMA into a device, why not
//!            ├─ ...                                 render.rs tree ──> text
//! ```
//!
//! Why: full-stripe writes to RAID-5 need no reads; a request split at chunk ends keeps each command on few disks; and
//! `spinio explain` shows the layer that refuses peer-to-peer.
//!
//! sysfs shows all of this to every user. It is read through [`SysfsReader`], so that the same code reads a machine, a
//! test's table and a fuzzer's noise. No input causes a panic, and depth and number of layers are bounded.
//!
//! Known flaws: only root can read the tables of the device mapper, so its targets are inferred, from the name that
//! LVM, cryptsetup or multipath gave and from the transfer sizes that the Linux kernel derives from a table. The start
//! of a linear volume on its member is unknown; LVM begins at whole MiB. An array of arrays shows its outer stripe
//! only.

pub mod overlay;
mod p2p;
mod parse;
mod render;
mod stripe;
mod sysfs;

pub use p2p::P2pHint;
pub use stripe::{Layout, Stripe};
pub use sysfs::{SysfsReader, read_btrfs, read_device, without_device};

/// A file system and the block devices under it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockStack {
    /// `ext4`, `tmpfs`; empty for a block device itself.
    pub file_system: String,
    /// The uppermost block device; none if there is none (memory, network), or if it is unknown.
    pub top: Option<Layer>,
}

/// A block device and its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The Linux kernel's name, such as `nvme0n1`.
    pub name: String,
    /// Major and minor number; none if unknown.
    pub number: Option<(u32, u32)>,
    /// Its function.
    pub kind: Kind,
    /// Length in bytes; 0 if unknown.
    pub bytes: u64,
    /// The limits of its queue.
    pub queue: QueueLimits,
    /// Its role in the layer above.
    pub role: Role,
    /// Its members; none for a disk.
    pub members: Vec<Layer>,
}

/// The function of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No layer is below it.
    Disk {
        /// Its transport.
        transport: Transport,
        /// Its PCI address, or that of its controller.
        pci: Option<String>,
    },
    /// Part of its only member.
    Partition {
        /// First byte on it.
        start: u64,
    },
    /// An array of the md driver.
    Md(Md),
    /// Members, or parts of them, concatenated: LVM's usual volume.
    Linear,
    /// Chunks distributed to the members by the device mapper.
    Striped {
        /// Bytes of a chunk.
        chunk: u64,
    },
    /// An LVM volume with redundancy.
    LvmRaid {
        /// Bytes of a chunk, 0 for mirrors.
        chunk: u64,
        /// Members that store data in each stripe.
        data: u32,
    },
    /// Encrypted.
    Crypt,
    /// Several paths to one disk.
    Multipath,
    /// A thin volume of a pool.
    Thin,
    /// Device mapper with an unknown target.
    Mapper,
    /// A file as a disk.
    Loop {
        /// Its path as it was opened.
        file: String,
    },
    /// A disk with a faster one as its cache.
    Bcache,
    /// btrfs over several devices.
    Btrfs {
        /// The data profile: `single`, `raid0`, ...; empty if there are several.
        profile: String,
    },
    /// Unknown.
    Unknown,
}

/// An array of the md driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Md {
    /// How it distributes data.
    pub level: Level,
    /// Bytes of a chunk; 0 where there are none.
    pub chunk: u64,
    /// Number of disks in the complete array.
    pub disks: u32,
    /// Number of missing disks.
    pub degraded: u32,
    /// The level's own variant, as numbered by md.
    pub layout: u32,
    /// The current action: `idle`, `recover`, `resync`, ...
    pub action: String,
}

/// Level of an md array.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the levels' own names")]
pub enum Level {
    Linear,
    Raid0,
    Raid1,
    Raid4,
    Raid5,
    Raid6,
    Raid10,
    /// Another level name.
    Other(String),
}

impl Level {
    /// From the name in sysfs.
    pub fn parse(word: &str) -> Level {
        match word {
            "linear" => Level::Linear,
            "raid0" => Level::Raid0,
            "raid1" => Level::Raid1,
            "raid4" => Level::Raid4,
            "raid5" => Level::Raid5,
            "raid6" => Level::Raid6,
            "raid10" => Level::Raid10,
            other => Level::Other(other.to_owned()),
        }
    }

    /// The name in sysfs.
    pub fn name(&self) -> &str {
        match self {
            Level::Linear => "linear",
            Level::Raid0 => "raid0",
            Level::Raid1 => "raid1",
            Level::Raid4 => "raid4",
            Level::Raid5 => "raid5",
            Level::Raid6 => "raid6",
            Level::Raid10 => "raid10",
            Level::Other(word) => word,
        }
    }

    /// Parity disks of each stripe.
    pub const fn parity(&self) -> u32 {
        match self {
            Level::Raid4 | Level::Raid5 => 1,
            Level::Raid6 => 2,
            _ => 0,
        }
    }
}

/// How a disk is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the transports' own names")]
pub enum Transport {
    Nvme,
    NvmeFabrics,
    Sata,
    Sas,
    Scsi,
    Virtio,
    Usb,
    Mmc,
    Pmem,
    /// Made by a driver without hardware: zram, nbd, ...
    Virtual,
    Unknown,
}

impl Transport {
    /// The display name.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Nvme => "nvme",
            Transport::NvmeFabrics => "nvme over fabrics",
            Transport::Sata => "sata",
            Transport::Sas => "sas",
            Transport::Scsi => "scsi",
            Transport::Virtio => "virtio",
            Transport::Usb => "usb",
            Transport::Mmc => "mmc",
            Transport::Pmem => "pmem",
            Transport::Virtual => "virtual",
            Transport::Unknown => "unknown",
        }
    }
}

/// The limits of a queue; bytes, 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLimits {
    /// Smallest unit of a request.
    pub logical: u64,
    /// Recommended minimum of a request; a chunk of an array.
    pub minimum: u64,
    /// Recommended size of a request; a stripe of an array.
    pub optimal: u64,
    /// Largest request; the Linux kernel splits longer ones.
    pub max_request: u64,
    /// The Linux kernel's read-ahead window.
    pub read_ahead: u64,
}

/// The role of a layer in the one above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Stores its share.
    #[default]
    Active,
    /// Being rebuilt: stores part of its share.
    Rebuilding,
    /// Ready to replace another member.
    Spare,
    /// Failed, no longer used by the array.
    Faulty,
}

impl BlockStack {
    /// Every disk, from left to right.
    pub fn disks(&self) -> Vec<&Layer> {
        let mut out = Vec::new();
        if let Some(top) = &self.top {
            top.collect_disks(&mut out);
        }
        out
    }

    /// Whether each byte of a write goes to exactly one disk. False if unknown: a mirror of which one side
    /// refuses a write may report success (see `vm/README.md`).
    pub fn writes_single_disk(&self) -> bool {
        self.top.as_ref().is_some_and(Layer::writes_single_disk)
    }

    /// The stripes, if there are any.
    pub fn stripe(&self) -> Option<Stripe> {
        self.top.as_ref().and_then(Stripe::from_layer)
    }

    /// The Linux kernel's read-ahead window; 0 if unknown.
    pub fn read_ahead(&self) -> u64 {
        self.top.as_ref().map_or(0, |top| top.queue.read_ahead)
    }

    /// Bytes of a direct read at most that the Linux kernel begins by itself when a ring (io_uring) asks for it; a longer one
    /// goes to a thread of the kernel, and costs two wake-ups.
    ///
    /// A read of a block device must become one request of its queue: the kernel splits none that may not wait
    /// (REQ_NOWAIT), nor makes two of it, and one holds at most 256 pages. Files of ext4 and XFS have no such bound: their reads are
    /// split as those of `pread` are (iomap).
    pub fn max_ring_read(&self) -> u64 {
        if !self.file_system.is_empty() {
            return u64::MAX;
        }
        match self.top.as_ref().map_or(0, |top| top.queue.max_request) {
            // Short enough for most disks: a command too many costs less than a thread.
            0 => 128 << 10,
            max => (max & !4095).clamp(4096, 1 << 20),
        }
    }

    /// Whether commands are served in the time of an NVMe drive, or by several disks at once.
    pub fn is_fast(&self) -> bool {
        let disks = self.disks();
        let nvme = |d: &&Layer| matches!(d.kind, Kind::Disk { transport: Transport::Nvme | Transport::Pmem, .. });
        (!disks.is_empty() && disks.iter().all(nvme)) || self.stripe().is_some_and(|s| s.data > 1)
    }
}

impl Layer {
    fn collect_disks<'a>(&'a self, out: &mut Vec<&'a Layer>) {
        if let Kind::Disk { .. } = self.kind {
            out.push(self);
        }
        self.members.iter().for_each(|m| m.collect_disks(out));
    }

    fn writes_single_disk(&self) -> bool {
        let below = || !self.members.is_empty() && self.members.iter().all(Layer::writes_single_disk);
        match &self.kind {
            Kind::Disk { .. } => true,
            Kind::Partition { .. } | Kind::Linear | Kind::Striped { .. } | Kind::Crypt => below(),
            Kind::Md(md) => matches!(md.level, Level::Linear | Level::Raid0) && below(),
            Kind::Btrfs { profile } => matches!(&profile[..], "single" | "raid0") && below(),
            Kind::LvmRaid { .. }
            | Kind::Multipath
            | Kind::Thin
            | Kind::Mapper
            | Kind::Loop { .. }
            | Kind::Bcache
            | Kind::Unknown => false,
        }
    }

    /// Members that store data now.
    pub fn active(&self) -> impl Iterator<Item = &Layer> {
        self.members.iter().filter(|m| matches!(m.role, Role::Active | Role::Rebuilding))
    }
}
