//! Memory of devices that have no allocator of their own.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use spinio_device::{DeviceAddr, DeviceError, DeviceKind, ErrorKind, emulated, registry};
use spinio_io::{Target, runtime};

use super::target_of;
use crate::ffi_guard::{self as guard, Failure};

/// `SPINIO_MEM_HOST_MAPPED`
const HOST_MAPPED: c_uint = 1;
/// Host memory that a copy between two devices passes through.
const BOUNCE_BYTES: usize = 1 << 20;

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_mem_alloc(device: *const c_char, size: usize, flags: c_uint) -> *mut c_void {
    let made = guard::run(|| {
        if device.is_null() || size == 0 || flags & !HOST_MAPPED != 0 {
            return Err(Failure::Errno(libc::EINVAL));
        }
        // SAFETY: the header asks for a string.
        let name = unsafe { CStr::from_ptr(device) }.to_string_lossy();
        let unknown = || Failure::Message(libc::ENODEV, format!("There is no device \"{name}\" to allocate from"));
        let (kind, ordinal) = parse(&name).filter(|(kind, _)| *kind != DeviceKind::Cuda).ok_or_else(unknown)?;
        if kind == DeviceKind::Emulated {
            configure_emulated()?;
        }
        registry::alloc(kind, ordinal, size, flags & HOST_MAPPED != 0)
            .map_err(|e| device_failure(e, &format!("Cannot allocate {size} bytes on {name}")))
    });
    made.map_or(core::ptr::null_mut(), |at: DeviceAddr| at.0 as *mut c_void)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_mem_free(memory: *mut c_void) -> c_int {
    if memory.is_null() {
        return 0;
    }
    guard::status(|| {
        registry::free(DeviceAddr(memory as u64)).map_err(|e| device_failure(e, "Cannot free device memory"))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_mem_copy(to: *mut c_void, from: *const c_void, size: usize) -> c_int {
    guard::status(|| {
        if size == 0 {
            return Ok(());
        }
        let (to, from) = (to.cast::<u8>(), from.cast::<u8>());
        match (device_slice(to, size)?, device_slice(from, size)?) {
            // SAFETY: both are host memory, and the header requires `size` bytes at each.
            (None, None) => unsafe { core::ptr::copy(from, to, size) },
            // SAFETY: `from` is host memory, and the header requires `size` bytes there.
            (Some(device), None) => write_device(device, unsafe { core::slice::from_raw_parts(from, size) })?,
            // SAFETY: `to` is host memory, and the header requires `size` bytes there.
            (None, Some(device)) => runtime().fetch(device, unsafe { core::slice::from_raw_parts_mut(to, size) })?,
            (Some(into), Some(out_of)) => {
                let mut bounce = vec![0u8; size.min(BOUNCE_BYTES)];
                for at in (0..size).step_by(BOUNCE_BYTES) {
                    let len = BOUNCE_BYTES.min(size - at);
                    runtime().fetch(advance(out_of, at), &mut bounce[..len])?;
                    write_device(advance(into, at), &bounce[..len])?;
                }
            }
        }
        Ok(())
    })
}

/// Configures the emulated GPU; without effect once it is created.
pub(super) fn configure_emulated() -> Result<(), Failure> {
    let Some(text) = &runtime().settings().emulated else { return Ok(()) };
    emulated::configure(text).map_err(|e| Failure::Message(libc::EINVAL, format!("SPINIO_EMULATED={text}: {e}")))
}

/// `emulated`, `p2pmem:1`: back end and number, 0 if none is given.
fn parse(name: &str) -> Option<(DeviceKind, u32)> {
    let (kind, ordinal) = match name.split_once(':') {
        Some((kind, ordinal)) => (kind, ordinal.parse().ok()?),
        None => (name, 0),
    };
    let kind = [DeviceKind::Emulated, DeviceKind::Cuda, DeviceKind::P2pmem].into_iter().find(|k| k.name() == kind)?;
    Some((kind, ordinal))
}

/// The device memory at an address, `None` for host memory; an error if it ends before `size` bytes.
fn device_slice(address: *const u8, size: usize) -> Result<Option<Target>, Failure> {
    match target_of(address, size) {
        Some(t) if t.allocation.bytes_left(t.addr) < size as u64 => Err(Failure::Errno(libc::EFAULT)),
        other => Ok(other),
    }
}

fn advance(target: Target, bytes: usize) -> Target {
    Target { addr: target.addr.offset(bytes as u64), ..target }
}

/// Copies into the device and waits until the bytes have arrived, which a small copy of `io` does not.
fn write_device(to: Target, bytes: &[u8]) -> Result<(), Failure> {
    runtime().put(to, bytes)?;
    Ok(runtime().wait_arrived(to, "copy to the device", 0, bytes.len() as u64)?)
}

fn device_failure(error: DeviceError, what: &str) -> Failure {
    let number = match error.kind {
        ErrorKind::NoMemory => libc::ENOMEM,
        ErrorKind::BadAddress => libc::EFAULT,
        ErrorKind::Unsupported => libc::ENODEV,
        _ => libc::EIO,
    };
    Failure::Message(number, format!("{what}: {error}"))
}
