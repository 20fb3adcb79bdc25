//! CPU reads from GPU memory: chunks that clients lend, and the READs that are answered from them.
//!
//! ```text
//!   client ── Lend, descriptor of a chunk ──> reads its pages of the file once: a tag of each          tag.rs
//!
//!   READ ── is any page in the host's page cache? ── yes ──> the file
//!             └ no ── a chunk with all pages, and tags of all? ── no ──> the file
//!                       └ yes ── device process copies them into a memory file of the server
//!                                  └ tags of that copy are right? ── no ──> the file
//!                                                                 └ yes ──> the answer
//! ```
//!
//! **A read from a chunk is a read of the file**: a page has a tag only while the file has the bytes of that tag. Whatever
//! changes the file clears the tags of those pages first, with the lock of the file's pages, and a tag is stored with the
//! same lock, if nothing has changed since its bytes were read. So it does not matter what the chunk's owner, its kernels, or
//! a program that kept the descriptor do to its memory, nor which pages of it are current.
//!
//! **Cost**: a copy takes longer than a read of a cached page, and less than one from a disk. The device process, which takes
//! a second to start, is started by Lend. If it has ended meanwhile, because no READ needed it, a READ takes the file and
//! has it started.
//!
//! Known flaws: a READ must lie in one chunk; pages that a program has changed are not tagged again before the next Lend. A
//! device that hangs delays a READ until the device process gives up.

pub(crate) mod chunks;
mod tag;

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::process::Resource;
use spinio_pagecache::{OwnerId, PAGE, offset_of};
use spinio_sys::linux::{self, Advice};

use self::chunks::{Counted, Found, LentChunks};
use self::tag::{Key, Tag};
use crate::device_process::{CopyRange, DeviceChunk, DeviceProcess, Target};
use crate::file_backing;
use crate::files::File;
use crate::lock::lock;
use crate::threads::spawn;

/// The longest READ that is answered from a chunk.
const LONGEST: usize = 1 << 20;
/// Pages that are read for their tags at a time.
const TAGGED: u64 = (LONGEST / PAGE) as u64;
/// Chunks of all files.
const MOST: usize = 4096;

/// What the READs of all files have in common.
#[derive(Debug)]
pub(crate) struct LentReads {
    devices: Arc<DeviceProcess>,
    key: Key,
    /// For copies that run at the same time.
    buffers: Mutex<Vec<Buffer>>,
    is_importing: AtomicBool,
    chunks: Arc<AtomicUsize>,
    most: usize,
    pages: AtomicU64,
}

/// A memory file for one copy.
struct Buffer {
    file: OwnedFd,
    target: Target,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Buffer")
    }
}

impl LentReads {
    pub(crate) fn new() -> Result<Arc<LentReads>, Errno> {
        // Each chunk is a descriptor.
        let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = MOST.min((limit / 8) as usize);
        Ok(Arc::new(LentReads {
            devices: DeviceProcess::new(),
            key: Key::random()?,
            buffers: Mutex::default(),
            is_importing: AtomicBool::new(false),
            chunks: Arc::default(),
            most,
            pages: AtomicU64::new(0),
        }))
    }

    /// The device process, which copies for others too: each one would have a context of its own.
    pub(crate) fn devices(&self) -> Arc<DeviceProcess> {
        Arc::clone(&self.devices)
    }

    /// Pages that READs have got from chunks.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Takes a chunk of a client, and reads its pages of the file, whose bytes `backing` has.
    ///
    /// # Errors
    /// ENFILE: as many are lent as may be. Of the device process, and of the file.
    pub(crate) fn lend(
        self: &Arc<LentReads>,
        file: &File,
        owner: OwnerId,
        pages: Range<u64>,
        chunk: DeviceChunk,
        backing: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        let counted = Counted::new(&self.chunks, self.most).ok_or(Errno::NFILE)?;
        // What is no chunk of a device that is here is refused now.
        self.devices.import(&chunk)?;
        file.lent().add(owner, pages.clone(), Arc::new(chunk), counted);
        let tagged = self.tag_pages(file, owner, pages.clone(), backing);
        if tagged.is_err() {
            // The client takes it for not lent: its memory is not to be held here.
            file.lent().end(owner, &pages);
        }
        tagged
    }

