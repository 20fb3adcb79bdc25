//! The stream that a thread has chosen for its transfers, instead of the one that its arrays give.

use pyo3::prelude::*;
use spinio_runtime::client::{Stream, set_thread_stream, thread_stream};

use crate::described::ReadOrder;

/// Orders this thread's transfers after the work queued on a stream (a handle), whichever stream an array gives; 0
/// undoes it.
#[pyfunction]
pub(crate) fn set_stream(handle: u64) {
    // The legacy default stream has a second handle.
    set_thread_stream(Stream(if handle == 1 { 0 } else { handle }));
}

/// The handle that this thread has chosen; 0 if none.
#[pyfunction]
pub(crate) fn stream() -> u64 {
    thread_stream().0
}

/// The stream of a queued transfer: the one that the program chose, or that of the array, or else the default stream,
/// with which all others are ordered.
pub(crate) fn stream_for(order: ReadOrder) -> Stream {
    match (thread_stream(), order) {
        (Stream(0), ReadOrder::On(queue)) => queue,
        (chosen, _) => chosen,
    }
}

/// The stream of one transfer, chosen for this thread until the transfer is complete.
pub(crate) struct StreamScope {
    before: Stream,
    /// The bytes must have arrived when the call returns.
    pub(crate) synchronize: bool,
}

impl StreamScope {
    /// On the thread that will make the transfer.
    pub(crate) fn new(order: ReadOrder) -> StreamScope {
        let before = thread_stream();
        match order {
            // The program's choice takes precedence.
            _ if before.0 != 0 => StreamScope { before, synchronize: false },
            ReadOrder::On(queue) => {
                set_thread_stream(queue);
                StreamScope { before, synchronize: false }
            }
            ReadOrder::Synchronous => StreamScope { before, synchronize: true },
        }
    }
}

impl Drop for StreamScope {
    fn drop(&mut self) {
        set_thread_stream(self.before);
    }
}
