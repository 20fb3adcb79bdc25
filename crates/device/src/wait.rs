//! How a thread that holds the program's signals waits for a device.
//!
//! ```text
//!   stream of the program    kernel that may never end ──> copy of a read ──> fence
//!   reader, signals held     ask ask ask ── nap ── ask ── nap ── ask ...
//!                            └ 200 us ┘     └ every 20 ms: a signal without a handler ends the process
//! ```
//!
//! The driver's own wait returns when the device is done, and never looks at signals. While handlers of the program must not
//! run (host/src/held_signals.rs), Ctrl-C would wait for the program's kernels, which may be without end. So such a thread asks
//! the driver instead, which costs under a microsecond, and naps longer the longer it has waited: the end is seen at most a
//! sixteenth of the time too late.
//!
//! So do threads that wait in turn for a device that others keep busy ([`take_turns`]): the driver's own wait spins, a quarter of
//! the processor time of twelve threads that copy.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux;

use crate::DeviceError;

/// As long as copies take that a reader waits for at the end of a read. A nap takes at least 50 us, the timer's slack.
const SPIN: Duration = Duration::from_micros(200);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// A copy of 2 MiB takes 40 us, and up to fifteen of them may come before.
const TURN_SPIN: Duration = Duration::from_micros(10);
const TURN_NAP: Duration = Duration::from_micros(50);

/// Whether the calling thread has to wait by [`poll`].
pub(crate) fn must_poll() -> bool {
    linux::holds_signals()
}

/// Waits until `is_done`, and lets signals that end the process do so.
pub(crate) fn poll(is_done: impl Fn() -> Result<bool, DeviceError>) -> Result<(), DeviceError> {
    poll_with(is_done, SPIN, |waited| (waited / 16).min(LONGEST_NAP))
}

/// The same for a thread that can be late: the device has the work of other threads.
pub(crate) fn take_turns(is_done: impl Fn() -> Result<bool, DeviceError>) -> Result<(), DeviceError> {
    poll_with(is_done, TURN_SPIN, |_| TURN_NAP)
}

fn poll_with(
    is_done: impl Fn() -> Result<bool, DeviceError>,
    spin: Duration,
    nap: impl Fn(Duration) -> Duration,
) -> Result<(), DeviceError> {
    let started = Instant::now();
    while !is_done()? {
        let waited = started.elapsed();
        if waited < spin {
            std::hint::spin_loop();
        } else {
            linux::deliver_default_signals();
            std::thread::sleep(nap(waited));
        }
    }
    Ok(())
}

/// Sleeps until a device of this process is done with something; as [`poll`] while the thread holds signals.
pub(crate) fn sleep<'a, T>(progress: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    if !must_poll() {
        return progress.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
    linux::deliver_default_signals();
    progress.wait_timeout(guard, linux::SIGNAL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0
}
