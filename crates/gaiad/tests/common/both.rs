//! The same operations on two directories, whose outcomes are compared.

#![expect(unsafe_code, reason = "mappings of files")]

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT,
    XattrFlags,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

/// A generator of numbers (xorshift).
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from)
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.next() as usize % of.len()]
    }
}

/// An operation. Names are of a small set, files are slots of open files.
#[derive(Clone, Debug)]
pub enum Op {
    Open {
        slot: usize,
        name: String,
        flags: OFlags,
        mode: u32,
    },
    Tmpfile {
        slot: usize,
        name: String,
    },
    Publish {
        slot: usize,
        name: String,
    },
    Close {
        slot: usize,
    },
    Read {
        slot: usize,
        offset: u64,
        len: usize,
    },
    Write {
        slot: usize,
        offset: u64,
        len: usize,
        fill: u8,
    },
    Append {
        slot: usize,
        len: usize,
        fill: u8,
    },
    Map {
        slot: usize,
        offset: u64,
        len: usize,
        fill: Option<u8>,
        sync: bool,
    },
    /// Whole pages, past the page cache: written, or read.
    Direct {
        slot: usize,
        page: u64,
        pages: usize,
        fill: Option<u8>,
    },
    /// What is written back leaves the page cache.
    Uncache {
        slot: usize,
    },
    Truncate {
        slot: usize,
        size: u64,
    },
    Allocate {
        slot: usize,
        mode: FallocateFlags,
        offset: u64,
        len: u64,
    },
    Sync {
        slot: usize,
        data_only: bool,
    },
    CopyRange {
        from: usize,
        to: usize,
        offset: u64,
        at: u64,
        len: usize,
    },
    Seek {
        slot: usize,
        offset: u64,
    },
    StatFile {
        slot: usize,
    },
    Stat {
        name: String,
    },
    Unlink {
        name: String,
    },
    Rmdir {
        name: String,
    },
    Mkdir {
        name: String,
    },
    Mkfifo {
        name: String,
    },
    Rename {
        from: String,
        to: String,
        flags: RenameFlags,
    },
    Link {
        from: String,
        to: String,
    },
    Symlink {
        target: String,
        name: String,
    },
    Readlink {
        name: String,
    },
    Chmod {
        name: String,
        mode: u32,
    },
    Chown {
        name: String,
        uid: u32,
    },
    Times {
        name: String,
        seconds: i64,
        omit: bool,
    },
    List {
        name: String,
    },
    SetXattr {
        name: String,
        attribute: String,
        value: usize,
        flags: XattrFlags,
    },
    GetXattr {
        name: String,
        attribute: String,
    },
    ListXattr {
        name: String,
    },
    RemoveXattr {
        name: String,
        attribute: String,
    },
    Access {
        name: String,
    },
}

/// What an operation returned.
#[derive(Clone, PartialEq, Eq)]
pub enum Outcome {
    Failed(Errno),
    Text(String),
    Bytes(Vec<u8>),
}

impl Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Failed(error) => write!(f, "{error:?}"),
            Outcome::Text(text) => f.write_str(text),
            Outcome::Bytes(bytes) => write!(f, "{} bytes {:?}", bytes.len(), &bytes[..bytes.len().min(16)]),
        }
    }
}

pub const SLOTS: usize = 6;
pub const PAGE: u64 = 4096;
const SIZE: u64 = 40 * PAGE;

pub const NAMES: &[&str] = &["a", "b", "c", "d0", "d1", "d0/a", "d0/b", "d1/a", "d1/d", "d1/d/x", "l", "missing/x"];
const DIRECTORIES: &[&str] = &["", "d0", "d1", "d1/d"];

