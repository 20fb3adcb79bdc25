//! Host memory for devices that need no driver to pin it, and functions to map it.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::sync::{Mutex, PoisonError};

use spinio_sys::Errno;
use spinio_sys::linux::{self, MAP_ANONYMOUS, MAP_PRIVATE, PAGE};

use crate::{DeviceError, ErrorKind, PinnedBuffer};

pub(crate) const READ_WRITE: u32 = linux::PROT_READ | linux::PROT_WRITE;

/// Bounce buffers: memory that is reused, but never unmapped, so that a late copy cannot fault.
#[derive(Debug, Default)]
pub(crate) struct HostMemoryPool {
    blocks: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    idle: Vec<PinnedBuffer>,
    in_use: usize,
}

impl HostMemoryPool {
    /// Page-aligned memory of at least one page.
    pub(crate) fn acquire(&self, len: usize) -> Result<PinnedBuffer, DeviceError> {
        let refused = DeviceError::new(ErrorKind::NoMemory, "staging");
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(refused)?;
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let block = match blocks.idle.iter().position(|b| b.len == len) {
            Some(at) => blocks.idle.swap_remove(at),
            None => {
                // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
                let ptr =
                    unsafe { linux::mmap(core::ptr::null_mut(), len, READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) }
                        .map_err(|_| refused)?;
                // As CUDA's: storage writes contiguous memory with fewer, larger requests.
                // SAFETY: advice on a new mapping of this function.
                let _ = unsafe { linux::madvise(ptr, len, linux::MADV_HUGEPAGE) };
                PinnedBuffer { ptr, len }
            }
        };
        blocks.in_use += 1;
        Ok(block)
    }

    /// Releases a buffer; it stays mapped, but has no pages until it is acquired again.
    pub(crate) fn release(&self, block: PinnedBuffer) {
        // SAFETY: the block is idle; a late reader finds zeros.
        let _ = unsafe { linux::madvise(block.ptr, block.len, linux::MADV_DONTNEED) };
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.in_use -= 1;
        blocks.idle.push(block);
    }

    /// The number of acquired buffers.
    pub(crate) fn in_use(&self) -> usize {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).in_use
    }
}

/// A failed system call of a device.
pub(crate) fn system_error(operation: &'static str, errno: Errno) -> DeviceError {
    let kind = if errno == Errno::NOMEM { ErrorKind::NoMemory } else { ErrorKind::Driver };
    DeviceError { kind, operation, code: errno.raw_os_error() }
}
