//! The device's memory, mapped at two ranges of addresses.
//!
//! ```text
//!   device addresses   [ BAR: RW where allocated | PROT_NONE, always        ]  passed by the program
//!                            │ same bytes               │ same bytes
//!   the engine's view  [ RW                                                 ]  private to the engine
//! ```
//!
//! So the Linux kernel refuses a plain `pread` into device memory with EFAULT, as it does for a CUDA pointer, and a
//! store by the CPU faults; but a host-mapped allocation can be stored to, as a BAR can. A GPU kernel is CPU code:
//! while one runs, the first range is accessible, and only then. The descriptor of the memory is closed as soon as both
//! ranges are mapped, on a thread with an unshared fd table.
//!
//! Fresh memory contains [`POISON`], not zeros, so that an unwritten byte is detected.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use spinio_sys::linux::{self, MADV_DONTDUMP, MADV_DONTFORK, MADV_REMOVE, MAP_SHARED, PROT_NONE};

use super::chunks::{Chunks, GRANULARITY};
use super::first_fit::{FirstFit, round_up_to_pages};
use crate::host_memory::{READ_WRITE, system_error};
use crate::{DeviceAddr, DeviceError, ErrorKind};

/// The contents of fresh device memory.
pub const POISON: u8 = 0xA5;

/// Both ranges, and their allocations.
#[derive(Debug)]
pub(super) struct Memory {
    base: u64,
    alias: u64,
    size: u64,
    bar: u64,
    allocator: Mutex<FirstFit>,
    accesses: Mutex<Accesses>,
    /// Memory at other addresses, which other processes share.
    pub(super) chunks: Chunks,
}

/// Kernels that run and access the memory.
#[derive(Debug, Default)]
struct Accesses {
    /// Of this device and of others.
    all: u32,
    /// Of this device.
    own: u32,
}

/// What an access does to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Load,
    Store,
}

/// The memory is accessible to the CPU while this lives.
#[derive(Debug)]
pub(super) struct CpuAccess<'a> {
    memory: &'a Memory,
    /// Chunks too.
    chunks: bool,
}

impl Drop for CpuAccess<'_> {
    fn drop(&mut self) {
        let mut accesses = self.memory.lock_accesses();
        accesses.all -= 1;
        if accesses.all == 0 {
            let _ = self.memory.protect(PROT_NONE);
        }
        if self.chunks {
            accesses.own -= 1;
            if accesses.own == 0 {
                self.memory.chunks.revoke_cpu_access();
            }
        }
    }
}

/// An allocation of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryAllocation {
    pub(super) start: DeviceAddr,
    pub(super) len: u64,
    pub(super) host_mapped: bool,
}

impl Memory {
    /// Maps both ranges; for a thread with an unshared fd table, since it opens a descriptor.
    pub(super) fn map(size: u64, bar: u64) -> Result<Memory, DeviceError> {
        let len = size as usize;
        let fd = linux::memfd(c"spinio-emulated").map_err(|e| system_error("memfd_create", e))?;
        // SAFETY: fresh mappings at addresses of the kernel's choice replace nothing.
        let mapped = linux::ftruncate(fd, size).map_err(|e| system_error("ftruncate", e)).and_then(|()| unsafe {
            let null = core::ptr::null_mut();
            let view = linux::mmap(null, len, READ_WRITE, MAP_SHARED, fd, 0).map_err(|e| system_error("mmap", e))?;
            match linux::mmap(null, len, PROT_NONE, MAP_SHARED, fd, 0) {
                Ok(base) => Ok((base as u64, view as u64)),
                Err(e) => {
                    let _ = linux::munmap(view, len);
                    Err(system_error("mmap", e))
                }
            }
        });
        let _ = linux::close(fd);
        let (base, view) = mapped?;
        // A forked child has no engine: without the view it cannot write into its parent's device by accident.
        // SAFETY: both concern our own fresh mapping.
        unsafe {
            let _ = linux::madvise(view as *mut u8, len, MADV_DONTFORK);
            let _ = linux::madvise(view as *mut u8, len, MADV_DONTDUMP);
        }
        Ok(Memory {
            base,
            alias: view,
            size,
            bar,
            allocator: Mutex::default(),
            accesses: Mutex::default(),
            chunks: Chunks::default(),
        })
    }

    /// The device addresses: first byte and length.
    pub(super) fn range(&self) -> (DeviceAddr, u64) {
        (DeviceAddr(self.base), self.size)
    }

    /// A new allocation, poisoned.
    pub(super) fn alloc(&self, len: u64, host_mapped: bool) -> Result<DeviceAddr, DeviceError> {
        let region = if host_mapped { 0..self.bar } else { self.bar..self.size };
        let full = DeviceError::new(ErrorKind::NoMemory, "allocation on the emulated device");
        if len == 0 {
            return Err(DeviceError::new(ErrorKind::Unsupported, "allocation of 0 bytes"));
        }
        let mut fit = self.lock_allocator();
        // Addresses may be free whose memory private chunks have.
        let used = fit.bytes() + self.chunks.private_bytes();
        if round_up_to_pages(len).is_none_or(|room| room > self.size.saturating_sub(used)) {
            return Err(full);
        }
        let at = fit.alloc(region, len).ok_or(full)?;
        drop(fit);
        let room = round_up_to_pages(len).unwrap_or(len) as usize;
        // SAFETY: the pages are this allocation's, which is not published yet, and the view is mapped forever.
        unsafe { core::ptr::write_bytes((self.alias + at) as *mut u8, POISON, room) };
        if host_mapped {
            // SAFETY: as above; more is permitted, nothing less.
            let access_result = unsafe { linux::mprotect((self.base + at) as *mut u8, room, READ_WRITE) };
            if let Err(e) = access_result {
                self.lock_allocator().free(at);
                return Err(system_error("mprotect", e));
            }
        }
        Ok(DeviceAddr(self.base + at))
    }

