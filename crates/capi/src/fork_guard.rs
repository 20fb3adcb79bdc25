//! Whether the process that runs this code is the one that has made device calls.
//!
//! A child of `vfork` runs in its parent's memory: it finds every word of the library as the parent left it, but has
//! its own descriptors. The files that it closes before `exec` are still open in the parent. In a child of `fork` the
//! word below is wiped.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_sys::linux;

/// PID of the process that made a device call; 0 for none.
static DEVICE_CALL_PID: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();

/// This process makes a device call.
pub(crate) fn record_device_call() {
    if let Some(word) = DEVICE_CALL_PID.get_or_init(|| linux::wipe_on_fork_word().ok())
        && word.load(Relaxed) == 0
    {
        word.store(linux::getpid().into(), Relaxed);
    }
}

/// Whether this very process has made one.
pub fn has_device_calls() -> bool {
    let made_by = DEVICE_CALL_PID.get().copied().flatten().map_or(0, |word| word.load(Relaxed));
    made_by != 0 && made_by == u64::from(linux::getpid())
}
