//! What everything here needs of the host: system calls, worker pools, counters, and pages that wait to be unpinned.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spinio_host::pool::Workers;
use spinio_host::shares::ShareKey;
use spinio_host::syscalls::Syscalls;
use spinio_stats::{Stats, StatsRegion};
use spinio_transfer::DeferredUnpin;

/// How long a `close` waits for what is kept beside the file to be released. Longer only if a server is slow, or a
/// kernel of the program holds up the driver.
const CLOSE_WAIT: Duration = Duration::from_millis(20);

/// Handles of one runtime, made once.
pub struct FilesCtx {
    /// The system calls.
    pub sys: &'static dyn Syscalls,
    /// The worker pools.
    pub workers: Arc<Workers>,
    /// The counters, and the file that they are in.
    pub home: Arc<StatsRegion>,
    /// Pages that wait to be unpinned.
    pub unpin: Arc<DeferredUnpin>,
}

impl FilesCtx {
    /// The counters.
    pub fn stats(&self) -> &Stats {
        self.home.stats()
    }

    /// After a file was forgotten: shadow descriptors are closed and pages unpinned by workers, at once, and waited for a
    /// little. `key`: the share of the file, if it is one.
    pub fn drain_for_close(&self, key: Option<ShareKey>) {
        let begun = Instant::now();
        self.unpin.drain(CLOSE_WAIT);
        if let Some(keepers) = self.workers.shadow() {
            keepers.wait_closed(key, CLOSE_WAIT.saturating_sub(begun.elapsed()));
        }
    }
}