/// Any operation.
pub fn any_op(random: &mut Random) -> Op {
    let name = random.pick(NAMES).to_owned();
    let other = random.pick(NAMES).to_owned();
    let slot = random.next() as usize % SLOTS;
    let offset = random.range(0, SIZE);
    let len = if random.next().is_multiple_of(4) { random.range(1, 9 * PAGE) } else { random.range(1, 300) } as usize;
    let fill = random.next() as u8;
    match random.range(0, 100) {
        0..10 => {
            let mut flags = random.pick(&[OFlags::RDWR, OFlags::RDWR, OFlags::RDWR, OFlags::WRONLY, OFlags::RDONLY]);
            for (flag, one_in) in [(OFlags::CREATE, 2), (OFlags::EXCL, 8), (OFlags::TRUNC, 6), (OFlags::APPEND, 8)] {
                if random.next().is_multiple_of(one_in) {
                    flags |= flag;
                }
            }
            // EXCL has no meaning without CREATE.
            if !flags.contains(OFlags::CREATE) {
                flags -= OFlags::EXCL;
            }
            Op::Open { slot, name, flags, mode: random.pick(&[0o644, 0o600, 0o755, 0o444]) }
        }
        10 => Op::Tmpfile { slot, name: random.pick(DIRECTORIES).to_owned() },
        11 => Op::Publish { slot, name },
        12..14 => Op::Close { slot },
        14..24 => Op::Read { slot, offset, len },
        24..38 => Op::Write { slot, offset, len, fill },
        38..40 => Op::Append { slot, len, fill },
        40 => {
            let fill = (!random.next().is_multiple_of(2)).then_some(fill);
            Op::Direct { slot, page: offset / PAGE, pages: random.range(1, 4) as usize, fill }
        }
        41..50 => {
            let fill = (!random.next().is_multiple_of(3)).then_some(fill);
            Op::Map { slot, offset, len, fill, sync: random.next().is_multiple_of(4) }
        }
        50..54 => Op::Truncate { slot, size: random.range(0, SIZE) },
        54..58 => {
            let keep = FallocateFlags::KEEP_SIZE;
            let modes = [
                FallocateFlags::empty(),
                keep,
                keep | FallocateFlags::PUNCH_HOLE,
                FallocateFlags::ZERO_RANGE,
                FallocateFlags::ZERO_RANGE | keep,
            ];
            Op::Allocate { slot, mode: random.pick(&modes), offset, len: len as u64 }
        }
        58..60 => Op::Sync { slot, data_only: random.next().is_multiple_of(2) },
        60 => Op::CopyRange { from: slot, to: random.next() as usize % SLOTS, offset, at: random.range(0, SIZE), len },
        61 => Op::Seek { slot, offset },
        62 => Op::Uncache { slot },
        63..65 => Op::StatFile { slot },
        65..69 => Op::Stat { name },
        69..72 => Op::Unlink { name },
        72 => Op::Rmdir { name },
        73..76 => Op::Mkdir { name },
        76 => Op::Mkfifo { name },
        77..82 => {
            let flags = random.pick(&[
                RenameFlags::empty(),
                RenameFlags::empty(),
                RenameFlags::NOREPLACE,
                RenameFlags::EXCHANGE,
            ]);
            Op::Rename { from: name, to: other, flags }
        }
        82..84 => Op::Link { from: name, to: other },
        84 => Op::Symlink { target: other, name },
        85 => Op::Readlink { name: random.pick(&["l", "a", "b"]).to_owned() },
        86..88 => Op::Chmod { name, mode: random.pick(&[0o644, 0o700, 0o4755, 0o2711, 0o1777, 0o444, 0]) },
        88 => Op::Chown { name, uid: random.pick(&[0, 1000, 65534]) },
        89..91 => Op::Times { name, seconds: random.range(0, 1 << 31) as i64, omit: random.next().is_multiple_of(2) },
        91..94 => Op::List { name: random.pick(DIRECTORIES).to_owned() },
        94..100 => {
            let attribute = random.pick(&["user.one", "user.two"]).to_owned();
            match random.range(0, 6) {
                0..2 => {
                    let flags = random.pick(&[XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE]);
                    Op::SetXattr { name, attribute, value: random.range(0, 900) as usize, flags }
                }
                2 => Op::GetXattr { name, attribute },
                3 => Op::ListXattr { name },
                4 => Op::RemoveXattr { name, attribute },
                _ => Op::Access { name },
            }
        }
        _ => unreachable!(),
    }
}

/// One of the two directories, with its open files.
pub struct Side {
    pub root: PathBuf,
    files: [Option<File>; SLOTS],
}

type Outcomes = Result<Outcome, Errno>;

