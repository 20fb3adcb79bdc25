//! Hooks of `posix_fadvise`. The advice goes to the Linux kernel first; SPIN notes it too.
//!
//! ```text
//!   RANDOM       no read-ahead: short sequential reads do not use the page cache for its sake
//!   SEQUENTIAL   from the first read on, and twice as wide, as in the Linux kernel
//!   DONTNEED     the pages there that SPIN read into the page cache are forgotten by SPIN too
//!   WILLNEED     belongs to the program: SPIN does not drop it. Where a device has read the file before, more than the
//!                one window is requested that the Linux kernel fetches by itself
//! ```
//!
//! Only advice that the Linux kernel has accepted is noted. NORMAL, RANDOM and SEQUENTIAL last, so they are noted also
//! before any device is in use.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::c_int;

use spinio_device::registry;
use spinio_sys::linux::Advice;

use crate::{disabled, ffi_guard as guard, next_symbol as next};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_fadvise(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    // SAFETY: the program's own arguments.
    let failed = unsafe { next::POSIX_FADVISE.get()(fd, offset, len, advice) };
    after_advice(failed, fd, offset, len, advice)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_fadvise64(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    // SAFETY: the program's own arguments.
    let failed = unsafe { next::POSIX_FADVISE64.get()(fd, offset, len, advice) };
    after_advice(failed, fd, offset, len, advice)
}

/// It returns its error instead of setting errno.
#[inline]
fn after_advice(failed: c_int, fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    let is_kept = matches!(advice, libc::POSIX_FADV_NORMAL | libc::POSIX_FADV_RANDOM | libc::POSIX_FADV_SEQUENTIAL);
    if failed == 0 && (is_kept || registry::any_device()) && !disabled::is_disabled() {
        record_advice(fd, offset, len, advice);
    }
    failed
}

#[cold]
fn record_advice(fd: c_int, offset: i64, len: i64, advice: c_int) {
    let advice = match advice {
        libc::POSIX_FADV_NORMAL => Advice::Normal,
        libc::POSIX_FADV_RANDOM => Advice::Random,
        libc::POSIX_FADV_SEQUENTIAL => Advice::Sequential,
        libc::POSIX_FADV_WILLNEED => Advice::WillNeed,
        libc::POSIX_FADV_DONTNEED => Advice::DontNeed,
        _ => return,
    };
    spinio_io::record_advice(fd, advice);
    if let (Ok(offset), Ok(len)) = (u64::try_from(offset), u64::try_from(len)) {
        guard::run_hint(|| spinio_io::apply_advice(fd, offset, len, advice));
    }
}
