//! A file named on the command line, opened, and the requested range.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use rustix::fs::{SeekFrom, seek};
use spinio_sys::linux::{self, FileKind};

use crate::exit::{self, Exit};
use crate::format;

/// A file and a range in it.
#[derive(Debug, Args)]
pub struct Input {
    /// A regular file or a block device
    #[arg(value_name = "FILE")]
    path: PathBuf,
    /// First byte
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = format::parse)]
    offset: u64,
    /// How many bytes [default: to the end of the file]
    #[arg(long, value_name = "BYTES", value_parser = format::parse)]
    length: Option<u64>,
}

/// An open file and a range in it.
pub struct OpenRange {
    /// The file, read-only.
    pub file: File,
    /// First byte.
    pub offset: u64,
    /// Bytes from there: for a read truncated at the end of the file, for a write as given, unless that is a device's.
    pub len: u64,
}

/// Opens a file for reading. A named pipe is refused first: its `open` waits for a writer.
pub fn open(path: &Path) -> anyhow::Result<File> {
    let cannot = || format!("Cannot open {}", path.display());
    if std::fs::metadata(path).with_context(cannot)?.file_type().is_fifo() {
        bail!("Cannot read {}: it is no file with offsets", path.display());
    }
    File::open(path).with_context(cannot)
}

impl Input {
    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it and truncates the range at the end of the file.
    pub fn open(&self) -> anyhow::Result<OpenRange> {
        self.open_range(false)
    }

    /// Opens it for reading, with a range that a write may have: one past the end of a regular file extends it.
    pub fn open_for_write_range(&self) -> anyhow::Result<OpenRange> {
        self.open_range(true)
    }

    fn open_range(&self, extending: bool) -> anyhow::Result<OpenRange> {
        let name = self.path.display();
        let cannot = || format!("Cannot open {name}");
        let file = open(&self.path)?;
        if file.metadata().with_context(cannot)?.is_dir() {
            bail!("Cannot read {name}: it is a directory");
        }
        let stat = linux::fstat(file.as_raw_fd()).map_err(std::io::Error::from).with_context(cannot)?;
        let size = match stat.kind {
            FileKind::Regular => stat.size,
            FileKind::Block => seek(&file, SeekFrom::End(0)).map_err(std::io::Error::from).with_context(cannot)?,
            FileKind::Other => bail!("Cannot read {name}: it is no file with offsets"),
        };
        // `/proc` reports a size of 0 for files that are not empty.
        if stat.kind == FileKind::Regular && size == 0 && file.read_at(&mut [0], 0).is_ok_and(|n| n > 0) {
            bail!("Cannot read {name}: it has bytes, but its file system reports a size of 0, as /proc does");
        }
        let extending = extending && stat.kind == FileKind::Regular;
        if let (true, Some(len)) = (extending, self.length)
            && self.offset.checked_add(len).is_none_or(|end| i64::try_from(end).is_err())
        {
            let text =
                format!("--offset {} and --length {len} end after the last byte that a file can have", self.offset);
            return Err(exit::error(Exit::Usage, text));
        }
        if let (true, Some(len)) = (extending, self.length) {
            return Ok(OpenRange { file, offset: self.offset, len });
        }
        if extending && self.offset >= size {
            let text = format!("{name} ends at {size}: give --length, of a write there");
            return Err(exit::error(Exit::Usage, text));
        }
        if self.offset > size {
            let text = format!("--offset {} is past the end of {} ({size} bytes)", self.offset, self.path.display());
            return Err(exit::error(Exit::Usage, text));
        }
        let rest = size - self.offset;
        Ok(OpenRange { file, offset: self.offset, len: self.length.map_or(rest, |len| len.min(rest)) })
    }
}
