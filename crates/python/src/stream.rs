//! The stream that a thread has chosen for its transfers, instead of the one its arrays name.

use pyo3::prelude::*;
use spinio_device::{QueueId, set_thread_queue, thread_queue};

use crate::buffer::Order;

/// Makes this thread's transfers go behind what is queued on a stream (a handle), whatever the arrays say; 0 ends that.
#[pyfunction]
pub(crate) fn set_stream(handle: u64) {
    // The legacy default stream has a second name.
    set_thread_queue(QueueId(if handle == 1 { 0 } else { handle }));
}

/// The handle that this thread has chosen; 0 if none.
#[pyfunction]
pub(crate) fn stream() -> u64 {
    thread_queue().0
}

/// The queue of a transfer that is only queued: what the program chose, or what the array says, or else the one that all
/// others wait for.
pub(crate) fn queue_of(order: Order) -> QueueId {
    match (thread_queue(), order) {
        (QueueId(0), Order::On(queue)) => queue,
        (chosen, _) => chosen,
    }
}

/// The queue of one transfer, chosen for this thread until it is over.
pub(crate) struct Chosen {
    before: QueueId,
    /// The transfer must have arrived when the call returns.
    pub(crate) settle: bool,
}

impl Chosen {
    /// On the thread that will make the transfer.
    pub(crate) fn new(order: Order) -> Chosen {
        let before = thread_queue();
        match order {
            // What the program chose counts.
            _ if before.0 != 0 => Chosen { before, settle: false },
            Order::On(queue) => {
                set_thread_queue(queue);
                Chosen { before, settle: false }
            }
            Order::Arrived => Chosen { before, settle: true },
        }
    }
}

impl Drop for Chosen {
    fn drop(&mut self) {
        set_thread_queue(self.before);
    }
}
