//! The boundary between a C caller and Rust: only a number and errno cross it.
//!
//! A panic becomes EIO. The unwinding of `pthread_cancel` must meet no frame that would stop it, or that holds a lock:
//! a call to the next function never runs in here, and since a driver may contain a cancellation point, cancellation is
//! deferred until the device call is complete.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::c_int;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::thread;

use spinio_io::{Error, deliver_after, device_call, has_runtime, is_in_device_call};

use crate::{errno, last_error};

unsafe extern "C-unwind" {
    /// Ends the thread here if a cancellation is pending.
    fn pthread_testcancel();
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const CANCEL_DISABLE: c_int = 1;

/// Why a call fails.
pub enum Failure {
    /// An error of this library, with a text.
    Io(Error),
    /// An errno of the kernel, or an argument that the kernel would refuse.
    Errno(i32),
    /// An errno with a message that is more specific.
    Message(i32, String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Io(error)
    }
}

impl From<spinio_sys::Errno> for Failure {
    fn from(errno: spinio_sys::Errno) -> Failure {
        Failure::Errno(errno.raw_os_error())
    }
}

/// Runs a device call: its count, or -1 and errno. A success leaves errno alone.
pub fn call(body: impl FnOnce() -> Result<usize, Failure>) -> isize {
    run(body).map_or(-1, |count| count as isize)
}

/// As [`call`], for results that are no count; `None` after errno was set.
pub fn run<T>(body: impl FnOnce() -> Result<T, Failure>) -> Option<T> {
    static PANIC_HOOK: Once = Once::new();
    let saved = errno::get();
    // Nothing may be printed into the program's output; spinio_last_error() returns the message.
    PANIC_HOOK.call_once(|| panic::set_hook(Box::new(|panic| last_error::set(panic))));
    let failed = match run_inside(body) {
        Ok(Ok(done)) => {
            errno::set(saved);
            return Some(done);
        }
        Ok(Err(Failure::Io(error))) => {
            last_error::set(&error);
            error.kind.errno().raw_os_error()
        }
        Ok(Err(Failure::Errno(value))) => {
            last_error::set(&std::io::Error::from_raw_os_error(value));
            value
        }
        Ok(Err(Failure::Message(value, sentence))) => {
            last_error::set(&sentence);
            value
        }
        // The panic hook above has stored the message.
        Err(_) => libc::EIO,
    };
    errno::set(failed);
    None
}

/// As [`call`], for calls whose only result is that they have succeeded: 0.
pub fn status(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    run(body).map_or(-1, |()| 0)
}

/// Reports an event that saves work later. Nothing depends on it, so it must not wait: it is dropped in a signal
/// handler that has interrupted a device call, whose locks its own thread holds, and in a child that shares the memory
/// of its parent.
pub fn run_hint(body: impl FnOnce()) {
    if is_in_device_call() || !has_runtime() {
        return;
    }
    let saved = errno::get();
    let _ = run_inside(body);
    errno::set(saved);
}

fn run_inside<T>(body: impl FnOnce() -> T) -> thread::Result<T> {
    deliver_after(|| with_cancel_disabled(|| device_call(|| panic::catch_unwind(AssertUnwindSafe(body)))))
}

/// Runs a closure that must not be cancelled half-way, and must not panic.
pub fn with_cancel_disabled<T>(body: impl FnOnce() -> T) -> T {
    let mut state = 0;
    // SAFETY: `state` lives across the call.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut state) };
    let done = body();
    // SAFETY: restores what was saved above.
    unsafe { pthread_setcancelstate(state, core::ptr::null_mut()) };
    done
}

/// A call that may block is a point where the thread can be cancelled: before it acquires anything.
pub fn cancellation_point() {
    // SAFETY: no arguments. It may unwind, and the frames above hold nothing that needs dropping.
    unsafe { pthread_testcancel() }
}
