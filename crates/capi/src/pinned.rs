//! Pinned files, for programs that link the library.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_uint, c_void};

use spinio_device::registry;
use spinio_io::{PinError, program_fd, runtime};

use crate::ffi_guard::{self as guard, Failure};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn spinio_pin_file(fd: c_int) -> c_int {
    let done = guard::run(|| runtime().pin_file(program_fd(fd), registry::current_device()).map_err(pin_failure));
    done.map_or(-1, |_| 0)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn spinio_unpin_file(fd: c_int) -> c_int {
    guard::status(|| runtime().unpin_file(program_fd(fd)).map_err(pin_failure))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn spinio_is_pinned(fd: c_int) -> c_int {
    guard::run(|| Ok(runtime().is_pinned(program_fd(fd)))).map_or(-1, c_int::from)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_map(fd: c_int, offset: i64, size: usize, flags: c_uint) -> *mut c_void {
    let mapped = guard::run(|| {
        let offset = u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?;
        if flags != 0 {
            return Err(Failure::Errno(libc::EINVAL));
        }
        let device = registry::current_device().ok_or_else(|| pin_failure(PinError::NoDevice))?;
        runtime().map_until_unmap(program_fd(fd), offset, size as u64, device).map_err(pin_failure)
    });
    mapped.map_or(core::ptr::null_mut(), |address| address as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_unmap(address: *const c_void) -> c_int {
    guard::status(|| match runtime().unmap(address as u64) {
        true => Ok(()),
        false => Err(Failure::Errno(libc::EINVAL)),
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn spinio_map_revoked(address: *const c_void) -> c_int {
    let revoked = guard::run(|| runtime().revoke_requested(address as u64).ok_or(Failure::Errno(libc::EINVAL)));
    revoked.map_or(-1, c_int::from)
}

fn pin_failure(error: PinError) -> Failure {
    Failure::Message(error.errno().raw_os_error(), error.to_string())
}
