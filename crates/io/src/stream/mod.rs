//! Transfers in the order of a stream of the program.

mod transfers;

pub use transfers::AsyncResult;
pub(crate) use transfers::StreamTransfers;
