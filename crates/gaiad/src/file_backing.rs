//! A file below the mount, as the page table uses it.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use spinio_pagecache as pagecache;

/// An open descriptor of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileBacking<'a>(pub(crate) BorrowedFd<'a>);

impl pagecache::Backing for FileBacking<'_> {
    fn size(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(self.0)?.st_size as u64)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let inside = read(self.0, offset, bytes)?;
        bytes[inside..].fill(0);
        Ok(inside)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        Ok(write(self.0, offset, bytes)?)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| rustix::fs::ftruncate(self.0, size))?)
    }

    fn punch(&self, bytes: Range<u64>) -> io::Result<()> {
        let end = bytes.end.min(self.size()?);
        if bytes.start >= end {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punch = || rustix::fs::fallocate(self.0, flags, bytes.start, end - bytes.start);
        match rustix::io::retry_on_intr(punch) {
            Err(Errno::OPNOTSUPP) => {
                let zeros = vec![0; 64 << 10];
                let mut at = bytes.start;
                while at < end {
                    let len = (end - at).min(zeros.len() as u64);
                    write(self.0, at, &zeros[..len as usize])?;
                    at += len;
                }
                Ok(())
            }
            result => Ok(result?),
        }
    }
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn read(file: BorrowedFd<'_>, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(bytes) => done += bytes,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes all bytes.
pub(crate) fn write(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], offset + done as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => done += written,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The errno of an error of the page table.
pub(crate) fn errno(error: &pagecache::Error) -> Errno {
    match error {
        pagecache::Error::NoSpace => Errno::NOSPC,
        pagecache::Error::NotOpen => Errno::INVAL,
        pagecache::Error::Backing(error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
        pagecache::Error::Busy | pagecache::Error::Layout => Errno::IO,
    }
}
