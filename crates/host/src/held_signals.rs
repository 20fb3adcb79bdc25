//! Signals that wait until a read of a local disk is over, as they do in the kernel's own read.
//!
//! ```text
//!   pread of the kernel     ─── read ───────────────────────┐ handler
//!   a read by several threads, no signal held   ── read ─┐ handler, which may jump away: the read is left half way,
//!                                                        │ its buffers stay in use for good
//!   signals held            ─── read ───┬───────────────────┐ handler
//!                                       └ every 20 ms: a signal without a handler ends the process at once
//! ```
//!
//! The kernel waits for a disk without looking at signals, but for those that end the process. Where a read can hang (a
//! server), or a program asked to be polled (cancel.rs), nothing is held.

use std::cell::Cell;
use std::time::{Duration, Instant};

use spinio_sys::linux::SignalGuard;

/// Between two looks for a signal that ends the process: as soon as a person notices.
const INTERVAL: Duration = Duration::from_millis(20);

/// While it lives, handlers of the program do not run on this thread.
pub struct HeldSignals {
    guard: SignalGuard,
    checked: Cell<Instant>,
}

impl HeldSignals {
    /// Holds them from here on.
    pub fn hold() -> HeldSignals {
        HeldSignals { guard: SignalGuard::block_asynchronous(), checked: Cell::new(Instant::now()) }
    }

    /// Lets a signal through that has no handler, for a thread that waits or has more to do. Cheap to call often.
    pub fn deliver_defaults(&self) {
        if self.checked.get().elapsed() >= INTERVAL {
            self.checked.set(Instant::now());
            self.guard.deliver_defaults();
        }
    }
}
