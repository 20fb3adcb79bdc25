//! Page tables filled ahead of a stream.
//!
//! ```text
//!   stream    ──[ request, being registered ]──[ next: a shadow worker fills its page tables ]──>
//! ```
//!
//! Single pages of the page cache take as long to be entered into page tables as to be registered
//! (io/src/read/prefault.rs). A request of up to a few MiB is complete before another thread could help. But in a
//! sequential stream the next range is known: while one request is registered, a shadow worker checks whether the bytes
//! after it are all cached, and fills their page tables.
//!
//! This is a hint: pages may be evicted again, and then registering faults them in.
//!
//! Known flaw: one stream per file; a second stream replaces the first.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use spinio_sys::linux::PAGE;

use spinio_host::lock;
use spinio_transfer::Mapping;

/// Prefault on a worker if a page takes longer than this.
const SLOW_PAGE: Duration = Duration::from_nanos(20);

/// The least pages that make a measurement conclusive.
const MIN_SAMPLE_PAGES: u64 = 256;

/// The state of the page tables of a file's mapping.
#[derive(Default)]
pub struct PrefaultState {
    /// Filling them is slow.
    pub(crate) is_slow: AtomicBool,
    /// The mapping, and the range that is filled.
    pub(crate) ready: Mutex<(usize, Range<u64>)>,
    /// A shadow worker is filling them.
    pub(crate) busy: AtomicBool,
}

impl PrefaultState {
    /// Records that filling `bytes` took `time`; whether that is slow, and conclusive.
    pub fn record(&self, bytes: u64, time: Duration) -> bool {
        let pages = bytes / PAGE as u64;
        let (conclusive, slow) = (pages >= MIN_SAMPLE_PAGES, time > SLOW_PAGE * pages as u32);
        if conclusive {
            self.is_slow.store(slow, Relaxed);
        }
        conclusive && slow
    }

    /// Whether a range is filled already.
    pub fn covers(&self, mapping: &Mapping, range: &Range<u64>) -> bool {
        let ready = lock(&self.ready);
        ready.0 == mapping.ptr as usize && ready.1.start <= range.start && range.end <= ready.1.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_tracks_one_mapping() {
        // These addresses are never accessed.
        let at = |address: usize| std::mem::ManuallyDrop::new(Mapping { ptr: address as *mut u8, len: 1 << 30 });
        let state = PrefaultState::default();
        assert!(!state.covers(&at(4096), &(0..4096)));
        *lock(&state.ready) = (4096, 8192..16_384);
        assert!(state.covers(&at(4096), &(8192..16_384)) && state.covers(&at(4096), &(12_288..16_000)));
        assert!(!state.covers(&at(4096), &(4096..12_288)) && !state.covers(&at(4096), &(12_288..20_480)));
        assert!(!state.covers(&at(8192), &(8192..16_384)), "another mapping of the file");
    }

    #[test]
    fn slow_needs_many_pages() {
        let state = PrefaultState::default();
        let slow = || state.is_slow.load(Relaxed);
        assert!(!state.record(4096, Duration::from_secs(1)) && !slow(), "one page is not conclusive");
        assert!(!state.record(100 * 4096, Duration::from_millis(10)) && !slow(), "few pages are not conclusive");
        assert!(state.record(8 << 20, Duration::from_micros(200)) && slow(), "98 ns a page");
        assert!(!state.record(4096, Duration::ZERO) && slow(), "nor do they show that it is fast");
        assert!(!state.record(8 << 20, Duration::from_micros(10)) && !slow(), "5 ns a page");
        assert!(!state.record(8 << 20, Duration::from_micros(5)) && !slow(), "2 ns a page");
    }
}
