//! Whether the reads of a descriptor follow each other, at two or three nanoseconds a read.
//!
//! ```text
//!   pread(fd, ...) small ──> slot of fd: next offset? bytes left until a look? ── no ──> that was all
//!                                                                   └─ yes ──> fstat, a keeper looks (ahead.rs)
//! ```
//!
//! A stream that storage serves is *cold*: the kernel reads ahead of it, and its requests up to the read-ahead window are
//! made with the one call that a host read makes (read/trickle.rs). The slot says up to which length.
//!
//! The slot also says when the kernel is to be led further ahead (spinio_plan::readahead, further.rs): after 4 MiB, every
//! 128 KiB, as far as the last look has asked what is cached.
//!
//! A slot is a hint. Nobody locks it; threads that share a descriptor may garble it, a number may come to mean another
//! file between two looks. Then a look comes early or late, or finds another file and begins anew.
//!
//! Advice (`posix_fadvise`) is kept here too, for the whole process: programs give it before their first device read, when
//! no runtime exists. It is kept with the file that the number meant then.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_plan::readahead::{BEGIN, CACHED_STEP, PATIENCE, STEP, STRIDE};
use spinio_sys::linux::{Advice, Fd, Stat};

use spinio_host::settings::{Cache, Settings};

/// Descriptors told apart; others share a slot, and only cost each other a look.
const SLOTS: usize = 256;

/// No read can begin there.
const NOWHERE: u64 = u64::MAX;

/// One descriptor.
#[repr(align(64))]
#[derive(Default)]
struct Slot {
    /// Its number, plus one.
    fd: AtomicU64,
    /// Where the next read of the stream begins.
    next: AtomicU64,
    /// Bytes until a look.
    left: AtomicU64,
    /// Storage serves it, which is slower than any thread: the longest request that the kernel's read-ahead serves best.
    /// 0 if it is cached, or nobody knows.
    cold: AtomicU64,
    /// The longest for which read-ahead is the faster way by cost, as far as anybody knows.
    bound: AtomicU64,
    /// How far the kernel may be led ahead, and its window; 0 if it is to be left alone.
    reach: AtomicU64,
    window: AtomicU64,
    /// Where it is led on again.
    lead: AtomicU64,
}

impl Slot {
    /// A stream begins, and has come to `at`.
    fn begin(&self, fd: Fd, left: u64, at: u64) {
        self.fd.store(fd as u64 + 1, Relaxed);
        self.left.store(left, Relaxed);
        self.cold.store(0, Relaxed);
        self.bound.store(u64::MAX, Relaxed);
        self.reach.store(0, Relaxed);
        self.lead.store(at.saturating_add(PATIENCE), Relaxed);
    }
}

/// The streams of a runtime.
pub struct Streams {
    slots: Box<[Slot]>,
    begin: u64,
}

impl Streams {
    pub fn new(settings: &Settings) -> Streams {
        // Who keeps everything needs nobody to look.
        let begin = if settings.cache == Cache::Keep { u64::MAX } else { BEGIN };
        Streams { slots: (0..SLOTS).map(|_| Slot::default()).collect(), begin }
    }

    fn slot(&self, fd: Fd) -> &Slot {
        &self.slots[fd as usize % SLOTS]
    }

    /// `got` bytes were read through the page cache; true when it is time for a look.
    #[inline]
    pub fn note(&self, fd: Fd, at: Option<u64>, got: usize) -> bool {
        let (slot, got) = (self.slot(fd), got as u64);
        let known = slot.fd.load(Relaxed) == fd as u64 + 1;
        // A read at the descriptor's own offset follows the last one, until a look says otherwise.
        let follows = known && at.is_none_or(|at| at == slot.next.load(Relaxed));
        let from = at.unwrap_or(if known { slot.next.load(Relaxed) } else { NOWHERE });
        let next = from.saturating_add(got);
        slot.next.store(next, Relaxed);
        if !follows {
            slot.begin(fd, self.begin, next);
            return false;
        }
        let left = slot.left.load(Relaxed);
        if left > got {
            slot.left.store(left - got, Relaxed);
            return false;
        }
        slot.left.store(STEP, Relaxed);
        true
    }

