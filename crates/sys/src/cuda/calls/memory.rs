//! Memory: pinned, queried, copied, allocated. All need a current context.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;
use crate::cuda::types::Stream;

impl Driver {
    /// Pins host memory for the device; flags are [`crate::cuda::register`].
    ///
    /// # Safety
    /// The range must be mapped, and stay so until it is unregistered.
    pub unsafe fn host_register(&self, ptr: *mut u8, len: usize, flags: u32) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.host_register(ptr.cast(), len, flags)) }
    }

    /// Unpins it.
    ///
    /// # Safety
    /// No copy may use it any more.
    pub unsafe fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.host_unregister(ptr.cast())) }
    }

    /// The device address of registered host memory.
    pub fn host_device_pointer(&self, ptr: *const u8) -> Result<u64> {
        let mut at = 0;
        // SAFETY: `at` lives across the call; the driver validates the pointer, which it does not follow.
        unsafe { cu!(self.host_device_pointer?(&mut at, ptr.cast_mut().cast(), 0)) }.map(|()| at)
    }

    /// Queues a copy into the device.
    ///
    /// # Safety
    /// `src` must be readable and, if pinned, unchanged until the copy is done; the stream alive.
    #[inline]
    pub unsafe fn copy_in(&self, dst: u64, src: *const u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.copy_in(dst, src.cast(), len, stream.0)) }
    }

    /// Queues a copy out of the device.
    ///
    /// # Safety
    /// `dst` must be writable until the copy is done; the stream alive.
    #[inline]
    pub unsafe fn copy_out(&self, dst: *mut u8, src: u64, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.copy_out(dst.cast(), src, len, stream.0)) }
    }

    /// Queues a copy between device addresses, which may be mappings of another device's memory.
    ///
    /// # Safety
    /// Both must stay mapped, with access for the stream's device, until the copy is done; the stream alive.
    pub unsafe fn copy_within(&self, dst: u64, src: u64, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.copy_within?(dst, src, len, stream.0)) }
    }

    /// New device memory.
    pub fn alloc(&self, len: usize) -> Result<u64> {
        let mut at = 0;
        // SAFETY: `at` lives across the call.
        unsafe { cu!(self.mem_alloc(&mut at, len)) }.map(|()| at)
    }

    /// Frees device memory.
    ///
    /// # Safety
    /// It must come from [`Driver::alloc`] and no longer be in use.
    pub unsafe fn free(&self, at: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.mem_free(at)) }
    }
}
