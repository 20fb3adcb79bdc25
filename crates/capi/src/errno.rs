//! libc's errno, which a hook may change only to report a failure.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::c_int;

/// The calling thread's errno.
#[inline]
pub fn get() -> c_int {
    // SAFETY: libc's pointer to this thread's own errno is always valid.
    unsafe { *libc::__errno_location() }
}

/// errno as a hook found it. A call that succeeds restores it, because a query of a driver or an attempt on the host
/// may have changed it before the call was served. Without a destructor: frames of the host path have none.
#[derive(Clone, Copy)]
pub struct Saved {
    place: *mut c_int,
    value: c_int,
}

impl Saved {
    /// The calling thread's errno now.
    #[inline(always)]
    pub fn now() -> Saved {
        // SAFETY: libc's pointer to this thread's own errno is always valid.
        unsafe {
            let place = libc::__errno_location();
            Saved { place, value: *place }
        }
    }

    /// Restores errno, on the thread that saved it.
    #[inline(always)]
    pub fn restore(self) {
        // SAFETY: as in `now`; the pointer is of this thread, and no hook passes a `Saved` to another.
        unsafe { *self.place = self.value }
    }
}

/// Sets it.
#[inline]
pub fn set(value: c_int) {
    // SAFETY: as in `get`.
    unsafe { *libc::__errno_location() = value }
}
