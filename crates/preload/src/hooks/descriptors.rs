//! Hooks of `open`, `close` and the calls that replace a descriptor. What they report is a hint, never the only
//! evidence.
//!
//! ```text
//!   open "/dev/nvidia0"               ──> a driver is in use: from now on buffers may be device memory
//!   open "/sys/.../p2pmem/allocate"   ──> mappings of this file are device memory
//!   close, dup2, close_range, ...     ──> the file is being closed: release what is cached for it, so that its file
//!                                         system can be unmounted, and its space is freed if it was deleted
//! ```
//!
//! Correctness depends on these hooks in one case alone: a number that is closed and reused while it is read
//! (`FdIdentity`). It cannot depend on them elsewhere, because programs open and close in ways that no hook sees:
//! `fclose`, raw system calls, io_uring, a descriptor received through a socket. Each read into a device queries the
//! kernel again for the file of its descriptor. Small ones read whatever the number is, and ask only whether that may
//! wait without bound: once, if no hook has seen a change since (`KnownFds`).
//!
//! A child that closes everything before `exec` reports nothing: its parent would forget files that it still uses.
//!
//! `open` reports once the kernel has opened the path: only then is the path known to be readable memory.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{CStr, c_char, c_int, c_uint};

use spinio_device::registry;
use spinio_sys::linux;

use super::mappings;
use crate::{disabled, errno, ffi_guard as guard, next_symbol as next};

macro_rules! opens {
    ($($name:ident([$($dir:ident)?] path, flags [$($mode:ident)?]) = $next:ident;)+) => {$(
        // The mode is passed only with O_CREAT. Otherwise its register is passed on as it is: the callee does not read
        // it.
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $($dir: c_int,)?
            path: *const c_char,
            flags: c_int
            $(, $mode: c_uint)?
        ) -> c_int {
            // SAFETY: the program's own arguments.
            let fd = unsafe { next::$next.get()($($dir,)? path, flags $(, $mode)?) };
            if fd >= 0 {
                // SAFETY: the kernel has just read the path.
                unsafe { after_open(fd, path) };
            }
            fd
        }
    )+};
}

opens! {
    open([] path, flags [mode]) = OPEN;
    open64([] path, flags [mode]) = OPEN64;
    __open([] path, flags [mode]) = OPEN_UNDERSCORED;
    __open64([] path, flags [mode]) = OPEN64_UNDERSCORED;
    openat([dir] path, flags [mode]) = OPENAT;
    openat64([dir] path, flags [mode]) = OPENAT64;
    __open_2([] path, flags []) = OPEN_2;
    __open64_2([] path, flags []) = OPEN64_2;
    __openat_2([dir] path, flags []) = OPENAT_2;
    __openat64_2([dir] path, flags []) = OPENAT64_2;
}

/// # Safety
/// `path` must be NUL-terminated.
#[inline]
unsafe fn after_open(fd: c_int, path: *const c_char) {
    // Device files are opened by absolute paths, "/dev/..." and "/sys/...": any other path is of no interest.
    // SAFETY: the caller's promise: the second byte is readable if the first is not the end.
    let second = unsafe { if *path == b'/' as c_char { *path.add(1) as u8 } else { 0 } };
    if matches!(second, b'd' | b's') && !disabled::is_disabled() {
        // SAFETY: as above.
        let path = unsafe { CStr::from_ptr(path) }.to_bytes();
        let saved = errno::get();
        if second == b'd' {
            registry::hint_open(path);
        } else {
            mappings::after_open(fd, path);
        }
        errno::set(saved);
    }
}

/// These numbers are about to be closed or reused. The returned guard lives until the call has returned.
///
/// The change is no hint: it is counted in signal handlers too, but not for a child, which has another fd table even
/// where it shares the memory.
#[inline]
fn before_close_range(first: c_uint, last: c_uint) -> Option<spinio_io::FdChange> {
    before_change(first, last, || true)
}

/// `closes`: whether the call will close these numbers, as far as that is known before it. The change is counted even
/// if not, because another thread may make the call possible meanwhile.
#[inline]
fn before_change(first: c_uint, last: c_uint, closes: impl FnOnce() -> bool) -> Option<spinio_io::FdChange> {
    if !registry::any_device() || first > last || disabled::is_disabled() {
        return None;
    }
    let change = spinio_io::has_runtime().then(|| spinio_io::FdChange::begin(first, last));
    guard::run_hint(|| match closes() {
        true if first == last => spinio_io::on_close(first as c_int),
        true => spinio_io::on_close_range(first, last),
        false => {}
    });
    change
}

#[inline]
fn before_close(fd: c_int) -> Option<spinio_io::FdChange> {
    let fd = c_uint::try_from(fd).ok()?;
    before_close_range(fd, fd)
}

/// `dup2` and `dup3`. A call that fails leaves `new` open, and what is kept for its file: a pinned file would stay
/// unpinned.
#[inline]
fn before_dup(old: c_int, new: c_int, flags: c_int) -> Option<spinio_io::FdChange> {
    let number = c_uint::try_from(new).ok().filter(|_| old != new)?;
    before_change(number, number, || flags & !libc::O_CLOEXEC == 0 && linux::may_dup_to(old, new))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    let _change = before_close(fd);
    // SAFETY: the program's own arguments.
    unsafe { next::CLOSE.get()(fd) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __close(fd: c_int) -> c_int {
    let _change = before_close(fd);
    // SAFETY: the program's own arguments.
    unsafe { next::CLOSE_UNDERSCORED.get()(fd) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // CLOSE_RANGE_CLOEXEC closes nothing yet. CLOSE_RANGE_UNSHARE closes in an unshared table of this thread: for all
    // other threads, and a process in which SPIN is active has some, the numbers stay. The kernel refuses other flags.
    let _change = if flags == 0 { before_close_range(first, last) } else { None };
    // SAFETY: the program's own arguments.
    unsafe { next::CLOSE_RANGE.get()(first, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn closefrom(first: c_int) {
    let _change = before_close_range(first.max(0) as c_uint, c_uint::MAX);
    // SAFETY: the program's own arguments.
    unsafe { next::CLOSEFROM.get()(first) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup2(old: c_int, new: c_int) -> c_int {
    let _change = before_dup(old, new, 0);
    // SAFETY: the program's own arguments.
    unsafe { next::DUP2.get()(old, new) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __dup2(old: c_int, new: c_int) -> c_int {
    let _change = before_dup(old, new, 0);
    // SAFETY: the program's own arguments.
    unsafe { next::DUP2_UNDERSCORED.get()(old, new) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    let _change = before_dup(old, new, flags);
    // SAFETY: the program's own arguments.
    unsafe { next::DUP3.get()(old, new, flags) }
}
