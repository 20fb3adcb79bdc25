//! libc's errno, which a hook may change only to report a failure.

use std::ffi::c_int;

/// The calling thread's errno.
#[inline]
pub fn get() -> c_int {
    // SAFETY: libc's pointer to this thread's own errno is always valid.
    unsafe { *libc::__errno_location() }
}

/// Sets it.
#[inline]
pub fn set(value: c_int) {
    // SAFETY: as in `get`.
    unsafe { *libc::__errno_location() = value }
}
