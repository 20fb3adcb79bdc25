//! Page tables filled ahead of a stream.
//!
//! ```text
//!   stream    ──[ request, being registered ]──[ next: a keeper fills its page tables ]──>
//! ```
//!
//! Pages that lie one by one in the page cache take as long to be put into page tables as to be registered
//! (read/prefault.rs). A request of up to some MiB is over before anybody could help with it. But where one follows the other
//! the next is known: while one is registered, a keeper looks whether the bytes behind it are all cached, and fills the page
//! tables for as many.
//!
//! What is filled is a hint: pages may go again, and then registering finds them missing, and puts them there.
//!
//! Known flaw: one stream a file; a second one makes the first forget.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use spinio_sys::linux::PAGE;

use spinio_host::lock;
use spinio_transfer::Mapping;

/// A page that takes longer is worth somebody else's time.
const SLOW_PAGE: Duration = Duration::from_nanos(20);

/// Pages that tell.
const MIN_SAMPLE_PAGES: u64 = 256;

/// What is known of the page tables of a file's mapping.
#[derive(Default)]
pub struct PrefaultState {
    /// Filling them takes long.
    pub(crate) is_slow: AtomicBool,
    /// Which mapping, and what of it.
    pub(crate) ready: Mutex<(usize, Range<u64>)>,
    /// A keeper is at it.
    pub(crate) busy: AtomicBool,
}

impl PrefaultState {
    /// Somebody filled so many bytes in so long; whether that is long, and enough to tell.
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
        // Nobody looks at these addresses.
        let at = |address: usize| std::mem::ManuallyDrop::new(Mapping { ptr: address as *mut u8, len: 1 << 30 });
        let tables = PrefaultState::default();
        assert!(!tables.covers(&at(4096), &(0..4096)));
        *lock(&tables.ready) = (4096, 8192..16_384);
        assert!(tables.covers(&at(4096), &(8192..16_384)) && tables.covers(&at(4096), &(12_288..16_000)));
        assert!(!tables.covers(&at(4096), &(4096..12_288)) && !tables.covers(&at(4096), &(12_288..20_480)));
        assert!(!tables.covers(&at(8192), &(8192..16_384)), "another mapping of the file");
    }

    #[test]
    fn slow_needs_many_pages() {
        let tables = PrefaultState::default();
        let slow = || tables.is_slow.load(Relaxed);
        assert!(!tables.record(4096, Duration::from_secs(1)) && !slow(), "one page tells nothing");
        assert!(!tables.record(100 * 4096, Duration::from_millis(10)) && !slow(), "few pages tell nothing");
        assert!(tables.record(8 << 20, Duration::from_micros(200)) && slow(), "98 ns a page");
        assert!(!tables.record(4096, Duration::ZERO) && slow(), "nor do they tell that it is quick");
        assert!(!tables.record(8 << 20, Duration::from_micros(10)) && !slow(), "5 ns a page");
        assert!(!tables.record(8 << 20, Duration::from_micros(5)) && !slow(), "2 ns a page");
    }
}
