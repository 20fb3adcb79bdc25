//! Which owner's copy a fill is made from ([`crate::peers`] has what is done with it).

use crate::file::OwnerId;

/// The copy of another owner that a fill is made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerCopy {
    /// Whose.
    pub owner: OwnerId,
    /// The version counter then.
    pub(crate) planned: u64,
    /// Times that the owner had lost pages then.
    pub(crate) losses: u64,
}

/// The owners that an acquire may get pages from.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peers<'a> {
    /// The best first.
    pub owners: &'a [OwnerId],
    /// Runs of fewer pages are not worth a copy.
    pub least: u64,
}
