//! Which call gets an answer.

use std::sync::mpsc::SyncSender;

use spinio_ring::mailbox::Reply;

/// A call that waits for its answer.
#[derive(Debug)]
pub(crate) enum Caller {
    /// A kernel.
    Mailbox { mailbox: u32, number: u32 },
    /// The program.
    Host(SyncSender<Reply>),
}
