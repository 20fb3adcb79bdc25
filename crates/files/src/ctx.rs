//! The handles of the host: system calls, worker pools, counters, and deferred unpinning.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spinio_host::pool::Workers;
use spinio_host::shares::ShareKey;
use spinio_host::syscalls::Syscalls;
use spinio_stats::{Stats, StatsRegion};
use spinio_transfer::DeferredUnpin;

/// How long a `close` waits until the state of the file is released. It takes longer only if a server is slow, or a
/// GPU kernel of the program blocks the driver.
const CLOSE_WAIT: Duration = Duration::from_millis(20);

/// Handles of one runtime, created once.
pub struct FilesCtx {
    /// The system calls.
    pub sys: &'static dyn Syscalls,
    /// The worker pools.
    pub workers: Arc<Workers>,
    /// The counters, and where they are stored.
    pub stats_region: Arc<StatsRegion>,
    /// Pages that wait to be unpinned.
    pub unpin: Arc<DeferredUnpin>,
}

impl FilesCtx {
    /// The counters.
    pub fn stats(&self) -> &Stats {
        self.stats_region.stats()
    }

    /// Called after a file was forgotten: workers drop it, close its shadow descriptors and unpin its pages at once; waits
    /// up to `CLOSE_WAIT` for them. `is_dropped`: the file is dropped. `key`: its share, if it is one.
    pub fn drain_for_close(&self, is_dropped: impl Fn() -> bool, key: Option<ShareKey>) {
        let begun = Instant::now();
        let left = || CLOSE_WAIT.saturating_sub(begun.elapsed());
        let shadow = self.workers.shadow().inspect(|shadow| shadow.wake_idle(CLOSE_WAIT));
        self.unpin.drain(left());
        if let Some(shadow) = shadow {
            shadow.wait_idle_until(is_dropped, left());
            shadow.wait_closed(key, left());
        }
    }
}
