//! Where the guest's files are: the directory that `vm/guest/disks` and `vm/guest/arrays` created.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use linux_raw_sys::general as k;
use spinio_testkit::file::evict;

use crate::as_user;
use crate::case::CaseError;

/// The guest's directory of disks and mounted file systems.
pub(crate) struct Guest {
    at: PathBuf,
}

/// A location of test data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A whole NVMe disk, without a file system.
    Raw,
    /// ext4 on one disk.
    Ext4,
    /// xfs on one disk.
    Xfs,
    /// xfs on a partition.
    Part,
    /// ext4 on an md RAID-0 of four disks, in chunks of 64 KiB.
    Raid0,
    /// ext4 on an md RAID-1 of two disks.
    Raid1,
    /// ext4 on an md RAID-10 of four disks.
    Raid10,
    /// ext4 on an md RAID-5 of four disks, in chunks of 64 KiB.
    Raid5,
    /// ext4 on an md RAID-6 of four disks, in chunks of 64 KiB.
    Raid6,
    /// ext4 on an LVM volume that spans two disks.
    Linear,
    /// xfs on an LVM volume striped over four disks, 64 KiB each.
    Striped,
    /// xfs on dm-crypt.
    Crypt,
    /// xfs on a loop device over a file on ext4.
    Loop,
    /// ext4 on a SATA disk.
    Sata,
    /// ext4 on a disk below another root port: no peer-to-peer path.
    Far,
    /// A whole disk below another root port.
    FarRaw,
    /// ext4 on a RAID-0 that has one such disk.
    Half,
    /// ext4 on a RAID-1 that has one such disk.
    Mirror,
    /// The guest's memory.
    Tmpfs,
    /// The guest's root: overlayfs, whose upper layer is memory.
    Overlay,
}

impl Place {
    /// Places whose storage can DMA into the p2pmem device.
    pub(crate) const REACHABLE: [Place; 4] = [Place::Raw, Place::Ext4, Place::Xfs, Place::Raid0];

    /// Block stacks under a file system, made by md, LVM, dm-crypt, loop, partitions and a SATA disk.
    pub(crate) const STACKS: [Place; 11] = [
        Place::Part,
        Place::Raid0,
        Place::Raid1,
        Place::Raid10,
        Place::Raid5,
        Place::Raid6,
        Place::Linear,
        Place::Striped,
        Place::Crypt,
        Place::Loop,
        Place::Sata,
    ];

    /// Whether it is a block device and not a directory.
    const fn is_disk(self) -> bool {
        matches!(self, Place::Raw | Place::FarRaw)
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Place::Raw => "raw NVMe",
            Place::Ext4 => "ext4",
            Place::Xfs => "xfs",
            Place::Part => "partition",
            Place::Raid0 => "md RAID-0",
            Place::Raid1 => "md RAID-1",
            Place::Raid10 => "md RAID-10",
            Place::Raid5 => "md RAID-5",
            Place::Raid6 => "md RAID-6",
            Place::Linear => "LVM linear",
            Place::Striped => "LVM striped",
            Place::Crypt => "dm-crypt",
            Place::Loop => "loop device",
            Place::Sata => "SATA",
            Place::Far => "other root port",
            Place::FarRaw => "raw NVMe below another root port",
            Place::Half => "RAID-0 with an unreachable member",
            Place::Mirror => "RAID-1 with an unreachable member",
            Place::Tmpfs => "tmpfs",
            Place::Overlay => "overlayfs",
        }
    }

    /// Its entry in the guest's directory; none without a file system there.
    pub(crate) const fn folder(self) -> Option<&'static str> {
        Some(match self {
            Place::Ext4 => "ext4",
            Place::Xfs => "xfs",
            Place::Part => "part",
            Place::Raid0 => "raid0",
            Place::Raid1 => "raid1",
            Place::Raid10 => "raid10",
            Place::Raid5 => "raid5",
            Place::Raid6 => "raid6",
            Place::Linear => "linear",
            Place::Striped => "striped",
            Place::Crypt => "crypt",
            Place::Loop => "loop",
            Place::Sata => "sata",
            Place::Far => "far",
            Place::Half => "half",
            Place::Mirror => "mirror",
            Place::Raw | Place::FarRaw | Place::Tmpfs | Place::Overlay => return None,
        })
    }
}