    /// Maps a private chunk into a reservation, a memory file of this name; for the worker, whose table gets its descriptor.
    pub(super) fn map_private_chunk(&self, name: &CStr, addr: DeviceAddr, len: u64) -> Result<(), DeviceError> {
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "chunk of this length"));
        }
        // Held until the chunk counts.
        let fit = self.lock_allocator();
        if len > self.size.saturating_sub(fit.bytes() + self.chunks.private_bytes()) {
            return Err(DeviceError::new(ErrorKind::NoMemory, "chunk on the emulated device"));
        }
        let fd = linux::sized_memfd(name, len).map_err(|e| system_error("memfd_create", e))?;
        let mapped = self.chunks.map_private(addr, len, fd);
        if mapped.is_err() {
            let _ = linux::close(fd);
        }
        mapped
    }

    /// Frees an allocation; the engine must not use it any more.
    pub(super) fn free(&self, addr: DeviceAddr) -> Result<(), DeviceError> {
        let unknown = DeviceError::new(ErrorKind::BadAddress, "free on the emulated device");
        let at = addr.0.checked_sub(self.base).filter(|&at| at < self.size).ok_or(unknown)?;
        // The lock is held to the end, so that the pages are not allocated again while they are being closed.
        let mut fit = self.lock_allocator();
        let len = fit.free(at).ok_or(unknown)?;
        let room = round_up_to_pages(len).unwrap_or(len) as usize;
        // SAFETY: the pages belonged to the allocation just freed.
        unsafe {
            if at < self.bar {
                let _ = linux::mprotect(addr.0 as *mut u8, room, PROT_NONE);
            }
            let _ = linux::madvise((self.alias + at) as *mut u8, room, MADV_REMOVE);
        }
        Ok(())
    }

    /// The allocation that contains an address; of chunks, as many side by side as are mapped.
    pub(super) fn find(&self, addr: DeviceAddr) -> Option<MemoryAllocation> {
        if self.chunks.reserves(addr) {
            let (start, len) = self.chunks.find(addr)?;
            return Some(MemoryAllocation { start, len, host_mapped: false });
        }
        let at = addr.0.checked_sub(self.base).filter(|&at| at < self.size)?;
        let (start, len) = self.lock_allocator().find(at)?;
        Some(MemoryAllocation { start: DeviceAddr(self.base + start), len, host_mapped: start < self.bar })
    }

    /// The engine's address of a range of device memory, which must be in one allocation. Chunks that are mapped
    /// read-only are not for stores.
    pub(super) fn engine_addr(
        &self,
        addr: DeviceAddr,
        len: usize,
        direction: Direction,
        operation: &'static str,
    ) -> Result<u64, DeviceError> {
        if self.chunks.reserves(addr) {
            let found = self.chunks.engine_addr(addr, len, direction);
            return found.ok_or(DeviceError::new(ErrorKind::BadAddress, operation));
        }
        let inside =
            self.find(addr).is_some_and(|allocation| allocation.start.0 + allocation.len - addr.0 >= len as u64);
        if !inside {
            return Err(DeviceError::new(ErrorKind::BadAddress, operation));
        }
        Ok(self.alias + (addr.0 - self.base))
    }

    /// Gives the CPU access to all of it, under the device's addresses: while a kernel of the device runs. The first of
    /// several kernels opens it, the last one closes it.
    pub(super) fn grant_cpu_access(&self) -> Result<CpuAccess<'_>, DeviceError> {
        let mut access = self.grant_peer_access()?;
        let mut accesses = self.lock_accesses();
        if accesses.own == 0
            && let Err(e) = self.chunks.grant_cpu_access()
        {
            self.chunks.revoke_cpu_access();
            drop(accesses);
            return Err(e);
        }
        accesses.own += 1;
        access.chunks = true;
        drop(accesses);
        Ok(access)
    }

    /// The same without the chunks: while a kernel of another device runs.
    pub(super) fn grant_peer_access(&self) -> Result<CpuAccess<'_>, DeviceError> {
        let mut accesses = self.lock_accesses();
        if accesses.all == 0 {
            self.protect(READ_WRITE)?;
        }
        accesses.all += 1;
        Ok(CpuAccess { memory: self, chunks: false })
    }

    fn lock_accesses(&self) -> MutexGuard<'_, Accesses> {
        self.accesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an address is the device's, allocated or not.
    pub(super) fn contains(&self, addr: DeviceAddr) -> bool {
        addr.0.wrapping_sub(self.base) < self.size || self.chunks.reserves(addr)
    }

    /// The CPU's access to memory that is not host-mapped.
    fn protect(&self, prot: u32) -> Result<(), DeviceError> {
        let len = (self.size - self.bar) as usize;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: our own mapping; a program that relies on its protection has the error that this detects.
        unsafe { linux::mprotect((self.base + self.bar) as *mut u8, len, prot) }
            .map_err(|e| system_error("mprotect", e))
    }

    /// The number of allocations.
    pub(super) fn count(&self) -> usize {
        self.lock_allocator().count()
    }

    fn lock_allocator(&self) -> MutexGuard<'_, FirstFit> {
        self.allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
