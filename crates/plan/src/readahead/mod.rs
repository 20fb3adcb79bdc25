//! Read-ahead for devices: the paper's P-readahead (4.3.2) in today's terms.
//!
//! ```text
//!   requests of one descriptor, contiguous?
//!     no ─────────────────────────────────> each by its residency, as usual
//!     yes, and up to the read-ahead window ─> through the page cache, where the kernel reads ahead;
//!     │                                       unless a calibrated model predicts that it is slower
//!     yes, and larger ────────────────────> direct or p2p: larger commands than the Linux kernel's
//!
//!   what that leaves in the page cache:
//!
//!      passed, owned        reader        surveyed, absent      not surveyed yet
//!   ───[▓▓▓▓▓▓▓▓▓▓▓]──────────●─────[▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓]────────────────────> file
//!       │ bounded, oldest      the kernel's read-ahead   │
//!       │ dropped first        comes up to here ─────────┤
//!       │                                survey distance: surveyed before it gets there
//!       └─ resident at the survey: another process's, never dropped
//! ```
//!
//! The paper keeps a partition of the page cache for what was read ahead for the GPU. A library has no partition, but
//! it can find out which pages it read in itself: residency is surveyed once a step, further ahead than the Linux
//! kernel reads, and pages that were absent then and have been passed since were read in by this reader. Such ranges
//! form a set of a bounded size ([`OwnedPages`]); ranges that exceed it are dropped, oldest first, with
//! POSIX_FADV_DONTNEED, which spares pages that are mapped or dirty. Pages that were resident at the survey belong to
//! another process and stay.
//!
//! Pure: the surveys, the drops and the detection of other processes that opened the file are in `spinio-files`.
//!
//! Known flaws: pages that the Linux kernel fetched before the first survey, some 256 KiB and a first window per
//! stream, are attributed to another process and stay. Pages of these ranges that another process read without opening
//! the file again (it had it open before) cannot be distinguished from those of SPIN, and are dropped with them.

mod owned_pages;
mod survey_window;

pub use owned_pages::OwnedPages;
pub use survey_window::SurveyWindow;

use crate::{Model, Route};

/// Bytes read sequentially before a stream is tracked.
pub const DETECT_BYTES: u64 = 256 << 10;

/// Bytes between two surveys of a stream that storage serves.
pub const SURVEY_STEP: u64 = 512 << 10;

/// The same where all pages ahead are cached.
pub const CACHED_SURVEY_STEP: u64 = 8 << 20;

/// The window if the device does not report one, and the minimum: the default of Linux.
const MIN_WINDOW: u64 = 128 << 10;

/// Below this a direct read has too few bytes in flight to make up for the lost read-ahead, whatever the window:
/// the paper's switch, and the result for sequential cold reads of 256 and 512 KiB on a disk with a window of 128 KiB.
const MIN_SWITCH: u64 = 512 << 10;

/// Above this a direct read has enough commands in flight by itself, whatever the window.
const MAX_SWITCH: u64 = 1 << 20;

/// Shorter requests take another path.
const MIN_REQUEST: u64 = 64 << 10;

/// The largest request of a sequential stream that is served through the page cache for the sake of read-ahead.
/// `window`: the device's, 0 if unknown; `widened`: the program called POSIX_FADV_SEQUENTIAL, for which the Linux
/// kernel doubles the window.
pub fn max_buffered_request(window: u64, widened: bool) -> u64 {
    let window = if widened { window.saturating_mul(2) } else { window };
    window.clamp(MIN_SWITCH, MAX_SWITCH)
}

/// The largest request of a stream that is absent and is read through the page cache (`cache`: by which route), where
/// the window alone would allow `max_request`; 0 if none. The Linux kernel reads ahead while the reader copies, so the
/// slower of the two counts. With direct I/O nothing is in flight between two requests: each waits for the full
/// latency.
pub fn max_profitable_request(max_request: u64, model: &Model, cache: Route) -> u64 {
    let queue = &model.storage_queue;
    let pays = |len: &u64| {
        // The disk's bandwidth limits both.
        let disk = *len as f64 * queue.per_byte;
        let bypass_time = model.storage.time(*len).min(queue.latency + queue.command_time(*len));
        model.cost(cache).time(*len).max(disk) <= bypass_time.max(disk)
    };
    // Halving is precise enough: the two curves are close where they cross.
    let halves = std::iter::successors(Some(max_request), |len| (*len / 2 >= MIN_REQUEST).then_some(*len / 2));
    halves.filter(|len| *len > 0).find(pays).unwrap_or(0)
}

/// The Linux kernel's window.
pub fn window(reported: u64, widened: bool) -> u64 {
    reported.clamp(MIN_WINDOW, 64 << 20) * if widened { 2 } else { 1 }
}

/// The distance ahead of the reader for which residency must be known: the window being read, the one in flight after
/// it, and the bytes until the next survey, twice because the survey may be late.
pub fn survey_distance(reported: u64, widened: bool, step: u64) -> u64 {
    2 * window(reported, widened) + 2 * step
}