impl Guest {
    pub(crate) fn new(at: impl Into<PathBuf>) -> Guest {
        Guest { at: at.into() }
    }

    /// The mount point of a place.
    pub(crate) fn mount(&self, place: Place) -> Result<PathBuf, CaseError> {
        let folder = place.folder().ok_or_else(|| CaseError::Failed(format!("{} is no file system", place.name())))?;
        Ok(self.at.join(folder))
    }

    /// The block device of this name, under the Linux kernel's name: `/dev/md10`.
    pub(crate) fn disk(&self, name: &str) -> Result<PathBuf, CaseError> {
        Ok(fs::canonicalize(self.at.join("disk").join(name))?)
    }

    /// The partition of a member disk (`m0` to `m3`) that is free for cases.
    pub(crate) fn free_partition(&self, disk: &str) -> Result<PathBuf, CaseError> {
        self.partition(disk, 8)
    }

    /// A partition of a member disk; see `vm/guest/arrays` for its purpose.
    pub(crate) fn partition(&self, disk: &str, number: u32) -> Result<PathBuf, CaseError> {
        let mut name = self.disk(disk)?.into_os_string();
        name.push(format!("p{number}"));
        Ok(name.into())
    }

    /// A file there, empty (a disk: unchanged), open for reading and writing.
    pub(crate) fn create(&self, place: Place, name: &str) -> Result<(PathBuf, File), CaseError> {
        // A failed case left its file, and users cannot remove root's.
        let name = if as_user::is_child() { format!("user-{name}") } else { name.to_owned() };
        let path = match (place, place.folder()) {
            (_, Some(folder)) => self.at.join(folder).join(name),
            (Place::FarRaw, _) => self.at.join("disk/far-raw"),
            (Place::Tmpfs, _) => Path::new("/dev/shm").join(name),
            (Place::Overlay, _) => Path::new("/var/tmp").join(name),
            _ => self.at.join("disk/raw"),
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(!place.is_disk())
            .truncate(!place.is_disk())
            .open(&path)
            .map_err(|e| CaseError::Failed(format!("{}: {e}", path.display())))?;
        Ok((path, file))
    }

    /// A file of `len` bytes of the pattern, on storage and out of the page cache.
    pub(crate) fn cold(&self, place: Place, name: &str, len: usize) -> Result<(PathBuf, Vec<u8>), CaseError> {
        let (path, file) = self.create(place, name)?;
        let bytes = pattern(len, name.bytes().fold(7, |h, b| h * 31 % 9973 + u64::from(b)));
        file.write_all_at(&bytes, 0)?;
        drop_cache(&file)?;
        Ok((path, bytes))
    }
}

/// Writes back what is dirty and drops the file's pages from the cache, those too that are being read ahead.
pub(crate) fn drop_cache(file: &File) -> Result<(), CaseError> {
    file.sync_all()?;
    evict(file);
    Ok(())
}

/// The file, opened for direct I/O.
pub(crate) fn open_direct(path: &Path) -> Result<File, CaseError> {
    Ok(OpenOptions::new().read(true).write(true).custom_flags(k::O_DIRECT as i32).open(path)?)
}

/// Removes a file at the end of its case, so that the next has room.
pub(crate) fn remove(path: &Path) {
    if fs::metadata(path).is_ok_and(|m| m.is_file()) {
        let _ = fs::remove_file(path);
    }
}

/// Bytes that differ at every offset, and for every seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    let mut word = 0u64;
    while out.len() < len {
        // SplitMix64: no two offsets of a file are alike, so bytes from a wrong offset are detected.
        let mut z = (word + (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        out.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
        word += 1;
    }
    out.truncate(len);
    out
}
