//! A file to measure with: one of the user's, read only, or a scratch file without a name in a directory of the user's.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{SeekFrom, seek};
use spinio_sys::linux::{self, Advice};

use crate::demo::file;
use crate::exit::{self, Exit};
use crate::progress::Progress;
use crate::scratch;

/// Bytes per read into the page cache.
const STEP: usize = 1 << 20;

/// The file.
pub struct TestFile {
    /// Open, for reading; a scratch file for writing too.
    pub file: File,
    /// The file, or the directory of the scratch file.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// A scratch file: it may be written.
    pub scratch: bool,
}

impl TestFile {
    /// A regular file or block device as it is, or in a directory a new file of `size` bytes, which has no name and is
    /// freed when this process ends.
    pub fn open(path: &Path, size: u64) -> anyhow::Result<TestFile> {
        let cannot = || format!("Cannot open {}", path.display());
        let kind = std::fs::metadata(path).with_context(cannot)?;
        let refuse = |why: &str| exit::error(Exit::Failed, format!("Cannot measure on {}: {why}", path.display()));
        if scratch::is_in_memory(path) && !is_device(&kind) {
            return Err(refuse("this file system keeps its files in memory, there is no storage to measure"));
        }
        if kind.is_dir() {
            let file = tempfile::tempfile_in(path)
                .with_context(|| format!("Cannot make a scratch file in {}", path.display()))?;
            file::make(&file, path, size)?;
            return Ok(TestFile { file, path: path.to_owned(), size, scratch: true });
        }
        if !kind.is_file() && !is_device(&kind) {
            return Err(refuse("it is no file with offsets"));
        }
        let file = File::open(path).with_context(cannot)?;
        let size = seek(&file, SeekFrom::End(0)).map_err(std::io::Error::from).with_context(cannot)?;
        if size < 1 << 20 {
            return Err(refuse("it has less than 1 MiB"));
        }
        Ok(TestFile { file, path: path.to_owned(), size, scratch: false })
    }

    /// Reads all of it into the page cache.
    pub fn read_into_cache(&self, len: u64) -> anyhow::Result<()> {
        let mut progress = Progress::bytes(len, "Reading the file into the page cache");
        let mut at = 0;
        while at < len {
            self.read_range_into_cache(at, (len - at).min(STEP as u64))?;
            at += STEP as u64;
            progress.set(at.min(len));
        }
        Ok(())
    }

    /// Reads a range of it into the page cache.
    pub fn read_range_into_cache(&self, at: u64, len: u64) -> anyhow::Result<()> {
        let mut bytes = vec![0u8; len.min(STEP as u64) as usize];
        let (mut at, end) = (at, at + len);
        while at < end {
            let n = (end - at).min(bytes.len() as u64) as usize;
            self.file
                .read_exact_at(&mut bytes[..n], at)
                .with_context(|| format!("Cannot read {}", self.path.display()))?;
            at += n as u64;
        }
        Ok(())
    }

    /// Drops the cached pages of a range, as far as the kernel permits. A page may be in a per-CPU list at that moment:
    /// then tries again.
    pub fn evict(&self, at: u64, len: u64) {
        for _ in 0..5 {
            let _ = linux::fadvise(self.file.as_raw_fd(), at, len, Advice::DontNeed);
            match linux::cachestat(self.file.as_raw_fd(), at, len) {
                Ok(c) if c.cached > 0 => std::thread::sleep(std::time::Duration::from_millis(5)),
                _ => return,
            }
        }
    }

    /// The kernel's read-ahead for this descriptor.
    pub fn advise(&self, advice: Advice) {
        let _ = linux::fadvise(self.file.as_raw_fd(), 0, 0, advice);
    }

    /// Nanoseconds per byte to write `len` dirty bytes back; none if the file is not a scratch file.
    pub fn writeback(&self, len: u64) -> anyhow::Result<Option<f64>> {
        if !self.scratch {
            return Ok(None);
        }
        let cannot = || format!("Cannot write the scratch file in {}", self.path.display());
        let len = len.min(self.size);
        let block = vec![0x5au8; STEP];
        let mut out = &self.file;
        seek(out, SeekFrom::Start(0)).map_err(std::io::Error::from).with_context(cannot)?;
        for _ in 0..len / STEP as u64 {
            out.write_all(&block).with_context(cannot)?;
        }
        let begun = std::time::Instant::now();
        self.file.sync_data().with_context(cannot)?;
        Ok(Some(begun.elapsed().as_nanos() as f64 / (len / STEP as u64 * STEP as u64).max(1) as f64))
    }
}

fn is_device(kind: &std::fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_block_device(&kind.file_type())
}
