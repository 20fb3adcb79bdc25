//! The results of the calls, and their flags.

/// Reads only what is in the page cache; EAGAIN when the first byte is not.
pub const RWF_NOWAIT: u32 = 0x8;
/// Drops the pages this read cached (Linux 6.14).
pub const RWF_DONTCACHE: u32 = 0x80;

/// `posix_fadvise` advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Advice {
    /// The default read-ahead.
    Normal = 0,
    /// No read-ahead.
    Random = 1,
    /// Twice the read-ahead.
    Sequential = 2,
    /// Start reading the range into the page cache.
    WillNeed = 3,
    /// Drop the clean, unmapped pages of the range.
    DontNeed = 4,
}

/// The kind of file of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// A file without page cache: pipe, socket, character device, directory.
    Other,
}

/// Which file it is. Two descriptors that are open have the same key if they refer to the same file; the key of a file
/// that no descriptor keeps may become that of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileKey {
    /// Device number of the file system.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
}

/// The part of `fstat` that routing needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Device number of the file system.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// For a device node, the device it names.
    pub rdev: u64,
    /// Length in bytes (0 for a block device).
    pub size: u64,
    /// Its storage, in units of 512 bytes.
    pub blocks: u64,
    /// Owner.
    pub uid: u32,
    /// No name refers to it.
    pub unlinked: bool,
    /// Raw `st_mode`.
    pub mode: u32,
    /// Modification time in nanoseconds.
    pub mtime_ns: i128,
    /// Time of the last change of content or attributes, likewise.
    pub ctime_ns: i128,
    /// The kind of file.
    pub kind: FileKind,
}

impl Stat {
    /// Which file it is.
    pub fn key(&self) -> FileKey {
        FileKey { dev: self.dev, ino: self.ino }
    }
}

/// The alignment that O_DIRECT needs on a file (`STATX_DIOALIGN`); bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Alignment of the memory buffer.
    pub memory: u32,
    /// Alignment of offset and length.
    pub offset: u32,
}

/// Result of `cachestat`, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CacheStat {
    /// Pages in the page cache.
    pub cached: u64,
    /// Of these, dirty.
    pub dirty: u64,
    /// Of these, being written back.
    pub writeback: u64,
    /// Evicted from the range since it was cached.
    pub evicted: u64,
    /// Of these, recently.
    pub recently_evicted: u64,
}
