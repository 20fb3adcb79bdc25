//! Magic numbers of file systems, as returned by `fstatfs` (`f_type`), and their names.
//!
//! One table: all code that distinguishes file systems takes the numbers from here.

/// Of none: the file system has not answered.
pub const UNKNOWN: u64 = u64::MAX;
/// ext2, ext3 and ext4.
pub const EXT4: u64 = 0xef53;
/// XFS.
pub const XFS: u64 = 0x5846_5342;
/// btrfs.
pub const BTRFS: u64 = 0x9123_683e;
/// overlayfs.
pub const OVERLAYFS: u64 = 0x794c_7630;
/// tmpfs, and memory files of ordinary pages.
pub const TMPFS: u64 = 0x0102_1994;
/// ramfs.
pub const RAMFS: u64 = 0x8584_58f6;
/// hugetlbfs, and memory files of huge pages.
pub const HUGETLBFS: u64 = 0x9584_58f6;
/// F2FS.
pub const F2FS: u64 = 0xf2f5_2010;
/// ZFS.
pub const ZFS: u64 = 0x2fc1_2fc1;
/// bcachefs.
pub const BCACHEFS: u64 = 0xca45_1a4e;
/// EROFS.
pub const EROFS: u64 = 0xe0f5_e1e2;
/// SquashFS.
pub const SQUASHFS: u64 = 0x7371_7368;
/// FAT.
pub const VFAT: u64 = 0x4d44;
/// exFAT.
pub const EXFAT: u64 = 0x2011_bab0;
/// NFS.
pub const NFS: u64 = 0x6969;
/// FUSE.
pub const FUSE: u64 = 0x6573_5546;
/// 9p.
pub const V9FS: u64 = 0x0102_1997;
/// SMB, old.
pub const CIFS: u64 = 0xff53_4d42;
/// SMB 2 and later.
pub const SMB2: u64 = 0xfe53_4d42;
/// AFS.
pub const AFS: u64 = 0x5346_414f;
/// eCryptfs.
pub const ECRYPTFS: u64 = 0xf15f;
/// Ceph.
pub const CEPH: u64 = 0x00c3_6400;
/// GFS2.
pub const GFS2: u64 = 0x0116_1970;
/// OCFS2.
pub const OCFS2: u64 = 0x7461_636f;
/// Lustre, the super block's number; 0x0bd00bd3 is that of its messages, which no `fstatfs` returns.
pub const LUSTRE: u64 = 0x0bd0_0bd0;
/// GPFS.
pub const GPFS: u64 = 0x4750_4653;
/// OrangeFS.
pub const ORANGEFS: u64 = 0x2003_0528;
/// Coda.
pub const CODA: u64 = 0x7375_7245;
/// Shared directories of VirtualBox.
pub const VBOXSF: u64 = 0x786f_4256;

/// File systems whose leases do not bind writers on other machines, or below the file system: FUSE, 9p, SMB, AFS,
/// eCryptfs.
pub const LEASES_NOT_BINDING: [u64; 6] = [FUSE, V9FS, CIFS, SMB2, AFS, ECRYPTFS];

/// More of them, which have no leases or binding ones, but are read-only for this Linux kernel alone: NFS, Ceph, GFS2,
/// OCFS2, Lustre, GPFS, OrangeFS, Coda, VirtualBox.
pub const READ_ONLY_NOT_BINDING: [u64; 9] = [NFS, CEPH, GFS2, OCFS2, LUSTRE, GPFS, ORANGEFS, CODA, VBOXSF];

/// Memory files (memfd, of ordinary and of huge pages): the Linux kernel does not count the descriptor that creates one
/// among its writers, so a lease is granted although that descriptor can write.
pub const WRITER_NOT_COUNTED: [u64; 2] = [TMPFS, HUGETLBFS];

/// Their names in trees and in the file names of stored models.
const NAMES: [(u64, &str); 30] = [
    (UNKNOWN, "unknown"),
    (EXT4, "ext4"),
    (XFS, "xfs"),
    (BTRFS, "btrfs"),
    (OVERLAYFS, "overlay"),
    (TMPFS, "tmpfs"),
    (RAMFS, "ramfs"),
    (HUGETLBFS, "hugetlbfs"),
    (F2FS, "f2fs"),
    (ZFS, "zfs"),
    (BCACHEFS, "bcachefs"),
    (EROFS, "erofs"),
    (SQUASHFS, "squashfs"),
    (VFAT, "vfat"),
    (EXFAT, "exfat"),
    (NFS, "nfs"),
    (FUSE, "fuse"),
    (V9FS, "9p"),
    (CIFS, "cifs"),
    (SMB2, "smb"),
    (AFS, "afs"),
    (ECRYPTFS, "ecryptfs"),
    (CEPH, "ceph"),
    (GFS2, "gfs2"),
    (OCFS2, "ocfs2"),
    (LUSTRE, "lustre"),
    (GPFS, "gpfs"),
    (ORANGEFS, "orangefs"),
    (CODA, "coda"),
    (VBOXSF, "vboxsf"),
];

/// The name of a file system, if it is in the table.
pub fn name(magic: u64) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lustre_is_its_super_block_not_its_messages() {
        assert_eq!(name(0x0bd0_0bd0), Some("lustre"));
        assert_eq!(name(0x0bd0_0bd3), None);
    }

    #[test]
    fn numbers_and_names_are_unique() {
        for (at, (magic, name)) in NAMES.iter().enumerate() {
            assert!(!NAMES[..at].iter().any(|(m, n)| m == magic || n == name), "{name} twice");
        }
    }
}
