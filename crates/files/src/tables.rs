//! Page tables filled ahead of a stream.
//!
//! ```text
//!   stream    ──[ request, being registered ]──[ next: a keeper fills its page tables ]──>
//! ```
//!
//! Pages that lie one by one in the page cache take as long to be put into page tables as to be registered
//! (read/populate.rs). A request of up to some MiB is over before anybody could help with it. But where one follows the other
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

use spinio_transfer::Mapping;
use spinio_host::lock;

/// A page that takes longer is worth somebody else's time.
const LONG: Duration = Duration::from_nanos(20);

/// Pages that tell.
const TELLING: u64 = 256;

/// What is known of the page tables of a file's mapping.
#[derive(Default)]
pub struct Tables {
    /// Filling them takes long.
    pub(crate) slow: AtomicBool,
    /// Which mapping, and what of it.
    pub(crate) filled: Mutex<(usize, Range<u64>)>,
    /// A keeper is at it.
    pub(crate) busy: AtomicBool,
}

impl Tables {
    /// Somebody filled so many bytes in so long; whether that is long, and enough to tell.
    pub fn took(&self, bytes: u64, time: Duration) -> bool {
        let pages = bytes / PAGE as u64;
        let (tells, slow) = (pages >= TELLING, time > LONG * pages as u32);
        if tells {
            self.slow.store(slow, Relaxed);
        }
        tells && slow
    }

    /// Whether a range is filled already.
    pub fn has(&self, mapping: &Mapping, range: &Range<u64>) -> bool {
        let filled = lock(&self.filled);
        filled.0 == mapping.ptr as usize && filled.1.start <= range.start && range.end <= filled.1.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_filled_is_known_of_that_mapping_alone() {
        // Nobody looks at these addresses.
        let at = |address: usize| std::mem::ManuallyDrop::new(Mapping { ptr: address as *mut u8, len: 1 << 30 });
        let tables = Tables::default();
        assert!(!tables.has(&at(4096), &(0..4096)));
        *lock(&tables.filled) = (4096, 8192..16_384);
        assert!(tables.has(&at(4096), &(8192..16_384)) && tables.has(&at(4096), &(12_288..16_000)));
        assert!(!tables.has(&at(4096), &(4096..12_288)) && !tables.has(&at(4096), &(12_288..20_480)));
        assert!(!tables.has(&at(8192), &(8192..16_384)), "another mapping of the file");
    }

    #[test]
    fn slow_is_what_takes_long_for_many_pages() {
        let tables = Tables::default();
        let slow = || tables.slow.load(Relaxed);
        assert!(!tables.took(4096, Duration::from_secs(1)) && !slow(), "one page tells nothing");
        assert!(!tables.took(100 * 4096, Duration::from_millis(10)) && !slow(), "few pages tell nothing");
        assert!(tables.took(8 << 20, Duration::from_micros(200)) && slow(), "98 ns a page");
        assert!(!tables.took(4096, Duration::ZERO) && slow(), "nor do they tell that it is quick");
        assert!(!tables.took(8 << 20, Duration::from_micros(10)) && !slow(), "5 ns a page");
        assert!(!tables.took(8 << 20, Duration::from_micros(5)) && !slow(), "2 ns a page");
    }
}
