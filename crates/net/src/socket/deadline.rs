//! When a call returns: one time for all of its waits.

use spinio_sys::linux;

/// Of a call whose waits have this limit together, in nanoseconds; 0: it has none.
pub(super) fn deadline(timeout: u64) -> Option<u64> {
    (timeout > 0).then(|| linux::monotonic_ns().saturating_add(timeout))
}

/// Nanoseconds until a deadline.
pub(super) fn left(deadline: Option<u64>) -> Option<u64> {
    deadline.map(|deadline| deadline.saturating_sub(linux::monotonic_ns()))
}