    /// Whether a read at `at` follows the last one of this descriptor, and that it goes to `end`.
    pub fn follows(&self, fd: Fd, at: u64, end: u64) -> bool {
        let slot = self.slot(fd);
        let follows = slot.fd.load(Relaxed) == fd as u64 + 1 && slot.next.load(Relaxed) == at;
        if !follows {
            slot.begin(fd, self.begin, end);
        }
        slot.next.store(end, Relaxed);
        follows
    }

    /// Bytes of a stream that `follows` has seen, through the page cache; true when it is time for a look.
    pub fn passed(&self, fd: Fd, got: u64) -> bool {
        let slot = self.slot(fd);
        let left = slot.left.load(Relaxed);
        slot.left.store(if left > got { left - got } else { STEP }, Relaxed);
        left <= got
    }

    /// A look has seen how soon the next one is needed, and so whether what lies ahead is cached. `most`: the longest
    /// request that read-ahead serves best if it is not.
    pub fn look_in(&self, fd: Fd, step: u64, most: u64) {
        let slot = self.slot(fd);
        slot.cold.store(if step < CACHED_STEP { most.min(slot.bound.load(Relaxed)) } else { 0 }, Relaxed);
        slot.reach.store(0, Relaxed);
        if step >= CACHED_STEP {
            slot.left.store(step, Relaxed);
        }
    }

    /// A look has seen where a cold stream stands, and that the kernel, which reads `window` bytes at a time, may be led on
    /// as far as `reach`.
    pub fn lead(&self, fd: Fd, at: u64, window: u64, reach: u64) {
        let slot = self.slot(fd);
        if slot.next.swap(at, Relaxed) != at {
            // It goes by the descriptor's own offset, which nobody knew, or which has been moved.
            slot.lead.store(at.saturating_add(PATIENCE), Relaxed);
        }
        slot.window.store(window, Relaxed);
        slot.reach.store(reach, Relaxed);
    }

    /// Where the stream stands, the kernel's window, and how far it may be led: if that is due now.
    #[inline]
    pub fn leads(&self, fd: Fd) -> Option<(u64, u64, u64)> {
        let slot = self.slot(fd);
        let reach = slot.reach.load(Relaxed);
        if reach == 0 || slot.fd.load(Relaxed) != fd as u64 + 1 {
            return None;
        }
        let at = slot.next.load(Relaxed);
        if at < slot.lead.load(Relaxed) || at >= reach || ADVICE[fd as usize % SLOTS].load(Relaxed) & KINDS == RANDOM {
            return None;
        }
        slot.lead.store(at + STRIDE, Relaxed);
        Some((at, slot.window.load(Relaxed), reach))
    }

    /// A request of the stream has asked what storage and page cache cost: `most` is the longest that read-ahead serves
    /// best.
    pub fn bound(&self, fd: Fd, most: u64) {
        let slot = self.slot(fd);
        slot.bound.store(most, Relaxed);
        slot.cold.fetch_min(most, Relaxed);
    }

    /// A request of the stream has found something absent.
    pub fn is_absent(&self, fd: Fd, most: u64) {
        self.slot(fd).cold.store(most, Relaxed);
    }

    /// Whether a read of `len` bytes belongs to a cold stream, and is one that the kernel's read-ahead serves best.
    pub fn trickles(&self, fd: Fd, at: Option<u64>, len: u64) -> bool {
        let slot = self.slot(fd);
        len <= slot.cold.load(Relaxed)
            && slot.fd.load(Relaxed) == fd as u64 + 1
            && at.is_none_or(|at| at == slot.next.load(Relaxed))
            && ADVICE[fd as usize % SLOTS].load(Relaxed) & KINDS != RANDOM
    }
}

/// What the program said of a descriptor: a mark of the file it meant, and what.
static ADVICE: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];

const KINDS: u64 = 3;
const RANDOM: u64 = 1;

