//! The errors of a device.

use std::fmt;

/// The small, stable part of a device error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No pinned or device memory left.
    NoMemory,
    /// The device does not support the operation.
    Unsupported,
    /// The address is not (or no longer) memory of this device.
    BadAddress,
    /// Pages could not be pinned.
    PinRefused,
    /// The device's context was destroyed; a new device may replace it.
    ContextLost,
    /// Another failure of the driver.
    Driver,
}

/// A failed operation of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// The kind of the error.
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
            ErrorKind::ContextLost => "The device context was destroyed",
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
