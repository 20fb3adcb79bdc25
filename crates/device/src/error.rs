//! What a device says when it cannot.

use std::fmt;

/// The small, stable part of a device error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No pinned or device memory left.
    NoMemory,
    /// The operation is not something this device does.
    Unsupported,
    /// The address is no memory of this device (any more).
    BadAddress,
    /// Pages could not be pinned.
    PinRefused,
    /// The context this device stood for is gone; a new device may take its place.
    ContextLost,
    /// The driver failed otherwise.
    Driver,
}

/// An operation of a device that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// What went wrong.
    pub kind: ErrorKind,
    /// The driver call or operation that failed.
    pub operation: &'static str,
    /// The driver's own code, 0 where there is none.
    pub code: i32,
}

impl DeviceError {
    /// An error without a driver code.
    pub const fn new(kind: ErrorKind, operation: &'static str) -> DeviceError {
        DeviceError { kind, operation, code: 0 }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            ErrorKind::NoMemory => "No memory",
            ErrorKind::Unsupported => "Not supported",
            ErrorKind::BadAddress => "Not memory of this device",
            ErrorKind::PinRefused => "Pages could not be pinned",
            ErrorKind::ContextLost => "The device context is gone",
            ErrorKind::Driver => "The driver failed",
        };
        write!(f, "{what} in {}", self.operation)?;
        if self.code != 0 {
            write!(f, " (code {})", self.code)?;
        }
        Ok(())
    }
}

impl std::error::Error for DeviceError {}
