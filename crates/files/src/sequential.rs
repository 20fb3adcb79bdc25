//! Whether the reads of a descriptor are sequential, at two or three nanoseconds a read.
//!
//! ```text
//!   pread(fd, ...) small ──> entry of fd: next offset? bytes left until a check? ── no ──> done
//!                                                                   └─ yes ──> fstat, check (readahead.rs)
//! ```
//!
//! A stream that storage serves is *cold*: the kernel reads ahead of it, and its requests up to the read-ahead window
//! are made with the single system call of a host read (read/sequential_small.rs). The entry has the maximum length.
//!
//! An entry is a hint. No thread locks it; threads that share a descriptor may garble it, and a number may be reused
//! for another file between two checks. Then a check is early or late, or finds another file and starts again.
//!
//! Advice (`posix_fadvise`) is stored here too, for the whole process: programs give it before their first device read,
//! when no runtime exists. It is stored with the file that the number referred to then.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use spinio_plan::readahead::{CACHED_SURVEY_STEP, DETECT_BYTES, SURVEY_STEP};
use spinio_sys::linux::{Advice, Fd, Stat};

use spinio_host::settings::{CachePolicy, Settings};

/// Descriptors with separate entries; others share one, which only costs an additional check.
const ENTRIES: usize = 256;

/// An offset at which no read can begin.
const NO_OFFSET: u64 = u64::MAX;

/// One descriptor.
#[repr(align(64))]
#[derive(Default)]
struct Entry {
    /// The descriptor number, plus one.
    fd: AtomicU64,
    /// The offset of the next read of the stream.
    next: AtomicU64,
    /// Bytes until a check.
    until_check: AtomicU64,
    /// Storage serves it, which is slower than any thread: the longest request for which the kernel's read-ahead is
    /// best. 0 if it is cached or unknown.
    limit: AtomicU64,
    /// The longest request for which read-ahead is faster by cost, as far as is known.
    cost_limit: AtomicU64,
    /// Whether its file is on a disk of this machine, as the kernel has said since the last check.
    disk: AtomicU8,
}

/// The file of a stream is on a disk of this machine, or on none.
const LOCAL: u8 = 1;
const NOT_LOCAL: u8 = 2;
const UNKNOWN: u8 = 0;

impl Entry {
    /// A stream begins.
    fn reset(&self, fd: Fd, until_check: u64) {
        self.fd.store(fd as u64 + 1, Relaxed);
        self.until_check.store(until_check, Relaxed);
        self.limit.store(0, Relaxed);
        self.cost_limit.store(u64::MAX, Relaxed);
        self.disk.store(UNKNOWN, Relaxed);
    }
}

/// The streams of a runtime.
pub struct SequentialDetector {
    entries: Box<[Entry]>,
    first_check: u64,
}

impl SequentialDetector {
    /// Nothing is detected yet.
    pub fn new(settings: &Settings) -> SequentialDetector {
        // Nothing is ever dropped, so no check is needed.
        let first_check = if settings.readahead_keep == CachePolicy::Keep { u64::MAX } else { DETECT_BYTES };
        SequentialDetector { entries: (0..ENTRIES).map(|_| Entry::default()).collect(), first_check }
    }

    fn entry(&self, fd: Fd) -> &Entry {
        &self.entries[fd as usize % ENTRIES]
    }

    /// `got` bytes were read through the page cache; true when a check is due.
    #[inline]
    pub fn record(&self, fd: Fd, at: Option<u64>, bytes: usize) -> bool {
        let (entry, bytes) = (self.entry(fd), bytes as u64);
        let known = entry.fd.load(Relaxed) == fd as u64 + 1;
        // A read at the descriptor's own offset follows the last one, until a check finds otherwise.
        let sequential = known && at.is_none_or(|at| at == entry.next.load(Relaxed));
        let from = at.unwrap_or(if known { entry.next.load(Relaxed) } else { NO_OFFSET });
        let next = from.saturating_add(bytes);
        entry.next.store(next, Relaxed);
        if !sequential {
            entry.reset(fd, self.first_check);
            return false;
        }
        let until_check = entry.until_check.load(Relaxed);
        if until_check > bytes {
            entry.until_check.store(until_check - bytes, Relaxed);
            return false;
        }
        entry.until_check.store(SURVEY_STEP, Relaxed);
        entry.disk.store(UNKNOWN, Relaxed);
        true
    }

    /// Whether a read at `at` follows the last one of this descriptor, and that it goes to `end`.
    pub fn is_next(&self, fd: Fd, at: u64, end: u64) -> bool {
        let entry = self.entry(fd);
        let sequential = self.follows(fd, at);
        if !sequential {
            entry.reset(fd, self.first_check);
        }
        entry.next.store(end, Relaxed);
        sequential
    }

    /// The same, and changes nothing.
    pub fn follows(&self, fd: Fd, at: u64) -> bool {
        let entry = self.entry(fd);
        entry.fd.load(Relaxed) == fd as u64 + 1 && entry.next.load(Relaxed) == at
    }

