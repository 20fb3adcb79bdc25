//! Kernels and host functions, in a stream's order. All need a current context.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{CStr, c_void};

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;
use crate::cuda::types::{Function, Stream};

impl Driver {
    /// Loads code (a cubin, or PTX that ends in NUL) and looks up one kernel. The module stays for the life of its
    /// context.
    ///
    /// # Safety
    /// `code` must be complete: the driver reads as much as its headers specify.
    pub unsafe fn load_kernel(&self, code: &[u8], name: &CStr) -> Result<Function> {
        let (mut module, mut function) = (0, 0);
        // SAFETY: `module` lives across the call; the caller guarantees the code.
        unsafe { cu!(self.module_load?(&mut module, code.as_ptr().cast())) }?;
        // SAFETY: loaded in the line above; the name is NUL-terminated.
        unsafe { cu!(self.module_function?(&mut function, module, name.as_ptr())) }.map(|()| Function(function))
    }

    /// Queues a call of a host function, which must not call the driver.
    ///
    /// # Safety
    /// The stream must be alive, and the function be one that may be called once with the argument, on any thread.
    pub unsafe fn launch_host_func(
        &self,
        stream: Stream,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.host_function?(stream.0, function, argument)) }
    }

    /// Queues a kernel: `blocks` of `threads`.
    ///
    /// # Safety
    /// The function and the stream must be alive, and each parameter point to a value of the GPU kernel's parameter
    /// type; the caller guarantees the GPU kernel's memory accesses.
    pub unsafe fn launch(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        stream: Stream,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let none = core::ptr::null_mut();
        let with = parameters.as_mut_ptr();
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.launch?(function.0, blocks, 1, 1, threads, 1, 1, 0, stream.0, with, none)) }
    }
}
