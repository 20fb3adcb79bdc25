//! Errors of requests.
//!
//! ```text
//!   Error = kind (small, stable, maps to errno)
//!         + context (operation, path, offset, length)
//!         + source (the kernel's errno, or the device's error)
//! ```

use std::fmt;

use spinio_device::DeviceError;
use spinio_sys::Errno;

/// The small, stable part of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The kernel refused or failed; its errno is passed on unchanged.
    Kernel(Errno),
    /// The device address is no (longer) memory of a device: EFAULT.
    BadAddress,
    /// There was no memory for a bounce buffer, and no other route: ENOMEM.
    NoMemory,
    /// The device failed to move the bytes: EIO.
    Device,
}

impl ErrorKind {
    /// The errno a POSIX call returns for it.
    pub fn errno(self) -> Errno {
        match self {
            ErrorKind::Kernel(errno) => errno,
            ErrorKind::BadAddress => Errno::FAULT,
            ErrorKind::NoMemory => Errno::NOMEM,
            ErrorKind::Device => Errno::IO,
        }
    }
}

/// A request that failed, with its context.
#[derive(Clone, Debug)]
pub struct Error {
    /// What went wrong.
    pub kind: ErrorKind,
    /// The operation, as a verb: "read", "open again".
    pub operation: &'static str,
    /// The file, if its name is known.
    pub path: Option<String>,
    /// File offset.
    pub offset: u64,
    /// Bytes requested.
    pub len: u64,
    /// The error of the device.
    pub device: Option<DeviceError>,
}

impl Error {
    /// An error of the kernel.
    pub fn kernel(errno: Errno, operation: &'static str, offset: u64, len: u64) -> Error {
        Error { kind: ErrorKind::Kernel(errno), operation, path: None, offset, len, device: None }
    }

    /// An error of the device.
    pub fn device(source: DeviceError, operation: &'static str, offset: u64, len: u64) -> Error {
        use spinio_device::ErrorKind as D;
        let kind = match source.kind {
            D::NoMemory => ErrorKind::NoMemory,
            D::BadAddress => ErrorKind::BadAddress,
            _ => ErrorKind::Device,
        };
        Error { kind, operation, path: None, offset, len, device: Some(source) }
    }

    /// An error of a request that ended early before anything was moved.
    pub fn cancelled_error(operation: &'static str, offset: u64, len: u64) -> Error {
        Error::kernel(Errno::INTR, operation, offset, len)
    }

    /// The errno a POSIX call returns for it.
    pub fn errno(&self) -> Errno {
        self.kind.errno()
    }

    /// The result of a request in the form that the statistics take.
    pub fn outcome(result: &Result<usize, Error>) -> Result<usize, Errno> {
        result.as_ref().copied().map_err(Error::errno)
    }

    /// The same error, naming the file.
    pub fn with_path(mut self, path: impl Into<String>) -> Error {
        self.path = Some(path.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cannot {} {} bytes at offset {}", self.operation, self.len, self.offset)?;
        if let Some(path) = &self.path {
            write!(f, " of {path}")?;
        }
        match (&self.device, self.kind) {
            (Some(source), _) => write!(f, ": {source}"),
            (None, ErrorKind::Kernel(errno)) => write!(f, ": {errno}"),
            (None, kind) => write!(f, ": {}", kind.errno()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.device.as_ref().map(|e| e as _)
    }
}
