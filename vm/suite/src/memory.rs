//! Memory of the p2pmem device, mapped by hand or allocated by SPIN.
//!
//! What arrived is always looked at by CPU loads, not by SPIN's own copies, so that SPIN is not its own judge.
//! Only this file holds unsafe code: mappings, and system calls into them.

use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;

use linux_raw_sys::general as k;
use spinio_device::{DeviceAddr, DeviceKind, registry};
use spinio_io::Target;
use spinio_sys::Errno;
use spinio_sys::linux;

use crate::case::Miss;

/// Host-mapped device memory.
pub(crate) struct P2pMemory {
    start: *mut u8,
    len: usize,
    owner: Owner,
}

/// Who gives it back.
#[derive(PartialEq, Eq)]
enum Owner {
    Case,
    Registry,
}

impl P2pMemory {
    /// `len` bytes from the first device that publishes its memory.
    pub(crate) fn allocate(len: usize) -> Result<P2pMemory, Miss> {
        let path = allocator()?;
        let file = fs::OpenOptions::new().read(true).write(true).open(&path)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            linux::mmap(std::ptr::null_mut(), len, k::PROT_READ | k::PROT_WRITE, k::MAP_SHARED, file.as_raw_fd(), 0)
        }?;
        Ok(P2pMemory { start, len, owner: Owner::Case })
    }

    /// `len` bytes from SPIN's registry: a device buffer.
    pub(crate) fn of_spin(len: usize) -> Result<P2pMemory, Miss> {
        let addr = registry::alloc(DeviceKind::P2pmem, 0, len, true).map_err(|e| Miss::Failed(e.to_string()))?;
        Ok(P2pMemory { start: addr.0 as *mut u8, len, owner: Owner::Registry })
    }

    /// Where a read of SPIN's goes that shall start at `at`.
    pub(crate) fn target(&self, at: usize) -> Result<Target, Miss> {
        let addr = DeviceAddr(self.start as u64 + at as u64);
        let allocation = registry::find(addr.0 as *const u8, self.len - at)
            .ok_or_else(|| Miss::Failed("the registry does not know its own memory".to_owned()))?;
        Ok(Target { allocation, addr })
    }

    /// Fills all of it by CPU stores.
    pub(crate) fn fill(&mut self, byte: u8) {
        self.fill_range(0, self.len, byte);
    }

    /// Fills a part of it.
    pub(crate) fn fill_range(&mut self, at: usize, len: usize, byte: u8) {
        assert!(at + len <= self.len);
        // SAFETY: within the mapping, and `self` is borrowed alone.
        unsafe { std::ptr::write_bytes(self.start.add(at), byte, len) };
    }

    /// A copy of `len` bytes from `at`, by CPU loads.
    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        // SAFETY: within the mapping, as just checked; nobody writes while we look.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }.to_vec()
    }

    /// Stores bytes by the CPU.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: within the mapping, and `bytes` is other memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }

    /// `pread` into it, wherever the kernel takes the bytes from.
    pub(crate) fn pread(&mut self, fd: RawFd, at: usize, len: usize, offset: u64) -> Result<usize, Errno> {
        assert!(at + len <= self.len);
        // SAFETY: the range is ours to write.
        unsafe { linux::pread(fd, self.start.add(at), len, offset) }
    }

    /// `pwrite` from it.
    pub(crate) fn pwrite(&self, fd: RawFd, at: usize, len: usize, offset: u64) -> Result<usize, Errno> {
        assert!(at + len <= self.len);
        // SAFETY: the range is readable.
        unsafe { linux::pwrite(fd, self.start.add(at), len, offset) }
    }
}

impl Drop for P2pMemory {
    fn drop(&mut self) {
        if self.owner == Owner::Registry {
            let _ = registry::free(DeviceAddr(self.start as u64));
            return;
        }
        // SAFETY: the mapping is ours and no reference into it lives.
        let _ = unsafe { linux::munmap(self.start, self.len) };
    }
}

/// The file whose mappings are device memory.
pub(crate) fn allocator() -> Result<PathBuf, Miss> {
    for device in fs::read_dir("/sys/bus/pci/devices")? {
        let path = device?.path().join("p2pmem/allocate");
        if path.exists() {
            return Ok(path);
        }
    }
    Err(Miss::Failed("no device publishes peer-to-peer memory".to_owned()))
}

/// A page of a file, stored to through a shared mapping and left dirty.
pub(crate) fn store_through_mapping(file: &fs::File, page: u64, bytes: &[u8]) -> Result<(), Miss> {
    assert!(bytes.len() <= linux::PAGE);
    // SAFETY: a new mapping replaces nothing; the store stays within it and it is removed again.
    unsafe {
        let at = linux::mmap(
            std::ptr::null_mut(),
            linux::PAGE,
            k::PROT_READ | k::PROT_WRITE,
            k::MAP_SHARED,
            file.as_raw_fd(),
            page * linux::PAGE as u64,
        )?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
        linux::munmap(at, linux::PAGE)?;
    }
    Ok(())
}
