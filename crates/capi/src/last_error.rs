//! The message of the thread's last failed device call, for `spinio_last_error`.
//!
//! A fixed buffer without a destructor, so that a thread that ends, or is cancelled, has nothing to free.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::cell::UnsafeCell;
use std::ffi::c_char;
use std::fmt::{Display, Write};

const SIZE: usize = 512;

thread_local! {
    static TEXT: UnsafeCell<[u8; SIZE]> = const { UnsafeCell::new([0; SIZE]) };
}

/// Stores a message; it is truncated if it does not fit.
pub(crate) fn set(error: &dyn Display) {
    let mut text = TruncatingWriter { bytes: [0; SIZE], len: 0 };
    let _ = write!(text, "{error}");
    // SAFETY: only this thread has the cell, and no reference into it is alive: `pointer` hands out none.
    TEXT.with(|cell| unsafe { *cell.get() = text.bytes });
}

/// The message, NUL-terminated; empty if no call has failed yet. It changes with the thread's next failure.
pub(crate) fn pointer() -> *const c_char {
    TEXT.with(|cell| cell.get().cast_const().cast())
}

struct TruncatingWriter {
    bytes: [u8; SIZE],
    len: usize,
}

impl Write for TruncatingWriter {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = SIZE - 1 - self.len;
        let fits = (0..=text.len().min(room)).rev().find(|&n| text.is_char_boundary(n)).unwrap_or(0);
        self.bytes[self.len..self.len + fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.len += fits;
        Ok(())
    }
}
