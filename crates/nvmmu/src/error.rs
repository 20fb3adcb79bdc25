//! Why a call failed, as text and as an errno.

use std::fmt;
use std::path::{Path, PathBuf};

use spinio_sys::Errno;

/// The small, stable part of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The calling thread has no session: ESRCH.
    NoSession,
    /// The calling thread, or another one under the same number, has a session that has not ended: EBUSY.
    AlreadyBegun,
    /// The session belongs to another thread: EPERM.
    NotOwner,
    /// Neither to the device nor from it: EINVAL.
    UnknownDirection,
    /// Not a range of a file: EINVAL.
    BadRange,
    /// The address is not device memory, or the device memory ends before the range does: EFAULT.
    NotDeviceMemory,
    /// The kernel or the device refused.
    Failed(Errno),
}

impl ErrorKind {
    /// The errno that a C caller receives.
    pub fn errno(&self) -> Errno {
        match self {
            ErrorKind::NoSession => Errno::SRCH,
            ErrorKind::AlreadyBegun => Errno::BUSY,
            ErrorKind::NotOwner => Errno::PERM,
            ErrorKind::UnknownDirection | ErrorKind::BadRange => Errno::INVAL,
            ErrorKind::NotDeviceMemory => Errno::FAULT,
            ErrorKind::Failed(errno) => *errno,
        }
    }
}

/// A failed call, with its operation and range.
#[derive(Clone, Debug)]
pub struct Error {
    /// What went wrong.
    pub kind: ErrorKind,
    /// What was being done, as a verb: "begin", "upload".
    pub operation: &'static str,
    /// The file, if any.
    pub path: Option<PathBuf>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes requested.
    pub len: u64,
    /// The cause, as text.
    pub detail: String,
}

impl Error {
    /// An error without a range.
    pub fn new(kind: ErrorKind, operation: &'static str, why: impl Into<String>) -> Error {
        Error { kind, operation, path: None, offset: 0, len: 0, detail: why.into() }
    }

    /// Adds the file.
    pub fn with_path(mut self, path: &Path) -> Error {
        self.path = Some(path.to_owned());
        self
    }

    /// Adds the range.
    pub fn with_range(mut self, offset: u64, len: u64) -> Error {
        (self.offset, self.len) = (offset, len);
        self
    }

    /// An error of a system call on a file.
    pub(crate) fn from_errno(errno: Errno, operation: &'static str, path: &Path) -> Error {
        Error::new(ErrorKind::Failed(errno), operation, errno.to_string()).with_path(path)
    }

    /// A transfer that `io` could not make.
    pub(crate) fn from_io(error: &spinio_io::Error, operation: &'static str, path: &Path) -> Error {
        Error::new(ErrorKind::Failed(error.kind.errno()), operation, error.to_string())
            .with_path(path)
            .with_range(error.offset, error.len)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cannot {}", self.operation)?;
        if self.len > 0 {
            write!(f, " {} bytes at offset {} of", self.len, self.offset)?;
        }
        if let Some(path) = &self.path {
            write!(f, " {}", path.display())?;
        }
        write!(f, ": {}", self.detail)
    }
}

impl std::error::Error for Error {}
