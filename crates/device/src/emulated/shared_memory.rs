//! Memory in chunks: a chunk is a memory file, whose length is sealed if other processes may map it.
//!
//! Emulated devices of the same number are one device to the processes of a machine: they share chunks, as two
//! processes do that use one GPU. Private chunks count toward the size of the device, and contain [`super::POISON`]
//! first. Known difference: chunks that are shared do not count.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use spinio_sys::linux::{self, Fd};

use super::chunks::GRANULARITY;
use super::{Emulated, Result};
use crate::host_memory::system_error;
use crate::{Chunk, DeviceAddr, DeviceError, ErrorKind, SharedMemory, registry};

/// Begins the name of a memory file; the number of the device follows.
const CHUNK: &str = "spinio-chunk-";

/// Begins the identity of a device; its number follows.
const UUID: &[u8; 12] = b"spinio-emu\0\0";

/// The number of the device of an identity.
pub(crate) fn ordinal_of(uuid: [u8; 16]) -> Option<u32> {
    uuid.strip_prefix(UUID).and_then(|number| Some(u32::from_le_bytes(number.try_into().ok()?)))
}

/// Whether a descriptor is a chunk of this length.
pub(super) fn check_chunk(fd: Fd, len: u64) -> Result<()> {
    let fits = linux::fstat(fd).is_ok_and(|stat| stat.size == len) && linux::cannot_shrink(fd);
    if !fits || len == 0 || !len.is_multiple_of(GRANULARITY) {
        return Err(DeviceError::new(ErrorKind::Driver, "import of a chunk"));
    }
    Ok(())
}

/// The number of the device that has made a chunk, by the name of the memory file.
fn device_of(fd: Fd) -> Option<u32> {
    let name = std::fs::read_link(format!("/proc/thread-self/fd/{fd}")).ok()?;
    name.to_str()?.strip_prefix("/memfd:")?.strip_prefix(CHUNK)?.strip_suffix(" (deleted)")?.parse().ok()
}

impl Emulated {
    /// Of the memory files of this device.
    fn chunk_name(&self) -> CString {
        CString::new(format!("{CHUNK}{}", self.ordinal)).unwrap_or_default()
    }

    /// A handle for a descriptor of the caller's table.
    fn handle_of(&self, fd: Fd, len: u64) -> Result<Chunk> {
        let tid = linux::gettid();
        let own = self.worker.run_blocking(|| linux::dup_from_thread(tid, fd))?;
        let own = own.map_err(|e| system_error("pidfd_getfd", e))?;
        Ok(self.memory.chunks.add_handle(own, len))
    }

    /// Unmaps a chunk; the memory file of a private one is closed.
    fn unmap(&self, addr: DeviceAddr, len: u64) -> Result<()> {
        let Some(fd) = self.memory.chunks.unmap(addr, len)? else { return Ok(()) };
        self.worker.run_blocking(|| {
            let _ = linux::close(fd);
        })
    }
}

impl SharedMemory for Emulated {
    fn chunk_granularity(&self) -> Result<u64> {
        Ok(GRANULARITY)
    }

    fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        uuid[..12].copy_from_slice(UUID);
        uuid[12..].copy_from_slice(&self.ordinal.to_le_bytes());
        Ok(uuid)
    }

    fn reserve(&self, len: u64) -> Result<DeviceAddr> {
        self.check()?;
        self.memory.chunks.reserve(len, |start, len| registry::add_range(self.owner, start, len))
    }

    fn free_reservation(&self, addr: DeviceAddr, len: u64) -> Result<()> {
        self.check()?;
        self.memory.chunks.free_reservation(addr, len)
    }

    fn create_chunk(&self, len: u64) -> Result<(Chunk, OwnedFd)> {
        self.check()?;
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "chunk of this length"));
        }
        let fd = linux::sized_memfd(&self.chunk_name(), len).map_err(|e| system_error("memfd_create", e))?;
        // SAFETY: opened above, and owned by nothing else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((self.handle_of(fd.as_raw_fd(), len)?, fd))
    }

    fn import_chunk(&self, fd: BorrowedFd<'_>, len: u64) -> Result<Chunk> {
        self.check()?;
        check_chunk(fd.as_raw_fd(), len)?;
        if !self.config.peer && device_of(fd.as_raw_fd()).is_some_and(|device| device != self.ordinal) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "import of a chunk of a device without access"));
        }
        self.handle_of(fd.as_raw_fd(), len)
    }

    fn map_without_access(&self, addr: DeviceAddr, len: u64, chunk: Chunk) -> Result<()> {
        self.check()?;
        self.worker.run_blocking(|| self.memory.chunks.map(addr, len, chunk))?
    }

    fn map_private_chunks(&self, addr: DeviceAddr, lens: &[u64]) -> Result<usize> {
        self.check()?;
        let (name, mut at) = (self.chunk_name(), addr);
        for (n, len) in lens.iter().enumerate() {
            match self.worker.run_blocking(|| self.memory.map_private_chunk(&name, at, *len))? {
                Ok(()) => at = at.offset(*len),
                Err(e) if e.kind == ErrorKind::NoMemory => return Ok(n),
                Err(e) => {
                    let mut at = addr;
                    for len in &lens[..n] {
                        let _ = self.unmap(at, *len);
                        at = at.offset(*len);
                    }
                    return Err(e);
                }
            }
        }
        Ok(lens.len())
    }

    fn export_private_chunk(&self, addr: DeviceAddr, len: u64) -> Result<OwnedFd> {
        self.check()?;
        let fd = self.memory.chunks.private_fd(addr, len)?;
        let tid = self.worker.run_blocking(linux::gettid)?;
        let own = linux::dup_from_thread(tid, fd).map_err(|e| system_error("pidfd_getfd", e))?;
        // SAFETY: opened above, and owned by nothing else.
        Ok(unsafe { OwnedFd::from_raw_fd(own) })
    }

    fn protect_chunks(&self, addr: DeviceAddr, len: u64, writable: bool) -> Result<()> {
        self.check()?;
        self.memory.chunks.protect(addr, len, writable)
    }

    fn unmap_chunk(&self, addr: DeviceAddr, len: u64) -> Result<()> {
        self.check()?;
        self.engine.synchronize_all();
        self.unmap(addr, len)
    }

    fn release_chunk(&self, chunk: Chunk) -> Result<()> {
        self.check()?;
        let fd = self.memory.chunks.remove_handle(chunk)?;
        self.worker.run_blocking(|| {
            let _ = linux::close(fd);
        })
    }
}
