//! Delays a panic of a batch until all other threads have left.
//!
//! ```text
//!   caller    register ✗ ── wait for storage ── wait for readers ── panic continues
//!   workers   reads, copies, launches ...................... left
//! ```
//!
//! Workers write into memory of the program, through its descriptors, for as long as the call lasts. So if the caller
//! panics in one part of a batch, the panic is stored, the caller waits for the work that other threads have begun, and
//! only then it unwinds. Work that no thread has begun is left undone, and not reported as done.

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

    /// Lets it continue, now that all other threads have left.
    pub fn resume(self) {
        if let Some(panic) = self.0 {
            resume_unwind(panic);
        }
    }
}
