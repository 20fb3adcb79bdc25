//! What a server calls a map: its owner.

use std::sync::{Arc, Mutex};

/// The name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// The file at this server: owners of another server may have the same numbers.
    pub(crate) file: u64,
    pub(crate) owner: u64,
}

/// The name of a map now; `None` while no server is attached, and when it is unmapped.
pub(crate) type NameCell = Arc<Mutex<Option<Name>>>;
