//! A stream that is stopped between two pieces of the program's work.
//!
//! ```text
//!   program's stream   work ── reached ───────── stopped ───────── dropped ── work
//!   a thread of SPIN              └ StreamStop ── CPU work, copies on another stream ┘
//! ```

use std::fmt;

/// The stop: the stream goes on when it is dropped, which any thread may do, without a call of the device.
#[must_use]
pub struct StreamStop {
    go_on: Option<Box<dyn FnOnce() + Send>>,
}

impl StreamStop {
    pub(crate) fn new(go_on: impl FnOnce() + Send + 'static) -> StreamStop {
        StreamStop { go_on: Some(Box::new(go_on)) }
    }
}

impl Drop for StreamStop {
    fn drop(&mut self) {
        if let Some(go_on) = self.go_on.take() {
            go_on();
        }
    }
}

impl fmt::Debug for StreamStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamStop")
    }
}
