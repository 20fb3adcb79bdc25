//! The event sets of a net as the proxy knows them. What it does with them: events.rs.

use spinio_ring::event::Producer;

use super::index_queue::IndexQueue;

/// The sets of a net, in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct Sets {
    pub(super) sets: Vec<Set>,
}

/// A set.
#[derive(Debug, Default)]
pub(super) struct Set {
    /// The proxy's side of its ring.
    pub(super) producer: Producer,
    /// Sockets whose events had no room. One that is closed, or was told meanwhile, does no harm here.
    pub(super) held: IndexQueue,
}
