//! Runs of one setting with one method: prepare the cache, let all threads start at once, count bytes and time.
//!
//! ```text
//!   for each run:  evict ─> fetch the cached share ─> threads ready ─┬─> read, read ... ─> wait
//!                                                                    └─ clock: from here to the last thread's end
//! ```
//!
//! A run ends when every thread has read its part, or after the time limit: what was read by then counts.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::experiment::{Pattern, Setting};
use super::method::{Method, Reader};
use crate::device::DeviceName;
use crate::random::SplitMix64;
use crate::test_file::TestFile;

/// How a setting is measured.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Runs that count; one more precedes them.
    pub runs: usize,
    /// The time after which a run ends.
    pub limit: Duration,
    /// Threads.
    pub threads: usize,
    /// The most blocks per thread; 0: its file.
    pub reads: u64,
    /// Their offsets.
    pub pattern: Pattern,
}

/// GB/s of each run that counts.
pub struct Runs(pub Vec<f64>);

impl Runs {
    /// Mean.
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }

    /// Standard deviation.
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        (self.0.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / self.0.len().max(1) as f64).sqrt()
    }
}

/// All runs of a setting with a method. `files`: one per thread, or one for all.
pub fn run_all(
    method: Method,
    setting: &Setting,
    effort: &RunOptions,
    files: &[TestFile],
    device: DeviceName,
    mut done: impl FnMut(),
) -> anyhow::Result<Runs> {
    let mut out = Vec::new();
    for run in 0..=effort.runs {
        prepare(files, setting.cached)?;
        let rate = run_once(method, setting, effort, files, device, run as u64)?;
        // The first run warms up.
        if run > 0 {
            out.push(rate);
        }
        done();
    }
    Ok(Runs(out))
}

/// Leaves the wanted share in the page cache, from the start of each file.
fn prepare(files: &[TestFile], share: f64) -> anyhow::Result<()> {
    for file in files {
        let cached = (file.size as f64 * share) as u64 / 4096 * 4096;
        if cached < file.size {
            file.evict(cached, file.size - cached);
        }
        if cached > 0 {
            file.read_range_into_cache(0, cached)?;
        }
    }
    Ok(())
}

fn run_once(
    method: Method,
    setting: &Setting,
    effort: &RunOptions,
    files: &[TestFile],
    device: DeviceName,
    run: u64,
) -> anyhow::Result<f64> {
    let (ready, bytes, longest) = (Barrier::new(effort.threads), AtomicU64::new(0), AtomicU64::new(0));
    let work = |thread: usize| -> anyhow::Result<()> {
        let subject = &files[thread % files.len()];
        // Threads that share a file begin at different offsets of it.
        let blocks = subject.size / setting.block;
        let (first, count) = match files.len() < effort.threads {
            true => (thread as u64 * blocks / effort.threads as u64, (blocks / effort.threads as u64).max(1)),
            false => (0, blocks),
        };
        let reader = Reader::new(method, subject, device, setting.block);
        let wanted = if effort.reads == 0 { count } else { effort.reads.min(count) };
        let order = match effort.pattern {
            Pattern::Sequential => Vec::new(),
            Pattern::Random => sample_distinct(count, wanted, &mut SplitMix64::new(run, thread as u64)),
        };
        ready.wait();
        let begun = Instant::now();
        let mut reader = reader?;
        let mut read = 0;
        for i in 0..wanted {
            let block = first + order.get(i as usize).map_or(i, |b| u64::from(*b));
            let got = reader.read(block * setting.block, setting.block as usize)?;
            if got == 0 {
                break;
            }
            read += got as u64;
            if begun.elapsed() > effort.limit {
                break;
            }
        }
        reader.synchronize()?;
        longest.fetch_max(begun.elapsed().as_nanos() as u64, Relaxed);
        bytes.fetch_add(read, Relaxed);
        Ok(())
    };
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..effort.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| anyhow::bail!("A reading thread panicked")))
    })?;
    // Bytes per nanosecond are GB/s.
    Ok(bytes.into_inner() as f64 / longest.into_inner().max(1) as f64)
}

/// `wanted` different numbers below `all`, in random order. Never the same block twice: the paper's files were so large
/// that this was practically certain, and a second read would find the first one's bytes cached.
fn sample_distinct(all: u64, wanted: u64, random: &mut SplitMix64) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..all.min(u64::from(u32::MAX)) as u32).collect();
    let wanted = (wanted as usize).min(numbers.len());
    for i in 0..wanted {
        let other = i + random.below((numbers.len() - i) as u64) as usize;
        numbers.swap(i, other);
    }
    numbers.truncate(wanted);
    numbers
}

#[cfg(test)]
mod tests {
    use super::{Runs, SplitMix64, sample_distinct};

    #[test]
    fn random_blocks_are_distinct_and_in_range() {
        let mut some = sample_distinct(1000, 300, &mut SplitMix64::new(1, 1));
        assert_eq!(some.len(), 300);
        some.sort_unstable();
        some.dedup();
        assert!(some.len() == 300 && some[299] < 1000);
        assert_eq!(sample_distinct(5, 99, &mut SplitMix64::new(1, 1)).len(), 5);
    }

    #[test]
    fn mean_and_deviation() {
        let runs = Runs(vec![1.0, 3.0]);
        assert_eq!((runs.mean(), runs.deviation()), (2.0, 1.0));
        assert_eq!(Runs(vec![]).mean(), 0.0);
    }
}
