//! The structures of the protocol (Linux: include/uapi/linux/fuse.h), versions 7.31 to 7.45.
//!
//! Names are the kernel's without the prefix `fuse_`. All are plain data: every bit pattern is valid, and none has
//! padding that the compiler inserts.

#![expect(missing_docs, reason = "the fields are documented in fuse.h")]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $(pub $field: $kind),* }
    )* };
}

structures! {
    /// Begins every request.
    InHeader {
        len: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, pid: u32, extensions: u16, padding: u16,
    }
    /// Begins every reply and notification.
    OutHeader { len: u32, error: i32, unique: u64 }
    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atime_nsec: u32, mtime_nsec: u32,
        ctime_nsec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, block_size: u32, flags: u32,
    }
    EntryOut {
        node: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32,
        attr: Attr,
    }
    AttrOut { valid: u64, valid_nsec: u32, padding: u32, attr: Attr }
    SxTime { seconds: i64, nsec: u32, reserved: i32 }
    /// As `struct statx`.
    Sx {
        mask: u32, block_size: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16, ino: u64,
        size: u64, blocks: u64, attributes_mask: u64, atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    StatxOut { valid: u64, valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Sx }
    OpenOut { fh: u64, open_flags: u32, backing: i32 }
    WriteOut { size: u32, padding: u32 }
    XattrOut { size: u32, padding: u32 }
    LseekOut { offset: u64 }
    StatfsOut {
        blocks: u64, blocks_free: u64, blocks_available: u64, files: u64, files_free: u64, block_size: u32,
        name_length: u32, fragment_size: u32, padding: u32, spare: [u32; 6],
    }
    IoctlOut { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_granularity: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        request_timeout: u16, unused: [u16; 11],
    }
    Dirent { ino: u64, offset: u64, name_length: u32, kind: u32 }

    ForgetIn { lookups: u64 }
    BatchForgetIn { count: u32, padding: u32 }
    ForgetOne { node: u64, lookups: u64 }
    GetattrIn { flags: u32, padding: u32, fh: u64 }
    StatxIn { getattr_flags: u32, padding: u32, fh: u64, flags: u32, mask: u32 }
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atime_nsec: u32, mtime_nsec: u32, ctime_nsec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { new_parent: u64 }
    Rename2In { new_parent: u64, flags: u32, padding: u32 }
    LinkIn { node: u64 }
    OpenIn { flags: u32, open_flags: u32 }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    ReadIn { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteIn { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    FlushIn { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    FsyncIn { fh: u64, flags: u32, padding: u32 }
    SetxattrIn { size: u32, flags: u32 }
    GetxattrIn { size: u32, padding: u32 }
    AccessIn { mask: u32, padding: u32 }
    InterruptIn { unique: u64 }
    IoctlIn { fh: u64, flags: u32, command: u32, argument: u64, in_size: u32, out_size: u32 }
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 }
    CopyFileRangeIn {
        fh_in: u64, offset_in: u64, node_out: u64, fh_out: u64, offset_out: u64, length: u64, flags: u64,
    }
    /// The part that every version of the protocol has.
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    /// The rest, since 7.36 (flag INIT_EXT).
    InitInRest { flags2: u32, unused: [u32; 11] }

    /// Begins an extension of a request; `size` contains the header.
    ExtHeader { size: u32, kind: u32 }
    /// Begins the list of groups in an extension of kind [`EXT_GROUPS`].
    SuppGroups { count: u32 }

    InvalInodeOut { node: u64, offset: i64, length: i64 }
    InvalEntryOut { parent: u64, name_length: u32, flags: u32 }
    /// The nodes follow.
    PruneOut { count: u32, padding: u32, spare: u64 }
}

/// Operation codes.
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
}

/// Flags of INIT; those from bit 32 on are sent in `flags2`.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const CREATE_SUPP_GROUP: u64 = 1 << 34;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Which fields a SETATTR sets.
pub mod setattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flags of the reply to OPEN and CREATE.
pub mod open {
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
}

/// Flag of CREATE and OPEN requests: the caller may not keep the set-user-ID bits of a file that it truncates.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// Flag of WRITE: write-back of the page cache, whole pages, not a program's exact bytes.
pub const WRITE_CACHE: u32 = 1 << 0;
/// Flag of WRITE: the writer may not keep the set-user-ID bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// Flag of FSYNC: data only.
pub const FSYNC_DATA_ONLY: u32 = 1 << 0;
/// Set in `unique` of a request that is sent again.
pub const UNIQUE_RESEND: u64 = 1 << 63;
/// Kind of the extension with supplementary groups of the caller.
pub const EXT_GROUPS: u32 = 32;
/// Number of the root node.
pub const ROOT_NODE: u64 = 1;

/// Codes of notifications, in `OutHeader::error`.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const RESEND: i32 = 7;
    /// Linux 6.18.
    pub const PRUNE: i32 = 9;
}
