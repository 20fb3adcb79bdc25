//! A map of a leased file.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;

use spinio_device::{Device, PAGE_BYTES, SharedMemory};
use spinio_host::lock;
use spinio_pagecache::leased_messages::{MAX_BYTES, MAX_CHUNK, MIN_CHUNK};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::chunks::Chunks;
use super::connection::{Connection, dup_from};
use crate::call_checks::{range_within, wait_for_stream};
use crate::file_reader::{FileReader, OpenFile};
use crate::process_owned::ProcessOwned;
use crate::state::Info;
use crate::table_thread::TableThread;
use crate::{Access, Error, Result};

/// A range of a file in device memory, read-only, shared with other processes. It is unmapped when dropped.
pub struct Map {
    pub(crate) device: &'static dyn SharedMemory,
    /// First byte in the file.
    pub(super) offset: u64,
    bytes: u64,
    address: u64,
    // Dropped in this order.
    pub(super) state: ProcessOwned<Mutex<State>>,
    pub(super) link: ProcessOwned<TableThread<Connection>>,
    pub(super) file: ProcessOwned<Box<dyn OpenFile>>,
}

/// What changes, under one lock: calls on one map run one after another.
pub(super) struct State {
    pub(super) chunks: Chunks,
    pub(super) info: Info,
}

impl Map {
    /// Maps `bytes` bytes of the file from `offset`, which must be a multiple of 4096. `sockets`: where the daemon is.
    pub fn new(
        fd: Fd,
        offset: u64,
        bytes: u64,
        access: Access,
        device: &'static dyn Device,
        reader: &dyn FileReader,
        sockets: Vec<PathBuf>,
    ) -> Result<Map> {
        let flags = linux::status_flags(fd).map_err(|e| Error::of(e, "query the descriptor"))? as u32;
        if access == Access::Write {
            let sentence = "A file that is not below a GAIA mount can be mapped for reading only";
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        if flags & linux::O_ACCMODE == linux::O_WRONLY {
            return Err(Error::new(Errno::ACCESS, "The descriptor is not open for reading"));
        }
        let end = offset.checked_add(bytes).filter(|end| *end <= MAX_BYTES - MAX_CHUNK);
        let Some(end) = end.filter(|_| offset.is_multiple_of(PAGE_BYTES as u64) && bytes > 0) else {
            let sentence = "A map begins at a multiple of 4096 bytes, is not empty, and ends below 64 TiB";
            return Err(Error::new(Errno::INVAL, sentence));
        };
        let memory = device.shared_memory().ok_or_else(|| {
            let sentence = format!("Memory of {} cannot be shared between processes", device.id());
            Error::new(Errno::NOTSUP, sentence)
        })?;
        let failed = |e| Error::device(e, "query the device");
        let granularity = memory.chunk_granularity().map_err(failed)?;
        if !MIN_CHUNK.is_multiple_of(granularity) {
            let sentence = format!("Chunks of {} are multiples of {granularity} bytes, not of 2 MiB", device.id());
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        let (tid, uuid) = (linux::gettid(), memory.uuid().map_err(failed)?);
        let link = TableThread::spawn(move || Connection::new(tid, fd, uuid, sockets))?;
        check_exchange(&link)?;
        link.run(Connection::connect)?;
        let file = reader.open(tid, fd)?;
        let chunks = Chunks::reserve(memory, offset..end)?;
        let address = chunks.address(offset).0;
        let state = Mutex::new(State { chunks, info: Info::default() });
        Ok(Map {
            device: memory,
            offset,
            bytes,
            address,
            state: ProcessOwned::new(state),
            link: ProcessOwned::new(link),
            file: ProcessOwned::new(file),
        })
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Without effect, since there are no stores to publish, and other programs use the memory too. An error if the range
    /// was not acquired.
    pub fn release(&self, offset: u64, len: u64) -> Result<()> {
        let range = self.check_range(offset, len)?;
        let acquired = lock(&self.state).chunks.covers(&range);
        if acquired { Ok(()) } else { Err(Error::new(Errno::INVAL, "The range was not acquired")) }
    }

    /// The bytes of the file that `len` bytes from byte `offset` of the map are.
    pub(crate) fn check_range(&self, offset: u64, len: u64) -> Result<Range<u64>> {
        let range = range_within(offset, len, self.bytes)?;
        Ok(self.offset + range.start..self.offset + range.end)
    }

    /// What the map has done.
    pub fn info(&self) -> Info {
        let state = lock(&self.state);
        Info { device_bytes: state.chunks.bytes(), ..state.info }
    }
}

/// Descriptors of chunks come in the thread's table, and the device needs them in the caller's.
fn check_exchange(link: &TableThread<Connection>) -> Result<()> {
    let identity = |fd| linux::fstat(fd).map(|stat| stat.key()).map_err(|e| Error::of(e, "query the file"));
    let (there, expected) = link.run(move |connection| {
        let fd = connection.own_file();
        Ok((fd, identity(fd)?))
    })?;
    match dup_from(link.tid(), there) {
        Ok(here) if identity(here.get())? == expected => Ok(()),
        _ => Err(Error::new(Errno::NOTSUP, "Maps that processes share take Linux 6.9 or later")),
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.state.is_own_process() {
            let _ = wait_for_stream(self.device);
        }
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "leased::Map {{ address: {:#x}, bytes: {} }}", self.address, self.bytes)
    }
}
