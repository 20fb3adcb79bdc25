//! Errors of maps.

use std::fmt;

use spinio_device::{DeviceError, ErrorKind};
use spinio_sys::Errno;

/// A failed call: an errno and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The stable part.
    pub errno: Errno,
    sentence: String,
    cause: Cause,
}

/// What an error means for the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The call failed on this side; what the server thinks of its pages is unknown.
    Local,
    /// The server refused, and changed nothing.
    Refused,
    /// The connection is closed.
    Disconnected,
}

impl Error {
    /// An errno and a sentence about the cause.
    pub fn new(errno: Errno, sentence: impl Into<String>) -> Error {
        Error { errno, sentence: sentence.into(), cause: Cause::Local }
    }

    /// A failed system call or a refusal of the server.
    pub(crate) fn of(errno: Errno, operation: &str) -> Error {
        Error::new(errno, format!("Cannot {operation}: {}", std::io::Error::from(errno)))
    }

    /// The connection is closed: the server has ended, or this client has broken it off.
    pub(crate) fn disconnected() -> Error {
        let sentence = "The GAIA server has closed the connection".to_owned();
        Error { errno: Errno::IO, sentence, cause: Cause::Disconnected }
    }

    pub(crate) fn is_disconnected(&self) -> bool {
        self.cause == Cause::Disconnected
    }

    /// A refusal of the server.
    pub(crate) fn refused(errno: u32) -> Error {
        let errno =
            i32::try_from(errno).ok().filter(|n| (1..4096).contains(n)).map_or(Errno::IO, Errno::from_raw_os_error);
        let sentence = match errno {
            Errno::NOSPC => {
                "The GAIA server has no memory left for so many released pages (release parts of the range), or earlier \
                 ones find no space on the disk"
                    .to_owned()
            }
            Errno::NOMEM => "The GAIA server has no memory left for a map of this size".to_owned(),
            Errno::USERS => "This user has too many maps of files of the mount".to_owned(),
            _ => format!("The GAIA server refused: {}", std::io::Error::from(errno)),
        };
        Error { errno, sentence, cause: Cause::Refused }
    }

    /// The same with another sentence.
    pub(crate) fn with_sentence(self, sentence: &str) -> Error {
        Error { sentence: sentence.to_owned(), ..self }
    }

    /// The same, but both sides agree about what is mapped.
    pub(crate) fn into_refusal(self) -> Error {
        Error { cause: Cause::Refused, ..self }
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.cause == Cause::Refused
    }

    /// The server was replaced while an epoch was open, or gave the epoch up.
    pub(crate) fn stale() -> Error {
        let sentence = "The epoch is lost, since the GAIA server was restarted or had no memory for what other programs \
                        overwrote: acquire again and redo it";
        Error::new(Errno::STALE, sentence)
    }

    pub(crate) fn device(error: DeviceError, operation: &str) -> Error {
        let errno = match error.kind {
            ErrorKind::NoMemory => Errno::NOMEM,
            ErrorKind::BadAddress => Errno::FAULT,
            ErrorKind::Unsupported => Errno::NOTSUP,
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
