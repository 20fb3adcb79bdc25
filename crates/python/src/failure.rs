//! Errors of the kernel and of the runtime as Python's OSError, which picks the subclass by errno.

use pyo3::PyErr;
use pyo3::exceptions::{PyOSError, PyValueError};
use spinio_runtime::client::Error;
use spinio_sys::Errno;

/// An error of the kernel.
pub(crate) fn errno_error(errno: Errno, operation: &str) -> PyErr {
    let number = errno.raw_os_error();
    PyOSError::new_err((number, format!("{operation}: {}", std::io::Error::from_raw_os_error(number))))
}

/// A range of a file in device memory was unmapped; or, `in_fork`, belongs to the process that this one was forked from.
pub(crate) fn not_mapped(in_fork: bool) -> PyErr {
    PyValueError::new_err(match in_fork {
        false => "The range is no longer mapped",
        true => "The range is mapped in the process that this one was forked from",
    })
}

/// An error of a request.
pub(crate) fn request_error(error: &Error) -> PyErr {
    match &error.path {
        Some(path) => PyOSError::new_err((error.errno, error.text.clone(), path.clone().into_os_string())),
        None => PyOSError::new_err((error.errno, error.text.clone())),
    }
}