fn text(value: impl Debug) -> Outcomes {
    Ok(Outcome::Text(format!("{value:?}")))
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

impl Side {
    pub fn new(root: &Path) -> Side {
        Side { root: root.to_owned(), files: Default::default() }
    }

    pub fn run(&mut self, op: &Op) -> Outcome {
        self.try_run(op).unwrap_or_else(Outcome::Failed)
    }

    fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    fn file(&self, slot: usize) -> Result<&File, Errno> {
        self.files[slot].as_ref().ok_or(Errno::BADF)
    }

    fn try_run(&mut self, op: &Op) -> Outcomes {
        match op {
            Op::Open { slot, name, flags, mode } => {
                // A pipe would block.
                let flags = *flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let fd = rustix::fs::open(self.path(name), flags, Mode::from_raw_mode(*mode))?;
                self.files[*slot] = Some(File::from(fd));
                text("opened")
            }
            Op::Tmpfile { slot, name } => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                let fd = rustix::fs::open(self.path(name), flags, Mode::from_raw_mode(0o640))?;
                self.files[*slot] = Some(File::from(fd));
                text("opened")
            }
            Op::Publish { slot, name } => {
                let file = self.file(*slot)?;
                rustix::fs::linkat(file, c"", CWD, self.path(name), AtFlags::EMPTY_PATH)?;
                text(())
            }
            Op::Close { slot } => text(self.files[*slot].take().is_some()),
            Op::Read { slot, offset, len } => {
                let mut bytes = vec![0; *len];
                let got = rustix::io::pread(self.file(*slot)?, &mut bytes, *offset)?;
                bytes.truncate(got);
                Ok(Outcome::Bytes(bytes))
            }
            Op::Write { slot, offset, len, fill } => {
                text(rustix::io::pwrite(self.file(*slot)?, &content(*len, *fill), *offset)?)
            }
            Op::Append { slot, len, fill } => {
                let file = self.file(*slot)?;
                rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
                text(rustix::io::write(file, &content(*len, *fill))?)
            }
            Op::Map { slot, offset, len, fill, sync } => self.map(*slot, *offset, *len, *fill, *sync),
            Op::Direct { slot, page, pages, fill } => self.direct(*slot, *page, *pages, *fill),
            Op::Uncache { slot } => {
                rustix::fs::fadvise(self.file(*slot)?, 0, None, rustix::fs::Advice::DontNeed)?;
                text("dropped")
            }
            Op::Truncate { slot, size } => text(rustix::fs::ftruncate(self.file(*slot)?, *size)?),
            Op::Allocate { slot, mode, offset, len } => {
                text(rustix::fs::fallocate(self.file(*slot)?, *mode, *offset, *len)?)
            }
            Op::Sync { slot, data_only } => {
                let file = self.file(*slot)?;
                if *data_only {
                    rustix::fs::fdatasync(file)?
                } else {
                    rustix::fs::fsync(file)?
                }
                text("synced")
            }
            Op::CopyRange { from, to, offset, at, len } => {
                if from == to {
                    return text("not within one file");
                }
                let (mut offset, mut at) = (*offset, *at);
                let (from, to) = (self.file(*from)?, self.file(*to)?);
                text(rustix::fs::copy_file_range(from, Some(&mut offset), to, Some(&mut at), *len)?)
            }
            Op::Seek { slot, offset } => {
                // Where the holes are may differ; the end of the file not.
                let file = self.file(*slot)?;
                // Positions in a directory are the file system's own.
                if file.metadata().map_err(errno)?.is_dir() {
                    return text("a directory");
                }
                match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(*offset)) {
                    Err(error) if *offset >= file.metadata().map_err(errno)?.len() => text(error),
                    _ => text("some data"),
                }
            }
            Op::StatFile { slot } => {
                let file = self.file(*slot)?;
                text(stat_words(&rustix::fs::fstat(file)?))
            }
            Op::Stat { name } => {
                let stat = rustix::fs::lstat(self.path(name))?;
                text(stat_words(&stat))
            }
            Op::Unlink { name } => text(rustix::fs::unlink(self.path(name))?),
            Op::Rmdir { name } => text(rustix::fs::rmdir(self.path(name))?),
            Op::Mkdir { name } => text(rustix::fs::mkdir(self.path(name), Mode::from_raw_mode(0o755))?),
            Op::Mkfifo { name } => {
                text(rustix::fs::mknodat(CWD, self.path(name), FileType::Fifo, Mode::from_raw_mode(0o600), 0)?)
            }
            Op::Rename { from, to, flags } => {
                text(rustix::fs::renameat_with(CWD, self.path(from), CWD, self.path(to), *flags)?)
            }
            Op::Link { from, to } => {
                text(rustix::fs::linkat(CWD, self.path(from), CWD, self.path(to), AtFlags::empty())?)
            }
            Op::Symlink { target, name } => text(rustix::fs::symlink(target, self.path(name))?),
            Op::Readlink { name } => text(rustix::fs::readlink(self.path(name), Vec::new())?),
            Op::Chmod { name, mode } => {
                // Without following links out of the directory: names are relative, so they do not leave it.
                text(rustix::fs::chmod(self.path(name), Mode::from_raw_mode(*mode))?)
            }
            Op::Chown { name, uid } => {
                let uid = rustix::fs::Uid::from_raw(*uid);
                text(rustix::fs::chownat(CWD, self.path(name), Some(uid), None, AtFlags::SYMLINK_NOFOLLOW)?)
            }
            Op::Times { name, seconds, omit } => {
                let path = self.path(name);
                let times = Timestamps {
                    last_access: Timespec { tv_sec: 0, tv_nsec: if *omit { UTIME_OMIT } else { UTIME_NOW } },
                    last_modification: Timespec { tv_sec: *seconds, tv_nsec: 123_456_789 },
                };
                rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
                let stat = rustix::fs::lstat(&path)?;
                text((stat.st_mtime, stat.st_mtime_nsec))
            }
            Op::List { name } => text(list(&self.path(name)).map_err(errno)?),
            Op::SetXattr { name, attribute, value, flags } => {
                let value = content(*value, *value as u8);
                text(rustix::fs::lsetxattr(self.path(name), attribute.as_str(), &value, *flags)?)
            }
            Op::GetXattr { name, attribute } => {
                let mut value = vec![0; 1000];
                let size = rustix::fs::lgetxattr(self.path(name), attribute.as_str(), &mut value[..])?;
                value.truncate(size);
                Ok(Outcome::Bytes(value))
            }
            Op::ListXattr { name } => {
                let mut names = vec![0; 1000];
                let size = rustix::fs::llistxattr(self.path(name), &mut names[..])?;
                let names = &names[..size];
                let mut names: Vec<_> = names.split(|b| *b == 0).map(String::from_utf8_lossy).collect();
                names.sort();
                text(names)
            }
            Op::RemoveXattr { name, attribute } => text(rustix::fs::lremovexattr(self.path(name), attribute.as_str())?),
            Op::Access { name } => text(rustix::fs::access(self.path(name), rustix::fs::Access::EXEC_OK)?),
        }
    }

    /// Reads or writes pages of a file that is open for both, past the page cache.
    fn direct(&self, slot: usize, page: u64, pages: usize, fill: Option<u8>) -> Outcomes {
        let file = self.file(slot)?;
        let mode = rustix::fs::fcntl_getfl(file)? & (OFlags::RWMODE | OFlags::APPEND);
        if mode != OFlags::RDWR || !file.metadata().map_err(errno)?.is_file() {
            return text("not a file that is open for both");
        }
        // A set-user-ID bit, or a mode that forbids it, is of no interest here.
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
        let Ok(file) = rustix::fs::open(path, OFlags::RDWR | OFlags::DIRECT, Mode::empty()) else {
            return text("not to be opened again");
        };
        let mut block = vec![Block([0; 4096]); pages];
        if let Some(fill) = fill {
            let mut written = 0;
            for (number, block) in (page..).zip(&mut block) {
                block.0.copy_from_slice(&content(4096, fill));
                written += rustix::io::pwrite(&file, &block.0, number * PAGE)?;
            }
            return text(written);
        }
        let mut bytes = Vec::new();
        for (number, block) in (page..).zip(&mut block) {
            let got = rustix::io::pread(&file, &mut block.0, number * PAGE)?;
            bytes.extend_from_slice(&block.0[..got]);
        }
        Ok(Outcome::Bytes(bytes))
    }

    /// Stores to, or loads from, a mapping of whole pages within the file.
    fn map(&self, slot: usize, offset: u64, len: usize, fill: Option<u8>, sync: bool) -> Outcomes {
        let file = self.file(slot)?;
        let size = file.metadata().map_err(errno)?.len();
        let first = offset / PAGE * PAGE;
        let end = (offset + len as u64).min(size);
        if end <= first || offset >= end {
            return text("past the end");
        }
        let bytes = (end - first) as usize;
        let write = if fill.is_some() { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, write, MapFlags::SHARED, file.as_fd(), first) }?;
        let memory = at.cast::<u8>();
        let skip = (offset - first) as usize;
        let mut seen = Vec::new();
        for i in skip..bytes {
            // SAFETY: within the mapping, and within the file, which no other thread truncates.
            unsafe {
                match fill {
                    Some(fill) => memory.add(i).write_volatile(fill.wrapping_add(i as u8)),
                    None => seen.push(memory.add(i).read_volatile()),
                }
            }
        }
        if sync {
            // SAFETY: of the mapping.
            unsafe { msync(at, bytes, MsyncFlags::SYNC) }?;
        }
        // SAFETY: not used any more.
        unsafe { munmap(at, bytes) }?;
        Ok(Outcome::Bytes(seen))
    }
}