fn mark(stat: &Stat) -> u64 {
    (stat.dev.rotate_left(32) ^ stat.ino).wrapping_mul(0x9e37_79b9_7f4a_7c15) & !KINDS
}

/// Remembers advice that holds from now on.
pub fn advised(fd: Fd, stat: &Stat, advice: Advice) {
    let kind = match advice {
        Advice::Normal => 0,
        Advice::Random => RANDOM,
        Advice::Sequential => 2,
        Advice::WillNeed | Advice::DontNeed => return,
    };
    ADVICE[fd as usize % SLOTS].store(mark(stat) | kind, Relaxed);
}

/// What was advised of the file that this number means now.
pub fn advice(fd: Fd, stat: &Stat) -> Advice {
    let word = ADVICE[fd as usize % SLOTS].load(Relaxed);
    match (word & !KINDS == mark(stat), word & KINDS) {
        (true, RANDOM) => Advice::Random,
        (true, 2) => Advice::Sequential,
        _ => Advice::Normal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> Streams {
        Streams::new(&Settings::default())
    }

    #[test]
    fn a_stream_is_looked_at_and_random_reads_are_not() {
        let streams = streams();
        let looks = |at: &mut dyn FnMut(u64) -> Option<u64>| {
            (0..1024u64).filter(|i| streams.note(5, at(*i), 4096)).count() as u64
        };
        let all = 1024 * 4096;
        let expected = 1 + (all - BEGIN - 4096) / STEP;
        assert_eq!(looks(&mut |i| Some(i * 4096)), expected);
        assert_eq!(looks(&mut |_| None), all / STEP, "it goes on where it was");
        assert_eq!(looks(&mut |i| Some(i * 7919 % 1000 * 4096)), 0);
        let kept = Streams::new(&Settings { cache: Cache::Keep, ..Settings::default() });
        assert!((0..1 << 12).all(|i| !kept.note(5, Some(i << 16), 1 << 16)));
    }

    #[test]
    fn numbers_that_share_a_slot_begin_anew() {
        let streams = streams();
        for i in 0..1000 {
            assert!(!streams.note(3, Some(i << 16), 1 << 16));
            assert!(!streams.note(3 + SLOTS as Fd, Some(i << 16), 1 << 16));
        }
    }

    #[test]
    fn large_reads_that_follow_each_other() {
        let streams = streams();
        assert!(!streams.follows(4, 0, 100));
        assert!(streams.follows(4, 100, 200));
        assert!(!streams.follows(4, 300, 400));
        assert!(!streams.note(4, Some(400), 10));
        assert!(streams.follows(4, 410, 500));
    }

    #[test]
    fn requests_of_a_cold_stream_trickle_as_long_as_they_follow() {
        let streams = streams();
        let most = 1 << 19;
        assert!(!streams.follows(6, 0, 100));
        assert!(!streams.trickles(6, Some(100), 10), "nobody knows what storage does");
        streams.is_absent(6, most);
        assert!(streams.trickles(6, Some(100), most) && streams.trickles(6, None, most));
        assert!(!streams.trickles(6, Some(100), most + 1) && !streams.trickles(6, Some(99), 10));
        assert!(!streams.trickles(6 + SLOTS as Fd, Some(100), 10));
        // Reads at the descriptor's own offset and others take turns.
        assert!(!streams.note(6, None, 20) && streams.trickles(6, Some(120), 10));
        streams.look_in(6, CACHED_STEP, most);
        assert!(!streams.trickles(6, Some(120), 10), "it is cached");
        streams.look_in(6, STEP, most);
        assert!(streams.trickles(6, Some(120), 10));
        assert!(!streams.note(6, Some(7), 20) && !streams.trickles(6, Some(27), 10), "it has jumped");
    }

    #[test]
    fn a_look_does_not_raise_what_costs_allow() {
        let streams = streams();
        assert!(!streams.follows(6, 0, 100));
        streams.look_in(6, STEP, 1 << 19);
        streams.bound(6, 1 << 17);
        assert!(streams.trickles(6, Some(100), 1 << 17) && !streams.trickles(6, Some(100), 1 << 18));
        streams.look_in(6, STEP, 1 << 19);
        assert!(streams.trickles(6, Some(100), 1 << 17) && !streams.trickles(6, Some(100), 1 << 18));
        assert!(!streams.follows(6, 7, 20), "it has jumped");
        streams.look_in(6, STEP, 1 << 19);
        assert!(streams.trickles(6, Some(20), 1 << 18), "and nothing is known of costs");
    }

    #[test]
    fn the_kernel_is_led_on_every_so_often_and_only_where_somebody_has_looked() {
        let streams = streams();
        let (window, block) = (128 << 10, 32 << 10);
        let led = |from: u64, to: u64| {
            let starts = (from..to).step_by(block as usize);
            starts.filter(|at| !streams.note(8, Some(*at), block as usize) && streams.leads(8).is_some()).count() as u64
        };
        let (at, reach) = (PATIENCE + STEP, PATIENCE + 2 * STEP);
        assert_eq!(led(0, at), 0, "nobody has looked");
        streams.look_in(8, STEP, 1 << 19);
        streams.lead(8, at, window, reach);
        assert_eq!(streams.leads(8), Some((at, window, reach)));
        assert_eq!(led(at, reach + STEP), STEP / STRIDE - 1, "as far as somebody has looked");
        let at = reach + STEP;
        streams.lead(8, at, window, u64::MAX);
        assert!(streams.leads(8).is_some());
        ADVICE[8].store(RANDOM, Relaxed);
        assert_eq!(led(at, at + STEP), 0, "the program says that it reads at random");
        ADVICE[8].store(0, Relaxed);
        assert!(led(at + STEP, at + 2 * STEP) > 0);
        let at = 1 << 30;
        assert_eq!(led(at, at + STEP), 0, "it has jumped");
        streams.lead(8, at + STEP, window, u64::MAX);
        assert_eq!(led(at + STEP, at + PATIENCE), 0, "and has not gone far since");
        assert!(led(at + PATIENCE, at + PATIENCE + STEP) > 0);
        streams.look_in(8, CACHED_STEP, 1 << 19);
        assert_eq!(led(at + PATIENCE + STEP, at + PATIENCE + 2 * STEP), 0, "it is cached");
    }

    #[test]
    fn a_stream_of_which_nobody_knows_where_it_began_is_led_from_the_look_on() {
        let streams = streams();
        assert!(!streams.note(9, None, 4096) && !streams.note(9, None, 4096));
        streams.look_in(9, STEP, 1 << 19);
        streams.lead(9, 1 << 30, 128 << 10, u64::MAX);
        let read = || {
            streams.note(9, None, 32 << 10);
            streams.leads(9)
        };
        let until_led = || (1u64..).find(|_| read().is_some()).unwrap() * (32 << 10);
        assert_eq!(until_led(), PATIENCE);
        assert_eq!(until_led(), STRIDE);
        // Somebody has moved the offset, and a look finds it elsewhere.
        streams.lead(9, 1 << 20, 128 << 10, u64::MAX);
        assert_eq!(until_led(), PATIENCE);
    }

    #[test]
    fn advice_is_for_the_file_that_was_meant() {
        let stat = |ino| Stat {
            dev: 7,
            ino,
            rdev: 0,
            size: 0,
            blocks: 0,
            uid: 0,
            nameless: false,
            mode: 0,
            mtime_ns: 0,
            ctime_ns: 0,
            kind: spinio_sys::linux::FileKind::Regular,
        };
        advised(200, &stat(1), Advice::Random);
        assert_eq!(advice(200, &stat(1)), Advice::Random);
        assert_eq!(advice(200, &stat(2)), Advice::Normal);
        advised(200, &stat(1), Advice::Sequential);
        assert_eq!(advice(200, &stat(1)), Advice::Sequential);
        advised(200, &stat(1), Advice::Normal);
        assert_eq!(advice(200, &stat(1)), Advice::Normal);
    }
}
