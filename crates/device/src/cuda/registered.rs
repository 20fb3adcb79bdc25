//! Host memory that is registered with the driver: bounce buffers, and pins of page-cache pages.
//!
//! Registration holds a lock of the driver, so long ranges are pinned part by part. Whether read-only pages can be
//! registered is only known after trying: after several refusals in a row pinning is disabled.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use spinio_sys::cuda::{CuError, register};
use spinio_sys::linux;

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::{DeviceError, ErrorKind, Pin, PinnedBuffer};

type Result<T> = core::result::Result<T, DeviceError>;

/// Longer ranges are pinned part by part: a registration holds a lock of the driver while it runs.
pub(super) const MAX_PIN: u64 = 512 << 20;

/// Refusals in a row after which pinning is not tried again.
const MAX_REFUSALS: u32 = 4;

/// Whether pages can be pinned.
#[derive(Default)]
pub(super) struct PinSupport {
    /// As reported by the driver.
    pub(super) is_supported: bool,
    /// Refusals in a row.
    refusals: AtomicU32,
}

impl PinSupport {
    pub(super) fn is_worth_trying(&self) -> bool {
        self.is_supported && self.refusals.load(Relaxed) < MAX_REFUSALS
    }
}

impl Cuda {
    /// Allocates pinned memory of less than 2 MiB.
    pub(super) fn alloc_pinned_host(&self, len: usize) -> Result<PinnedBuffer> {
        let _entered = self.enter()?;
        let refused = |_| DeviceError::new(ErrorKind::NoMemory, "mmap of staging memory");
        let ptr = linux::map_anonymous(len, linux::PAGE).map_err(refused)?;
        // SAFETY: advice on a new mapping of this function. A forked child cannot use memory that a device writes, and must
        // not make the parent copy it.
        let _ = unsafe { linux::madvise(ptr, len, linux::MADV_DONTFORK) };
        let _relaxed = RelaxedCapture::enter(self.driver);
        // SAFETY: mapped above, and unmapped only after it is unregistered.
        match unsafe { self.driver.host_register(ptr, len, register::PORTABLE) } {
            Ok(()) => Ok(PinnedBuffer { ptr, len }),
            Err(e) => {
                // SAFETY: the address was not published yet.
                let _ = unsafe { linux::munmap(ptr, len) };
                let error = self.driver_error("cuMemHostRegister", e);
                let kind = if error.kind == ErrorKind::Driver { ErrorKind::NoMemory } else { error.kind };
                Err(DeviceError { kind, ..error })
            }
        }
    }

    /// Unregisters it, if its context still lives.
    pub(super) fn free_pinned_host(&self, memory: PinnedBuffer) {
        let unregistered = match self.enter() {
            Ok(_entered) => {
                let _relaxed = RelaxedCapture::enter(self.driver);
                // SAFETY: registered by `alloc_pinned_host`; by the contract no copy uses it any more.
                unsafe { self.driver.host_unregister(memory.ptr) }.is_ok()
            }
            // The registration, and every copy, ended with the context.
            Err(e) => e.kind == ErrorKind::ContextLost,
        };
        if unregistered {
            // SAFETY: our own mapping, no longer in use.
            let _ = unsafe { linux::munmap(memory.ptr, memory.len) };
        }
    }

    /// Registers memory of the process.
    ///
    /// # Safety
    /// The range must stay mapped, and keep its pages, until it is unregistered.
    pub(super) unsafe fn register_memory(&self, ptr: *mut u8, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        // SAFETY: guaranteed by the caller.
        unsafe { self.driver.host_register(ptr, len, register::PORTABLE) }
            .map_err(|e| self.driver_error("cuMemHostRegister", e))
    }

    /// Unregisters it; false if the driver refuses.
    pub(super) fn unregister_memory(&self, ptr: *mut u8) -> bool {
        match self.enter() {
            Ok(_entered) => {
                let _relaxed = RelaxedCapture::enter(self.driver);
                // SAFETY: registered by `register_memory`; by the contract no copy uses it any more.
                unsafe { self.driver.host_unregister(ptr) }.is_ok()
            }
            // The registration, and every copy, ended with the context.
            Err(e) => e.kind == ErrorKind::ContextLost,
        }
    }

    /// Registers the pages around a range.
    ///
    /// # Safety
    /// The range must stay mapped until it is unpinned.
    pub(super) unsafe fn pin_pages(&self, ptr: *const u8, len: usize) -> Result<Pin> {
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let start = ptr as usize & !(linux::PAGE - 1);
        let end = (ptr as usize + len).next_multiple_of(linux::PAGE);
        // SAFETY: the caller keeps the range mapped; the rest of its first and last page is mapped with it.
        match unsafe { self.driver.host_register(start as *mut u8, end - start, register::READ_ONLY) } {
            Ok(()) => {
                self.pin_support.refusals.store(0, Relaxed);
                Ok(Pin { ptr, len, handle: start as u64 })
            }
            Err(e) => {
                let error = self.driver_error("cuMemHostRegister", e);
                if error.kind == ErrorKind::ContextLost {
                    return Err(error);
                }
                // A lack of memory, or a pin by another request at the moment, does not predict the next pin.
                if !matches!(e, CuError::OUT_OF_MEMORY | CuError::HOST_MEMORY_ALREADY_REGISTERED) {
                    self.pin_support.refusals.fetch_add(1, Relaxed);
                }
                Err(DeviceError { kind: ErrorKind::PinRefused, ..error })
            }
        }
    }

    /// Unregisters them.
    pub(super) fn unpin_pages(&self, pin: Pin) {
        let Ok(_entered) = self.enter() else { return }; // the registration died with its context
        let _relaxed = RelaxedCapture::enter(self.driver);
        // SAFETY: registered by `pin_pages`; by the contract every copy from it is done.
        let _ = unsafe { self.driver.host_unregister(pin.handle as usize as *mut u8) };
    }
}
