//! Streams, events and captures. All need a current context.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;
use crate::cuda::types::{CaptureMode, Event, Stream};

impl Driver {
    /// A new stream; flags are [`crate::cuda::stream`].
    pub fn stream_create(&self, flags: u32) -> Result<Stream> {
        let mut stream = 0;
        // SAFETY: `stream` lives across the call.
        unsafe { cu!(self.stream_create(&mut stream, flags)) }.map(|()| Stream(stream))
    }

    /// A new stream of the highest priority of the current context.
    pub fn stream_create_first(&self, flags: u32) -> Result<Stream> {
        let (mut stream, mut least, mut greatest) = (0, 0, 0);
        // SAFETY: both live across the call.
        unsafe { cu!(self.stream_priorities?(&mut least, &mut greatest)) }?;
        // SAFETY: `stream` lives across the call.
        unsafe { cu!(self.stream_create_with_priority?(&mut stream, flags, greatest)) }.map(|()| Stream(stream))
    }

    /// Makes later work on the stream wait until the 32-bit word at a device address has reached `value`: until the
    /// difference is not negative as a signed number.
    ///
    /// # Safety
    /// The stream must be alive, and the word stay registered memory until the wait is over.
    pub unsafe fn stream_wait_value(&self, stream: Stream, word: u64, value: u32) -> Result<()> {
        // 0: greater or equal, cyclic.
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_wait_value?(stream.0, word, value, 0)) }
    }

    /// Destroys a stream once its work is done.
    ///
    /// # Safety
    /// The stream must be alive and no longer in use.
    pub unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_destroy(stream.0)) }
    }

    /// Waits for a stream, in the manner of its context.
    ///
    /// # Safety
    /// The stream must be alive.
    pub unsafe fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_synchronize(stream.0)) }
    }

    /// Whether everything on a stream is done.
    ///
    /// # Safety
    /// The stream must be alive.
    pub unsafe fn stream_query(&self, stream: Stream) -> Result<bool> {
        // SAFETY: passed on to the caller.
        query_result(unsafe { cu!(self.stream_query(stream.0)) })
    }

    /// Makes later work on the stream wait for an event.
    ///
    /// # Safety
    /// Both must be alive.
    pub unsafe fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_wait_event(stream.0, event.0, 0)) }
    }

    /// Whether work on the stream would be captured, or (an error) invalidate a capture. The query invalidates none
    /// itself. A driver without graphs returns no.
    ///
    /// # Safety
    /// The stream must be alive.
    #[inline]
    pub unsafe fn stream_is_capturing(&self, stream: Stream) -> Result<bool> {
        let mut status = 0;
        // SAFETY: `status` lives across the call; the caller guarantees the stream.
        match unsafe { cu!(self.stream_is_capturing?(stream.0, &mut status)) } {
            Ok(()) => Ok(status != 0),
            Err(CuError::NO_SUCH_FUNCTION) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Sets how this thread's calls are checked against captures in progress; returns the previous mode.
    /// `None` in a driver that has no such thing.
    #[inline]
    pub fn exchange_capture_mode(&self, mode: CaptureMode) -> Option<CaptureMode> {
        let mut value = mode.0;
        // SAFETY: `value` lives across the call.
        unsafe { cu!(self.exchange_capture_mode?(&mut value)) }.ok().map(|()| CaptureMode(value))
    }

    /// A new event; flags are [`crate::cuda::event`].
    pub fn event_create(&self, flags: u32) -> Result<Event> {
        let mut event = 0;
        // SAFETY: `event` lives across the call.
        unsafe { cu!(self.event_create(&mut event, flags)) }.map(|()| Event(event))
    }

    /// Puts the event at the present end of the stream.
    ///
    /// # Safety
    /// Both must be alive.
    pub unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.event_record(event.0, stream.0)) }
    }

    /// Whether everything before the event is done.
    ///
    /// # Safety
    /// The event must be alive.
    pub unsafe fn event_query(&self, event: Event) -> Result<bool> {
        // SAFETY: passed on to the caller.
        query_result(unsafe { cu!(self.event_query(event.0)) })
    }

    /// Waits for the event: spinning, or asleep if it was made so.
    ///
    /// # Safety
    /// The event must be alive.
    pub unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.event_synchronize(event.0)) }
    }

    /// Destroys the event.
    ///
    /// # Safety
    /// The event must be alive and no longer in use.
    pub unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.event_destroy(event.0)) }
    }
}

/// "Not ready" is a result, not an error.
fn query_result(answer: Result<()>) -> Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(CuError::NOT_READY) => Ok(false),
        Err(e) => Err(e),
    }
}