    /// Tags the pages of the file, by which reads of the chunk are verified.
    fn tag_pages(&self, file: &File, owner: OwnerId, pages: Range<u64>, backing: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut bytes = vec![0; LONGEST];
        for first in pages.clone().step_by(TAGGED as usize) {
            let count = (pages.end - first).min(TAGGED) as usize;
            let generation = {
                let _pages = file.pages();
                file.lent().generation()
            };
            let part = &mut bytes[..count * PAGE];
            let was_absent = is_absent(backing, offset_of(first), part.len());
            let inside = file_backing::read(backing, offset_of(first), part)?;
            part[inside..].fill(0);
            if was_absent {
                // Not to fill the host's memory with what the device has.
                let _ = linux::fadvise(backing.as_raw_fd(), offset_of(first), part.len() as u64, Advice::DontNeed);
            }
            let tags: Vec<Tag> = part.chunks_exact(PAGE).map(|page| self.key.tag(page)).collect();
            let _pages = file.pages();
            file.lent().set_tags(owner, first, &tags, generation);
        }
        Ok(())
    }

    /// A chunk of a client.
    pub(crate) fn chunk(&self, device: [u8; 16], fd: OwnedFd, bytes: u64) -> DeviceChunk {
        self.devices.chunk(device, fd, bytes)
    }

    /// Reads a part of a file from a chunk, with zeros past its end; false: take the file.
    pub(crate) fn read(
        self: &Arc<LentReads>,
        lent: &LentChunks,
        file: BorrowedFd<'_>,
        offset: u64,
        part: &mut [u8],
    ) -> bool {
        if !lent.has_any() || part.is_empty() {
            return false;
        }
        let pages = offset / PAGE as u64..(offset + part.len() as u64).div_ceil(PAGE as u64);
        let len = (pages.end - pages.start) as usize * PAGE;
        if len > LONGEST || !is_absent(file, offset_of(pages.start), len) {
            return false;
        }
        let Some(found) = lent.find(&pages) else { return false };
        if !self.devices.has(&found.chunk) {
            self.import_later(found.chunk);
            return false;
        }
        let Some(bytes) = self.copy(&found, len) else { return false };
        if !bytes.chunks_exact(PAGE).zip(&found.tags).all(|(page, tag)| self.key.tag(page) == *tag) {
            return false;
        }
        let within = (offset - offset_of(pages.start)) as usize;
        part.copy_from_slice(&bytes[within..within + part.len()]);
        self.pages.fetch_add(pages.end - pages.start, Relaxed);
        true
    }

    /// A copy of pages of a chunk that no other process can change.
    fn copy(&self, found: &Found, len: usize) -> Option<Vec<u8>> {
        let buffer = lock(&self.buffers).pop().or_else(|| self.new_buffer().ok())?;
        let range = CopyRange { from: found.from, to: 0, len: len as u64 };
        let copied = self.devices.copy(&found.chunk, &buffer.target, &[range]);
        let mut bytes = vec![0; len];
        let got = copied.and_then(|()| file_backing::read(buffer.file.as_fd(), 0, &mut bytes));
        lock(&self.buffers).push(buffer);
        (got == Ok(len)).then_some(bytes)
    }

    fn new_buffer(&self) -> Result<Buffer, Errno> {
        let file = rustix::fs::memfd_create("spinio-gaia-read", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, LONGEST as u64)?;
        let target = self.devices.target(file.try_clone().map_err(|_| Errno::MFILE)?);
        Ok(Buffer { file, target })
    }

    /// The device process has ended: another one gets the chunk, while READs take the file.
    fn import_later(self: &Arc<LentReads>, chunk: Arc<DeviceChunk>) {
        if self.is_importing.swap(true, Relaxed) {
            return;
        }
        let this = Arc::clone(self);
        let started = spawn("gaia-import", move || {
            let _ = this.devices.import(&chunk);
            this.is_importing.store(false, Relaxed);
        });
        if started.is_err() {
            self.is_importing.store(false, Relaxed);
        }
    }
}

/// Whether no page of a range of a file is in the host's page cache. False where that is not known.
fn is_absent(file: BorrowedFd<'_>, offset: u64, len: usize) -> bool {
    linux::cachestat(file.as_raw_fd(), offset, len as u64).is_ok_and(|stat| stat.cached == 0)
}
