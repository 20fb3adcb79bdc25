//! The queue that a thread has chosen (`spinio_set_stream`): small requests go there, large ones begin behind it.
//!
//! A thread-local without a destructor, so that a hook may read it at any time, in a thread that is ending too.

use std::cell::Cell;

use crate::StreamId;

thread_local! {
    static THREAD_STREAM: Cell<u64> = const { Cell::new(0) };
}

/// From now on requests of this thread are ordered with this queue; [`QueueId`] 0 is the default queue again.
/// The queue must stay alive until another one is chosen, and belong to the device that the thread reads into.
pub fn set_thread_stream(stream: StreamId) {
    THREAD_STREAM.set(stream.0);
}

/// The queue that this thread has chosen; 0 where it has not.
#[inline]
pub fn thread_stream() -> StreamId {
    StreamId(THREAD_STREAM.get())
}
