//! `SPINIO_DISABLE=1`: every hook becomes a plain call to the next function.
//!
//! Read once, when the library is loaded: a program that changes its environment later does not change us.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static OFF: AtomicBool = AtomicBool::new(false);

/// Whether the hooks must leave everything alone.
#[inline]
pub(crate) fn is_off() -> bool {
    OFF.load(Relaxed)
}

/// Reads the environment; for the constructor.
pub(crate) fn read() {
    // SAFETY: the name is NUL-terminated, and at load time nobody changes the environment.
    let value = unsafe { libc::getenv(c"SPINIO_DISABLE".as_ptr()) };
    // SAFETY: a value that getenv found is NUL-terminated, so the second byte is there if the first is not the end.
    let one = !value.is_null() && unsafe { *value == b'1' as _ && *value.add(1) == 0 };
    OFF.store(one, Relaxed);
}
