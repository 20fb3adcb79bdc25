//! Read-ahead for devices: the paper's P-readahead (4.3.2) in today's terms.
//!
//! ```text
//!   requests of one descriptor, end to end?
//!     no ─────────────────────────────────> each by its residency, as ever
//!     yes, and up to the read-ahead window ─> through the page cache, where the kernel reads ahead;
//!     │                                       unless it is the slower way even so (a calibrated model knows)
//!     yes, and larger ────────────────────> direct or p2p: larger commands than the kernel's
//!
//!   what that leaves in the page cache:
//!
//!      passed, ours         reader        asked, absent         not asked yet
//!   ───[▓▓▓▓▓▓▓▓▓▓▓]──────────●─────[▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓]────────────────────> file
//!       │ bounded, oldest      the kernel's read-ahead   │
//!       │ dropped first        comes up to here ─────────┤
//!       │                                 `lead`: asked before it gets there
//!       └─ resident before the question: somebody else's, never dropped
//! ```
//!
//! The paper keeps a partition of the page cache for what was read ahead for the GPU. A library has no partition, but it
//! can know which pages are its own doing: residency is asked once a step, further ahead than the kernel reads, and what
//! was absent then and has been passed since was brought in by this reader. Such ranges form a set of a bounded size
//! ([`Brought`]); what falls out at the old end is dropped with POSIX_FADV_DONTNEED, which spares pages that are mapped
//! or dirty. What was resident at the question belongs to somebody else and stays.
//!
//! Pure: who asks, who drops and who sees that others opened the file is `crates/io/src/file/ahead.rs`.
//!
//! Known flaws: pages that the kernel fetched before the first question, some 256 KiB and a first window a stream, are
//! taken for somebody else's and stay. What another process read of these ranges without opening the file anew (it had it
//! open before) cannot be told from our own, and is dropped with it.

mod ahead;
mod brought;

pub use ahead::SurveyWindow;
pub use brought::OwnedPages;

use crate::{Model, Route};

/// Bytes read end to end before a stream is one that is looked after.
pub const DETECT_BYTES: u64 = 256 << 10;

/// Bytes between two looks at a stream that storage serves.
pub const SURVEY_STEP: u64 = 512 << 10;

/// The same where everything ahead is cached.
pub const CACHED_SURVEY_STEP: u64 = 8 << 20;

/// The window where the device does not tell, and the least: what Linux sets by default.
const MIN_WINDOW: u64 = 128 << 10;

/// Below this a direct read has too little under way to make up for the read-ahead that it gives up, whatever the window:
/// the paper's switch, and what sequential cold reads of 256 and 512 KiB showed on a disk with a window of 128 KiB.
const MIN_SWITCH: u64 = 512 << 10;

/// Above this a direct read has enough commands under way by itself, whatever the window.
const MAX_SWITCH: u64 = 1 << 20;

/// Shorter requests have a way of their own.
const MIN_REQUEST: u64 = 64 << 10;

/// The largest request of a sequential stream that is served through the page cache for the sake of read-ahead.
/// `window`: the device's, 0 if it is not told; `widened`: the program said POSIX_FADV_SEQUENTIAL, for which the kernel
/// doubles the window.
pub fn max_buffered_request(window: u64, widened: bool) -> u64 {
    let window = if widened { window.saturating_mul(2) } else { window };
    window.clamp(MIN_SWITCH, MAX_SWITCH)
}

/// The largest request of a stream that is absent and goes through the page cache (`cache`: by which route), where the
/// window alone would allow `most`; 0 if none. The kernel reads ahead while the reader copies, so the slower of the two
/// counts. Around the page cache nothing is under way between two requests: each waits for storage from the beginning.
pub fn max_profitable_request(max_request: u64, model: &Model, cache: Route) -> u64 {
    let queue = &model.storage_queue;
    let pays = |len: &u64| {
        // What the disk moves in the long run bounds both ways.
        let disk = *len as f64 * queue.per_byte;
        let bypass_time = model.storage.time(*len).min(queue.latency + queue.command_time(*len));
        model.cost(cache).time(*len).max(disk) <= bypass_time.max(disk)
    };
    // Half by half is fine enough: the two curves lie close where they cross.
    let halves = std::iter::successors(Some(max_request), |len| (*len / 2 >= MIN_REQUEST).then_some(*len / 2));
    halves.filter(|len| *len > 0).find(pays).unwrap_or(0)
}

/// The kernel's own window.
pub fn window(reported: u64, widened: bool) -> u64 {
    reported.clamp(MIN_WINDOW, 64 << 20) * if widened { 2 } else { 1 }
}

/// How far ahead of the reader residency must be known: the window being read, the one in flight after it, and the bytes
/// until the next check, twice because the check may be late.
pub fn survey_distance(reported: u64, widened: bool, step: u64) -> u64 {
    2 * window(reported, widened) + 2 * step
}
