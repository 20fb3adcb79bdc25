//! GPU kernels of the emulated GPU, for the headers in `device/`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};

use spinio_device::emulated::Emulated;
use spinio_device::{DeviceError, ErrorKind, StreamId, registry};

use crate::ffi_guard::{self as guard, Failure};

type Kernel = unsafe extern "C" fn(*mut c_void);

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_emulated_launch(
    kernel: Option<Kernel>,
    argument: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let done = guard::run(|| {
        let kernel = kernel.ok_or(Failure::Errno(libc::EINVAL))?;
        // SAFETY: the header requires a function and an argument that are valid until the stream has called it.
        unsafe { device()?.launch(StreamId(stream as u64), kernel, argument) }
            .map_err(|e| device_failure(e, "launch a kernel"))
    });
    done.map_or(-1, |()| 0)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_stream() -> *mut c_void {
    let made = guard::run(|| device()?.new_stream().map_err(|e| device_failure(e, "make a stream")));
    made.map_or(core::ptr::null_mut(), |queue| queue.0 as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_stream_nonblocking() -> *mut c_void {
    let made = guard::run(|| device()?.new_unordered_stream().map_err(|e| device_failure(e, "make a stream")));
    made.map_or(core::ptr::null_mut(), |queue| queue.0 as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_wait(stream: *mut c_void) -> c_int {
    let done = guard::run(|| {
        device()?.wait_stream(StreamId(stream as u64)).map_err(|e| device_failure(e, "wait for a stream"))
    });
    done.map_or(-1, |()| 0)
}

fn device() -> Result<&'static Emulated, Failure> {
    super::memory::configure_emulated()?;
    registry::emulated().map_err(|e| device_failure(e, "start the emulated GPU"))
}

fn device_failure(error: DeviceError, what: &str) -> Failure {
    let number = match error.kind {
        ErrorKind::NoMemory => libc::ENOMEM,
        ErrorKind::BadAddress => libc::EINVAL,
        _ => libc::EIO,
    };
    Failure::Message(number, format!("Cannot {what}: {error}"))
}
