//! The counters by which an acquire knows that nothing has changed (`spinio_pagecache::change_counters`).

#![expect(unsafe_code, reason = "memory shared with another process")]

use std::os::fd::AsFd;

use spinio_pagecache::change_counters::{self, FILE_WORDS, SERVER_WORDS, Unwritten};
use spinio_sys::Errno;
use spinio_sys::linux::ReadOnlyWords;

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// The mappings.
#[derive(Debug)]
pub(crate) struct Counters {
    file: ReadOnlyWords,
    servers: ReadOnlyWords,
}

impl Counters {
    /// Maps the memory files that came with the first reply.
    pub(crate) fn map(file: &OwnedFd, servers: &OwnedFd) -> Result<Counters> {
        Ok(Counters { file: map(file, FILE_WORDS)?, servers: map(servers, SERVER_WORDS)? })
    }

    /// Now; `None`: a program may have the file open for writing.
    pub(crate) fn read(&self) -> Option<Unwritten> {
        change_counters::read(&self.file, &self.servers)
    }
}

fn map(file: &OwnedFd, words: usize) -> Result<ReadOnlyWords> {
    let stat = rustix::fs::fstat(file).map_err(|e| Error::of(e, "query the counters"))?;
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|e| Error::of(e, "query the counters"))?;
    if (stat.st_size as u64) < words as u64 * 8 || !seals.contains(rustix::fs::SealFlags::SHRINK) {
        return Err(Error::new(Errno::PROTO, "The GAIA server sent counters of the wrong size"));
    }
    // SAFETY: the file is as long, and cannot shrink. Words are loaded only.
    unsafe { ReadOnlyWords::map(file.as_fd(), words) }.map_err(|e| Error::of(e, "map the counters"))
}
