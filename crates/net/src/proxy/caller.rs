//! Which call gets an answer.

use std::sync::mpsc::SyncSender;

use spinio_ring::mailbox::Reply;

/// A call that waits for its answer.
#[derive(Debug)]
pub(crate) enum Caller {
    /// A kernel.
    Mailbox {
        mailbox: u32,
        number: u32,
        /// Which block, as it says, and since when.
        block: u32,
        since: u64,
    },
    /// The program.
    Host(SyncSender<Reply>),
}
