//! How many threads copy for one request, the caller included.
//!
//! ```text
//!   short requests      few: a quarter of the processors, 2 to 4
//!   long requests       most ──the device is often waited for──> fewer ──> least (8)     where processors are free
//!                            <──it is hardly waited for────────
//!                       few, for a while, when the threads were kept off the processor (processors.rs)
//! ```
//!
//! What one thread copies differs between machines and from hour to hour. On one H200 machine 8 threads fill the link of
//! 55 GB/s to 50. On others they fill it to 30 to 46, where 12 reach 43 to 50 at 0.25 processor seconds a GB instead of
//! 0.17 to 0.26, and 16 no more at 0.35. So long requests begin with many threads, and these report: the part of its time
//! that a thread waits for the device is near 0 while all of them are of use, and grows when the link is full. While they wait
//! they nap (io/src/read/engine/cache.rs): 0.19 processor seconds a GB instead of 0.24 (benches/runs/2026-11-28-h200-naps).
//!
//! Known flaws:
//! - Other programs that use the link make threads wait, and fewer copy.
//! - Where the memory is what is full, and not the link, more threads cost processor time and gain nothing; `most` bounds
//!   that.

use std::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Relaxed},
};
use std::time::Duration;

use crate::processors::ProcessorWatch;
use crate::settings::{CpuUse, Settings};

/// Threads that copy for one long request, where processors are free, at least: faster than pages can be registered. On
/// the best H200 machine, 2 GiB a request: 27 GB/s with 4 threads, 50 with 8, 51 with 12; registering 20 to 43.
const LEAST: usize = 8;

/// And at most, on any number of processors.
const MOST: usize = 16;

/// Bytes of a long request. There, 8 threads copy 16 MiB at 23 GB/s and 64 MiB at 36; registering 16 MiB gives 21 GB/s
/// at a quarter of the processor time.
const LONG_REQUEST: u64 = 64 << 20;

/// Bytes of a long request for each thread beyond the least: at 64 MiB 12 copy no faster than 8, at half as much again of
/// processor time.
const BYTES_A_THREAD: u64 = 16 << 20;

/// Processors from which on so many threads copy: half as many again, so that the program has some left.
const MIN_PROCESSORS: usize = 12;

/// Time of threads, all together, after which their number is reconsidered: 4 ms of 8 threads.
const PERIOD: Duration = Duration::from_millis(32);

/// The part of their time that threads wait for the device: below the first, more of them copy; above the second, fewer.
const WAITING: (f64, f64) = (0.1, 0.3);

/// What a thread of a long request did since it reported last.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopySample {
    /// Time in which it copied cached bytes.
    pub copying: Duration,
    /// Time in which it waited for the device to take what it had copied.
    pub waiting: Duration,
}

impl CopySample {
    /// Less than this is not worth a report.
    const MIN: Duration = Duration::from_millis(2);

    /// Whether it is long enough for a report.
    pub fn is_enough(&self) -> bool {
        self.copying + self.waiting >= CopySample::MIN
    }
}

/// The numbers of threads of a runtime, and what its copying threads have reported.
#[derive(Debug)]
pub struct CopyThreads {
    few: usize,
    least: usize,
    most: usize,
    /// Of long requests now: `least` to `most`.
    now: AtomicUsize,
    /// Nanoseconds of this period.
    copying: AtomicU64,
    waiting: AtomicU64,
    processors: ProcessorWatch,
}

impl CopyThreads {
    /// On so many processors that the process may use.
    pub fn new(settings: &Settings, processors: usize) -> CopyThreads {
        let few = if settings.threads == 0 { (processors / 4).clamp(2, 4) } else { settings.threads };
        let many = settings.threads == 0 && settings.cpu == CpuUse::Auto && processors >= MIN_PROCESSORS;
        let (least, most) = if many { (LEAST, (processors * 3 / 4).clamp(LEAST, MOST)) } else { (few, few) };
        CopyThreads {
            few,
            least,
            most,
            now: AtomicUsize::new(most),
            copying: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            processors: ProcessorWatch::default(),
        }
    }

    /// For a short request.
    pub fn few(&self) -> usize {
        self.few
    }

