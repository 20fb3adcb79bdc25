//! A panic leaves a batch when everybody else has.
//!
//! ```text
//!   caller    register ✗ ── wait for storage ── wait for readers ── panic goes on
//!   helpers   reads, copies, launches ...................... out
//! ```
//!
//! Helpers write into memory of the program, through its descriptors, for as long as the call lasts. So where the caller
//! panics in one part of a batch, the panic is kept, what others have begun is waited for, and only then it unwinds. What
//! nobody has begun is left undone: nobody is told that it came.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The first panic of a batch, if there was one.
#[derive(Default)]
pub struct PanicRelay(Option<Box<dyn Any + Send>>);

impl PanicRelay {
    /// Runs a part; `None`: it panicked.
    pub fn catch<T>(&mut self, body: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(done) => Some(done),
            Err(panic) => {
                self.0.get_or_insert(panic);
                None
            }
        }
    }

    /// Whether there was one.
    pub fn has_panic(&self) -> bool {
        self.0.is_some()
    }

    /// Lets it go on, now that nobody is left.
    pub fn resume(self) {
        if let Some(panic) = self.0 {
            resume_unwind(panic);
        }
    }
}
