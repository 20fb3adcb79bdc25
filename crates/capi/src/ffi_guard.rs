//! The border between a C caller and our own code: nothing of ours crosses it but a number and errno.
//!
//! A panic becomes EIO. And the unwinding of `pthread_cancel` must meet no frame that would stop it, or that holds a
//! lock: a call to the next function never runs in here, and since a driver may come across a cancellation point of its
//! own, cancellation is put off until the device call is over.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::thread;

use spinio_io::Error;

use crate::{errno, fork_guard, last_error};

unsafe extern "C-unwind" {
    /// Ends the thread here if the program has asked for it.
    fn pthread_testcancel();
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const CANCEL_DISABLE: c_int = 1;

thread_local! {
    /// The thread is inside a device call, so what a signal handler does now has interrupted one.
    static IN_DEVICE_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Why a call fails.
pub enum Failure {
    /// Of our own making, with a text of its own.
    Io(Error),
    /// The kernel's answer or an argument that the kernel would refuse.
    Errno(i32),
    /// With a sentence that says more than the errno does.
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

/// As [`call`], for answers that are no count; `None` after errno was set.
pub fn run<T>(body: impl FnOnce() -> Result<T, Failure>) -> Option<T> {
    static PANIC_HOOK: Once = Once::new();
    let saved = errno::get();
    // Nothing may be printed into the program's output; spinio_last_error() returns the message.
    PANIC_HOOK.call_once(|| panic::set_hook(Box::new(|panic| last_error::set(panic))));
    fork_guard::record_device_call();
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
        // The hook above has kept the message.
        Err(_) => libc::EIO,
    };
    errno::set(failed);
    None
}

/// Passes on news that spare work. Nothing is lost without them, so they wait for nobody: they are dropped in a signal
/// handler that has interrupted a device call, whose locks its own thread holds, and in a child that only borrows them.
pub fn run_hint(body: impl FnOnce()) {
    if IN_DEVICE_CALL.get() || !fork_guard::has_device_calls() {
        return;
    }
    let saved = errno::get();
    let _ = run_inside(body);
    errno::set(saved);
}

fn run_inside<T>(body: impl FnOnce() -> T) -> thread::Result<T> {
    let was_inside = IN_DEVICE_CALL.replace(true);
    with_cancel_disabled(|| {
        let answer = panic::catch_unwind(AssertUnwindSafe(body));
        IN_DEVICE_CALL.set(was_inside);
        answer
    })
}

/// Runs something that must not be cancelled half-way, and must not panic.
pub fn with_cancel_disabled<T>(body: impl FnOnce() -> T) -> T {
    let mut state = 0;
    // SAFETY: `state` lives across the call.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut state) };
    let done = body();
    // SAFETY: restores what was saved above.
    unsafe { pthread_setcancelstate(state, core::ptr::null_mut()) };
    done
}

/// A call that may block is a place where the thread can be cancelled: before it takes anything.
pub fn cancellation_point() {
    // SAFETY: no arguments. It may unwind, and the frames above hold nothing that needs dropping.
    unsafe { pthread_testcancel() }
}