    /// `bytes` of a stream that `is_next` has detected were read through the page cache; true when a check is due.
    pub fn advance(&self, fd: Fd, bytes: u64) -> bool {
        let entry = self.entry(fd);
        let until_check = entry.until_check.load(Relaxed);
        entry.until_check.store(if until_check > bytes { until_check - bytes } else { SURVEY_STEP }, Relaxed);
        until_check <= bytes
    }

    /// Stores when the next check is needed, which depends on whether the range ahead is cached. `most`: the longest
    /// request for which read-ahead is best if it is not.
    pub fn schedule_check(&self, fd: Fd, step: u64, max_len: u64) {
        let entry = self.entry(fd);
        entry
            .limit
            .store(if step < CACHED_SURVEY_STEP { max_len.min(entry.cost_limit.load(Relaxed)) } else { 0 }, Relaxed);
        if step >= CACHED_SURVEY_STEP {
            entry.until_check.store(step, Relaxed);
        }
    }

    /// Stores the result of the cost model for a request of the stream: `most` is the longest request for which
    /// read-ahead is best.
    pub fn set_cost_limit(&self, fd: Fd, max_len: u64) {
        let entry = self.entry(fd);
        entry.cost_limit.store(max_len, Relaxed);
        entry.limit.fetch_min(max_len, Relaxed);
    }

    /// A request of the stream has found an absent page.
    pub fn mark_cold(&self, fd: Fd, max_len: u64) {
        self.entry(fd).limit.store(max_len, Relaxed);
    }

    /// Whether the file of a stream is on a disk of this machine. `ask`: asks the kernel, once since the last check.
    pub fn is_local(&self, fd: Fd, ask: impl FnOnce() -> bool) -> bool {
        let entry = self.entry(fd);
        let is_its = entry.fd.load(Relaxed) == fd as u64 + 1;
        let known = if is_its { entry.disk.load(Relaxed) } else { UNKNOWN };
        if known != UNKNOWN {
            return known == LOCAL;
        }
        let is_local = ask();
        let disk = if is_local { LOCAL } else { NOT_LOCAL };
        entry.disk.store(if is_its { disk } else { UNKNOWN }, Relaxed);
        is_local
    }

    /// Whether a read of `len` bytes belongs to a cold stream, and is one for which the kernel's read-ahead is best.
    pub fn uses_kernel_readahead(&self, fd: Fd, at: Option<u64>, len: u64) -> bool {
        let entry = self.entry(fd);
        len <= entry.limit.load(Relaxed)
            && entry.fd.load(Relaxed) == fd as u64 + 1
            && at.is_none_or(|at| at == entry.next.load(Relaxed))
            && ADVICE[fd as usize % ENTRIES].load(Relaxed) & ADVICE_MASK != ADVICE_RANDOM
    }
}

/// The program's advice for a descriptor: a tag of the file, and the advice.
static ADVICE: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];

const ADVICE_MASK: u64 = 3;
const ADVICE_RANDOM: u64 = 1;

fn file_tag(stat: &Stat) -> u64 {
    (stat.dev.rotate_left(32) ^ stat.ino).wrapping_mul(0x9e37_79b9_7f4a_7c15) & !ADVICE_MASK
}

/// Records advice.
pub fn record_advice(fd: Fd, stat: &Stat, advice: Advice) {
    let kind = match advice {
        Advice::Normal => 0,
        Advice::Random => ADVICE_RANDOM,
        Advice::Sequential => 2,
        Advice::WillNeed | Advice::DontNeed => return,
    };
    ADVICE[fd as usize % ENTRIES].store(file_tag(stat) | kind, Relaxed);
}

