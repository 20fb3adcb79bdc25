//! The stream that a thread has chosen (`spinio_set_stream`): small requests are enqueued there, large ones begin after
//! it.
//!
//! A thread-local without a destructor, so that a hook may read it at any time, also in a thread that is exiting.

use std::cell::Cell;

use crate::StreamId;

thread_local! {
    static THREAD_STREAM: Cell<u64> = const { Cell::new(0) };
}

/// Orders later requests of this thread with this stream; 0 is the default stream again.
/// The stream must stay alive until another one is chosen, and belong to the device that the thread reads into.
pub fn set_thread_stream(stream: StreamId) {
    THREAD_STREAM.set(stream.0);
}

/// The stream that this thread has chosen; 0 if none.
#[inline]
pub fn thread_stream() -> StreamId {
    StreamId(THREAD_STREAM.get())
}
