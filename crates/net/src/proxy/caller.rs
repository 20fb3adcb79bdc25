//! Which call gets an answer.

use std::sync::mpsc::SyncSender;

use spinio_ring::mailbox::Reply;
use spinio_sys::Errno;

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

/// The answer to a call that has failed.
pub(super) fn failed(errno: Errno) -> Reply {
    Reply::new(-errno.raw_os_error())
}