fn content(len: usize, fill: u8) -> Vec<u8> {
    (0..len).map(|i| fill.wrapping_add(i as u8)).collect()
}

/// What must be the same on both sides: not times, device, inode and blocks, nor the size of a directory.
fn stat_words(stat: &rustix::fs::Stat) -> (u32, u64, u32, u32, i64) {
    let size = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory { 0 } else { stat.st_size };
    (stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid, size)
}

fn list(directory: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        names.push(format!("{:?} {:?}", entry.file_name(), entry.file_type()?));
    }
    names.sort();
    Ok(names)
}

/// All below a directory, with content: for comparing whole trees.
pub fn tree(root: &Path) -> Vec<String> {
    tree_with(root, |_, bytes| {
        let sum = bytes.iter().fold(0u64, |sum, b| sum.wrapping_mul(31).wrapping_add(u64::from(*b)));
        format!("sum {sum:x}")
    })
}

/// The same; `content` describes that of a file, whose path below the directory it is given.
pub fn tree_with(root: &Path, mut content: impl FnMut(&Path, &[u8]) -> String) -> Vec<String> {
    let mut lines = Vec::new();
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            // Of a user that the mode binds.
            Err(error) => {
                lines.push(format!("{}: {error}", directory.strip_prefix(root).unwrap().display()));
                continue;
            }
        };
        for entry in entries {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_owned();
            let stat = match rustix::fs::lstat(&path) {
                Ok(stat) => stat,
                Err(error) => {
                    lines.push(format!("{}: {error}", name.display()));
                    continue;
                }
            };
            let mut line = format!("{} {:?}", name.display(), stat_words(&stat));
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => todo.push(path),
                FileType::RegularFile => {
                    let bytes = match std::fs::read(&path) {
                        Ok(bytes) => bytes,
                        Err(error) => {
                            lines.push(format!("{line}: {error}"));
                            continue;
                        }
                    };
                    line += &format!(" {} bytes, {}", bytes.len(), content(&name, &bytes));
                }
                FileType::Symlink => line += &format!(" -> {}", std::fs::read_link(&path).unwrap().display()),
                _ => {}
            }
            lines.push(line);
        }
    }
    lines.sort();
    lines
}

/// Reads and writes past the page cache, in whole blocks.
pub fn direct(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path)
}

/// One block at an address that direct I/O accepts.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; 4096]);

/// Writes a block, and reads it again.
pub fn write_block(file: &File, block: &Block, offset: u64) -> Block {
    file.write_all_at(&block.0, offset).unwrap();
    let mut again = Block([0; 4096]);
    file.read_exact_at(&mut again.0, offset).unwrap();
    again
}
