//! Why a file cannot be pinned, read through its pins, or mapped.

use std::fmt;

use spinio_sys::Errno;

/// Why a file cannot be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinError {
    /// The descriptor is not valid.
    BadFd(Errno),
    /// Not a regular file, or an empty one.
    NotRegularFile,
    /// A process has it open for writing.
    OpenForWriting,
    /// It belongs to another user.
    NotOwner,
    /// The file system has no leases that bind every writer.
    NoLeases,
    /// A mapping of it may not show its current bytes (overlayfs).
    NotMappable,
    /// It cannot be opened a second time: another procfs, a security policy, a server that has lost it.
    NotReopened,
    /// The Linux kernel refused to map it.
    NotMapped(Errno),
    /// More than the limit of pinned bytes.
    LimitExceeded,
    /// SPIN has no worker threads.
    NoWorkers,
    /// The device cannot register the pages.
    PinRefused,
    /// No device is in use, or this one cannot read host memory.
    NoDevice,
    /// It is not pinned, or no longer.
    NotPinned,
    /// The range is not in the file.
    OutOfRange,
}

impl PinError {
    /// The errno of a C call.
    pub fn errno(self) -> Errno {
        match self {
            PinError::BadFd(errno) => errno,
            PinError::NotMapped(_) => Errno::NOMEM,
            PinError::NotRegularFile | PinError::OutOfRange => Errno::INVAL,
            PinError::OpenForWriting => Errno::TXTBSY,
            PinError::NotOwner => Errno::ACCESS,
            PinError::NoLeases | PinError::NotMappable | PinError::NotReopened => Errno::OPNOTSUPP,
            PinError::LimitExceeded | PinError::PinRefused => Errno::NOMEM,
            PinError::NoWorkers => Errno::AGAIN,
            PinError::NoDevice => Errno::NODEV,
            PinError::NotPinned => Errno::STALE,
        }
    }
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let PinError::BadFd(errno) = self {
            return write!(f, "Cannot pin the file: {errno}");
        }
        if let PinError::NotMapped(errno) = self {
            return write!(
                f,
                "Cannot pin the file: it cannot be mapped ({errno}); is RLIMIT_AS lower than its length?"
            );
        }
        f.write_str(match self {
            PinError::NotMapped(_) | PinError::BadFd(_) | PinError::NotRegularFile => {
                "Cannot pin it: not a regular file with bytes in it"
            }
            PinError::OpenForWriting => "Cannot pin the file: it is open for writing, perhaps by this very process",
            PinError::NotOwner => {
                "Cannot pin the file: it belongs to another user, and is neither sealed nor immutable nor on a \
                 read-only file system"
            }
            PinError::NoLeases => "Cannot pin the file: its file system has no leases that bind every writer",
            PinError::NotMappable => "Cannot pin the file: a mapping of it may show an older file (overlayfs)",
            PinError::NotReopened => {
                "Cannot pin the file: it cannot be opened a second time through /proc/thread-self/fd"
            }
            PinError::LimitExceeded => "Cannot pin the file: with it more would be pinned than SPINIO_PIN_LIMIT allows",
            PinError::NoWorkers => "Cannot pin the file: no worker threads",
            PinError::PinRefused => "Cannot pin the file: the device refused to register its pages",
            PinError::NoDevice => "Cannot pin the file: no device is in use that reads host memory",
            PinError::NotPinned => "The file is not pinned, or no longer: a process opened it for writing",
            PinError::OutOfRange => "The range is not inside the file",
        })
    }
}

impl std::error::Error for PinError {}