    /// For any request at any time.
    pub fn most(&self) -> usize {
        self.most
    }

    /// For a request of `len` bytes, now.
    pub fn for_request(&self, len: u64) -> usize {
        if len < LONG_REQUEST || self.processors.is_crowded() {
            return self.few;
        }
        self.now.load(Relaxed).min(self.least.max((len / BYTES_A_THREAD) as usize))
    }

    /// Whether the threads that copy get the processors that they need.
    pub fn processors(&self) -> &ProcessorWatch {
        &self.processors
    }

    /// What a thread of a long request did; true if more threads should copy than before.
    pub fn record(&self, sample: CopySample) -> bool {
        // A thread that copied nothing cached waited for another reason.
        if self.most == self.least || sample.copying.is_zero() {
            return false;
        }
        let add = |sum: &AtomicU64, time: Duration| {
            let time = time.as_nanos() as u64;
            sum.fetch_add(time, AcqRel) + time
        };
        let (copying, waiting) = (add(&self.copying, sample.copying), add(&self.waiting, sample.waiting));
        if Duration::from_nanos(copying + waiting) < PERIOD {
            return false;
        }
        // One thread ends the period; what others add meanwhile counts for the next one.
        if self.copying.compare_exchange(copying, 0, AcqRel, Relaxed).is_err() {
            return false;
        }
        self.waiting.fetch_sub(waiting, AcqRel);
        let part = waiting as f64 / (copying + waiting) as f64;
        let now = self.now.load(Relaxed);
        let next = match part {
            _ if part < WAITING.0 => self.most.min(now + 1),
            _ if part > WAITING.1 => self.least.max(now - 1),
            _ => now,
        };
        self.now.store(next, Relaxed);
        next > now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn sample(copying: u64, waiting: u64) -> CopySample {
        CopySample { copying: ms(copying), waiting: ms(waiting) }
    }

    #[test]
    fn many_threads_copy_only_where_processors_are_free_and_none_were_chosen() {
        let with = |threads, cpu, processors| {
            let copy = CopyThreads::new(&Settings { threads, cpu, ..Settings::default() }, processors);
            (copy.few, copy.for_request(LONG_REQUEST), copy.for_request(1 << 30), copy.most)
        };
        assert_eq!(with(0, CpuUse::Auto, 16), (4, 8, 12, 12));
        assert_eq!(with(0, CpuUse::Auto, 12), (3, 8, 9, 9));
        assert_eq!(with(0, CpuUse::Auto, 128), (4, 8, 16, 16));
        assert_eq!(with(0, CpuUse::Auto, 11), (2, 2, 2, 2));
        assert_eq!(with(0, CpuUse::Low, 16), (4, 4, 4, 4));
        assert_eq!(with(5, CpuUse::Auto, 16), (5, 5, 5, 5));
    }

    #[test]
    fn fewer_threads_copy_while_they_often_wait_for_the_device() {
        let copy = CopyThreads::new(&Settings::default(), 16);
        assert!(!copy.record(sample(0, 100)), "copied nothing");
        assert!(!copy.record(sample(1, 30)), "too short a time");
        assert_eq!(copy.for_request(1 << 30), 12);
        copy.record(sample(1, 0));
        assert_eq!((copy.for_request(1 << 30), copy.for_request(LONG_REQUEST - 1)), (11, 4));
        for _ in 0..8 {
            assert!(!copy.record(sample(10, 22)));
        }
        assert_eq!(copy.for_request(1 << 30), 8, "at least");
        assert!(!copy.record(sample(25, 7)) && !copy.record(sample(28, 4)));
        assert_eq!(copy.for_request(1 << 30), 8, "waiting for some of the time, neither more nor fewer");
        for more in 9..=12 {
            assert!(copy.record(sample(30, 2)));
            assert_eq!(copy.for_request(1 << 30), more);
        }
        assert!(!copy.record(sample(32, 0)), "at most");
    }

    #[test]
    fn crowded_processors_leave_long_requests_to_few_threads() {
        let copy = CopyThreads::new(&Settings::default(), 16);
        copy.processors().record(ms(100), ms(50));
        assert_eq!(copy.for_request(1 << 30), 4);
    }
}
