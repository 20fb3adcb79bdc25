//! GPU kernels of the emulated GPUs, for the headers in `device/`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};

use spinio_device::emulated::{self, Emulated};
use spinio_device::{DeviceAddr, DeviceError, ErrorKind, StreamId};

use crate::ffi_guard::{self as guard, Failure};

type Kernel = unsafe extern "C" fn(*mut c_void);

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_device_count() -> c_int {
    let count = guard::run(|| {
        super::memory::configure_emulated()?;
        Ok(emulated::count() as c_int)
    });
    count.unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_set_device(device: c_int) -> c_int {
    guard::status(|| {
        super::memory::configure_emulated()?;
        emulated::set_current(number(device)?).map_err(|e| device_failure(e, "use the emulated GPU"))
    })
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_device() -> c_int {
    emulated::current_ordinal() as c_int
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_can_access_peer(device: c_int, peer: c_int) -> c_int {
    let possible = guard::run(|| Ok(device_of(device)?.can_access_peer(device_of(peer)?)));
    possible.map_or(-1, c_int::from)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_enable_peer_access(peer: c_int) -> c_int {
    guard::status(|| {
        let enabled = current()?.enable_peer_access(device_of(peer)?);
        match enabled.map_err(|e| device_failure(e, "access the memory of the other emulated GPU"))? {
            true => Ok(()),
            false => Err(Failure::Message(libc::EEXIST, "The access was enabled before".into())),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_emulated_copy(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    guard::status(|| {
        let stream = StreamId(stream as u64);
        // SAFETY: the header requires the memory to stay allocated until the copy is done.
        unsafe { of_stream(stream)?.copy_between(stream, DeviceAddr(to as u64), DeviceAddr(from as u64), size) }
            .map_err(|e| device_failure(e, "copy"))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_emulated_launch(
    kernel: Option<Kernel>,
    argument: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    guard::status(|| {
        let kernel = kernel.ok_or(Failure::Errno(libc::EINVAL))?;
        let stream = StreamId(stream as u64);
        // SAFETY: the header requires a function and an argument that are valid until the stream has called it.
        unsafe { of_stream(stream)?.launch(stream, kernel, argument) }.map_err(|e| device_failure(e, "launch a kernel"))
    })
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_stream() -> *mut c_void {
    let made = guard::run(|| current()?.new_stream().map_err(|e| device_failure(e, "make a stream")));
    made.map_or(core::ptr::null_mut(), |queue| queue.0 as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_stream_nonblocking() -> *mut c_void {
    let made = guard::run(|| current()?.new_unordered_stream().map_err(|e| device_failure(e, "make a stream")));
    made.map_or(core::ptr::null_mut(), |queue| queue.0 as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_emulated_wait(stream: *mut c_void) -> c_int {
    guard::status(|| {
        let stream = StreamId(stream as u64);
        of_stream(stream)?.wait_stream(stream).map_err(|e| device_failure(e, "wait for a stream"))
    })
}

fn number(device: c_int) -> Result<u32, Failure> {
    u32::try_from(device).map_err(|_| Failure::Message(libc::ENODEV, format!("{device} is no device")))
}

/// The device that this thread uses.
fn current() -> Result<&'static Emulated, Failure> {
    super::memory::configure_emulated()?;
    emulated::current().map_err(|e| device_failure(e, "start the emulated GPU"))
}

/// The device of a number.
fn device_of(device: c_int) -> Result<&'static Emulated, Failure> {
    super::memory::configure_emulated()?;
    emulated::device(number(device)?).map_err(|e| device_failure(e, "start the emulated GPU"))
}

/// The device that made a stream, or the one that this thread uses.
fn of_stream(stream: StreamId) -> Result<&'static Emulated, Failure> {
    super::memory::configure_emulated()?;
    emulated::of_stream(stream).map_err(|e| match stream.0 {
        0 => device_failure(e, "start the emulated GPU"),
        _ => Failure::Message(libc::EINVAL, "This is no stream of an emulated GPU".into()),
    })
}

fn device_failure(error: DeviceError, what: &str) -> Failure {
    let number = match error.kind {
        ErrorKind::NoMemory => libc::ENOMEM,
        ErrorKind::BadAddress => libc::EINVAL,
        ErrorKind::Unsupported => libc::ENODEV,
        _ => libc::EIO,
    };
    Failure::Message(number, format!("Cannot {what}: {error}"))
}
