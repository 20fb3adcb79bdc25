//! Errors of calls of the host.

use std::fmt;

use spinio_device::{DeviceError, ErrorKind};
use spinio_sys::Errno;

/// Result of a call.
pub type Result<T> = core::result::Result<T, Error>;

/// An errno and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The stable part.
    pub errno: Errno,
    sentence: String,
}

impl Error {
    /// An errno and a sentence about the cause.
    pub fn new(errno: Errno, sentence: impl Into<String>) -> Error {
        Error { errno, sentence: sentence.into() }
    }

    /// A failed system call.
    pub(crate) fn of(errno: Errno, operation: &str) -> Error {
        Error::new(errno, format!("Cannot {operation}: {}", std::io::Error::from(errno)))
    }

    pub(crate) fn device(error: DeviceError, operation: &str) -> Error {
        let errno = match error.kind {
            ErrorKind::NoMemory => Errno::NOMEM,
            ErrorKind::Unsupported => Errno::NOTSUP,
            ErrorKind::ContextLost => Errno::NODEV,
            _ => Errno::IO,
        };
        Error::new(errno, format!("Cannot {operation}: {error}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Error {}