/// The advice for the file that this number refers to now.
pub fn advice_for(fd: Fd, stat: &Stat) -> Advice {
    let word = ADVICE[fd as usize % ENTRIES].load(Relaxed);
    match (word & !ADVICE_MASK == file_tag(stat), word & ADVICE_MASK) {
        (true, ADVICE_RANDOM) => Advice::Random,
        (true, 2) => Advice::Sequential,
        _ => Advice::Normal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detector() -> SequentialDetector {
        SequentialDetector::new(&Settings::default())
    }

    #[test]
    fn sequential_reads_schedule_checks() {
        let detector = detector();
        let checks = |at: &mut dyn FnMut(u64) -> Option<u64>| {
            (0..1024u64).filter(|i| detector.record(5, at(*i), 4096)).count() as u64
        };
        let all = 1024 * 4096;
        let expected = 1 + (all - DETECT_BYTES - 4096) / SURVEY_STEP;
        assert_eq!(checks(&mut |i| Some(i * 4096)), expected);
        assert_eq!(checks(&mut |_| None), all / SURVEY_STEP, "it continues at the same offset");
        assert_eq!(checks(&mut |i| Some(i * 7919 % 1000 * 4096)), 0);
        let disabled = SequentialDetector::new(&Settings { readahead_keep: CachePolicy::Keep, ..Settings::default() });
        assert!((0..1 << 12).all(|i| !disabled.record(5, Some(i << 16), 1 << 16)));
    }

    #[test]
    fn colliding_fds_reset_the_entry() {
        let detector = detector();
        for i in 0..1000 {
            assert!(!detector.record(3, Some(i << 16), 1 << 16));
            assert!(!detector.record(3 + ENTRIES as Fd, Some(i << 16), 1 << 16));
        }
    }

    #[test]
    fn large_sequential_reads_are_detected() {
        let detector = detector();
        assert!(!detector.is_next(4, 0, 100));
        assert!(detector.is_next(4, 100, 200));
        assert!(!detector.is_next(4, 300, 400));
        assert!(!detector.record(4, Some(400), 10));
        assert!(detector.is_next(4, 410, 500));
    }

    #[test]
    fn cold_stream_uses_kernel_readahead() {
        let detector = detector();
        let most = 1 << 19;
        assert!(!detector.is_next(6, 0, 100));
        assert!(!detector.uses_kernel_readahead(6, Some(100), 10), "nothing is known of storage");
        detector.mark_cold(6, most);
        assert!(detector.uses_kernel_readahead(6, Some(100), most) && detector.uses_kernel_readahead(6, None, most));
        assert!(
            !detector.uses_kernel_readahead(6, Some(100), most + 1) && !detector.uses_kernel_readahead(6, Some(99), 10)
        );
        assert!(!detector.uses_kernel_readahead(6 + ENTRIES as Fd, Some(100), 10));
        // Reads at the descriptor's own offset and others take turns.
        assert!(!detector.record(6, None, 20) && detector.uses_kernel_readahead(6, Some(120), 10));
        detector.schedule_check(6, CACHED_SURVEY_STEP, most);
        assert!(!detector.uses_kernel_readahead(6, Some(120), 10), "it is cached");
        detector.schedule_check(6, SURVEY_STEP, most);
        assert!(detector.uses_kernel_readahead(6, Some(120), 10));
        assert!(!detector.record(6, Some(7), 20) && !detector.uses_kernel_readahead(6, Some(27), 10), "it has jumped");
    }

    #[test]
    fn kernel_is_asked_for_the_disk_of_a_stream_once_between_two_checks() {
        let detector = detector();
        // The answer that a read gets where the kernel would give another one each time.
        let kernel = std::cell::Cell::new(false);
        let ask = |fd: Fd| {
            detector.is_local(fd, || {
                kernel.set(!kernel.get());
                kernel.get()
            })
        };
        assert!(!detector.is_next(7, 0, 100));
        assert!(ask(7) && ask(7));
        assert!(!detector.record(7, Some(100), 20) && ask(7), "it goes on");
        assert!(detector.record(7, Some(120), DETECT_BYTES as usize) && !ask(7) && !ask(7), "a check was due");
        assert!(!detector.record(7, Some(7), 20) && ask(7) && ask(7), "it has jumped");
        assert!(!ask(7 + ENTRIES as Fd) && ask(7 + ENTRIES as Fd), "another descriptor shares the entry");
        assert!(!ask(7) && !ask(7));
    }

    #[test]
    fn check_keeps_cost_limit() {
        let detector = detector();
        assert!(!detector.is_next(6, 0, 100));
        detector.schedule_check(6, SURVEY_STEP, 1 << 19);
        detector.set_cost_limit(6, 1 << 17);
        assert!(
            detector.uses_kernel_readahead(6, Some(100), 1 << 17)
                && !detector.uses_kernel_readahead(6, Some(100), 1 << 18)
        );
        detector.schedule_check(6, SURVEY_STEP, 1 << 19);
        assert!(
            detector.uses_kernel_readahead(6, Some(100), 1 << 17)
                && !detector.uses_kernel_readahead(6, Some(100), 1 << 18)
        );
        assert!(!detector.is_next(6, 7, 20), "it has jumped");
        detector.schedule_check(6, SURVEY_STEP, 1 << 19);
        assert!(detector.uses_kernel_readahead(6, Some(20), 1 << 18), "and nothing is known of costs");
    }

    #[test]
    fn advice_applies_to_one_inode() {
        let stat = |ino| Stat {
            dev: 7,
            ino,
            rdev: 0,
            size: 0,
            blocks: 0,
            uid: 0,
            unlinked: false,
            mode: 0,
            mtime_ns: 0,
            ctime_ns: 0,
            kind: spinio_sys::linux::FileKind::Regular,
        };
        record_advice(200, &stat(1), Advice::Random);
        assert_eq!(advice_for(200, &stat(1)), Advice::Random);
        assert_eq!(advice_for(200, &stat(2)), Advice::Normal);
        record_advice(200, &stat(1), Advice::Sequential);
        assert_eq!(advice_for(200, &stat(1)), Advice::Sequential);
        record_advice(200, &stat(1), Advice::Normal);
        assert_eq!(advice_for(200, &stat(1)), Advice::Normal);
    }
}
