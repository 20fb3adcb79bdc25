//! What can go wrong.

use std::{fmt, io};

/// Why nothing was done.
#[derive(Debug)]
pub enum Error {
    /// No slot or record is free. Writing out snapshots frees slots.
    NoSpace,
    /// An earlier release of one of the pages is not invalidated yet.
    Busy,
    /// The owner is unknown, or the pages are not in its range, not in order or not in an open epoch.
    NotOpen,
    /// The state memory was laid out by another version, or its size is out of bounds.
    Layout,
    /// The backing file could not be read or written.
    Backing(io::Error),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoSpace => f.write_str("the memory for released pages is full"),
            Error::Busy => f.write_str("an earlier release of the same pages is not over"),
            Error::NotOpen => f.write_str("pages that are not in an open epoch of this owner"),
            Error::Layout => f.write_str("state memory of another layout"),
            Error::Backing(error) => write!(f, "backing file: {error}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Backing(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Backing(error)
    }
}
