//! Why a message is refused.

use super::VERSION;

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadMessage {
    /// Its length does not fit its kind.
    Length,
    /// Another version of the protocol.
    Version(u16),
    /// An unknown kind or flag.
    Kind,
    /// A run is empty, out of order, or beyond the limits.
    Run,
}

impl std::fmt::Display for BadMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BadMessage::Length => f.write_str("a message of the wrong length"),
            BadMessage::Version(v) => write!(f, "a message of protocol version {v}, this is version {VERSION}"),
            BadMessage::Kind => f.write_str("a message of an unknown kind"),
            BadMessage::Run => f.write_str("a message with a page range out of bounds"),
        }
    }
}

impl std::error::Error for BadMessage {}
