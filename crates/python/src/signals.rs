//! Ctrl-C during a long transfer: Python runs signal handlers only when it is called to check for them.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::time::Duration;

use pyo3::prelude::*;
use spinio_runtime::client::{self, Stream, set_thread_stream, thread_stream};
use spinio_sys::linux;

/// The time between checks for signals. A check takes the GIL, which another thread may keep for 5 ms.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(250);

thread_local! {
    /// The exception that a handler has raised; the transfer ends early.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The stream that the program had chosen when the transfer began.
    static THREAD_STREAM: Cell<Stream> = const { Cell::new(Stream(0)) };
}

/// A transfer of device memory, without the GIL: handlers run meanwhile, and an exception of one ends it.
pub(crate) fn run_interruptible<T: Send>(py: Python<'_>, transfer: impl FnOnce() -> T + Send) -> PyResult<T> {
    // Handlers run in the main thread only; other threads need not check.
    let is_main = linux::gettid() == linux::getpid();
    // A handler may itself make a transfer in the middle of one.
    let outer = THREAD_STREAM.replace(thread_stream());
    let done = py.detach(|| {
        let _guard = is_main.then(|| client::poll_for_cancel(check_signals, CHECK_INTERVAL));
        transfer()
    });
    THREAD_STREAM.set(outer);
    RAISED.with_borrow_mut(Option::take).map_or(Ok(done), Err)
}

/// Runs handlers; 1 if one raised an exception.
extern "C" fn check_signals() -> c_int {
    // A transfer that a handler makes is not part of the interrupted transfer.
    let chosen = thread_stream();
    set_thread_stream(THREAD_STREAM.get());
    let raised = Python::attach(|py| py.check_signals()).err();
    set_thread_stream(chosen);
    let stop = raised.is_some();
    RAISED.set(raised);
    stop.into()
}
