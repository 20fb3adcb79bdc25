//! Runs of one setting with one method: prepare the cache, let all threads start at once, count bytes and time.
//!
//! ```text
//!   for each run:  evict ─> fetch the cached share ─> threads ready ─┬─> read, read ... ─> wait
//!                                                                    └─ clock: from here to the last thread's end
//! ```
//!
//! The methods take turns, another one first in each run: what the machine does meanwhile, and what a disk's own cache
//! has of the run before, is shared by all of them. Each reads random blocks of its own.
//!
//! A run ends when every thread has read its part, or after the time limit: what was read by then counts.

use std::collections::HashSet;
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

/// Blocks of a file that each thread reads at most; `files`: one per thread, or one for all.
pub fn blocks_per_thread(files: &[TestFile], block: u64, threads: usize) -> u64 {
    let blocks = files[0].size / block;
    if files.len() < threads { blocks / threads as u64 } else { blocks }
}

/// All runs of a setting with these methods. `files`: one per thread, or one for all.
pub fn run_all(
    methods: &[Method],
    setting: &Setting,
    effort: &RunOptions,
    files: &[TestFile],
    device: DeviceName,
    mut done: impl FnMut(),
) -> Vec<(Method, anyhow::Result<Runs>)> {
    take_turns(methods, effort.runs, |method, run| {
        let rate =
            prepare(files, setting.cached).and_then(|()| run_once(method, setting, effort, files, device, run as u64));
        done();
        rate
    })
}

/// Calls `run_once` for every method and run, another method first each time. A method that fails has no further runs.
fn take_turns(
    methods: &[Method],
    runs: usize,
    mut run_once: impl FnMut(Method, usize) -> anyhow::Result<f64>,
) -> Vec<(Method, anyhow::Result<Runs>)> {
    let mut all: Vec<_> = methods.iter().map(|method| (*method, Ok(Runs(Vec::new())))).collect();
    let count = all.len();
    for run in 0..=runs {
        for turn in 0..count {
            let (method, result) = &mut all[(run + turn) % count];
            let Ok(Runs(rates)) = result else { continue };
            match run_once(*method, run) {
                // The first run warms up.
                Ok(_) if run == 0 => {}
                Ok(rate) => rates.push(rate),
                Err(error) => *result = Err(error),
            }
        }
    }
    all
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
    // Blocks that another method has just read may be in the disk's own cache.
    let seed = run << 8 | method as u64;
    let (ready, bytes, longest) = (Barrier::new(effort.threads), AtomicU64::new(0), AtomicU64::new(0));
    let work = |thread: usize| -> anyhow::Result<()> {
        let subject = &files[thread % files.len()];
        // Threads that share a file begin at different offsets of it.
        let count = blocks_per_thread(files, setting.block, effort.threads);
        let first = if files.len() < effort.threads { thread as u64 * count } else { 0 };
        let reader = Reader::new(method, subject, device, setting.block);
        let wanted = if effort.reads == 0 { count } else { effort.reads.min(count) };
        let order = match effort.pattern {
            Pattern::Sequential => Vec::new(),
            Pattern::Random => sample_distinct(count, wanted, &mut SplitMix64::new(seed, thread as u64)),
        };
        ready.wait();
        let begun = Instant::now();
        let mut reader = reader?;
        let mut read = 0;
        for i in 0..wanted {
            let block = first + order.get(i as usize).copied().unwrap_or(i);
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
fn sample_distinct(all: u64, wanted: u64, random: &mut SplitMix64) -> Vec<u64> {
    let wanted = wanted.min(all);
    // Of a block device there may be 10^9 and more: they are not listed if few of them are wanted, and then few are drawn
    // twice.
    if wanted < all / 8 {
        let mut seen = HashSet::new();
        return std::iter::repeat_with(|| random.below(all))
            .filter(|n| seen.insert(*n))
            .take(wanted as usize)
            .collect();
    }
    let mut numbers: Vec<u64> = (0..all).collect();
    let wanted = wanted as usize;
    for i in 0..wanted {
        let other = i + random.below((numbers.len() - i) as u64) as usize;
        numbers.swap(i, other);
    }
    numbers.truncate(wanted);
    numbers
}

#[cfg(test)]
mod tests {
    use super::{Method, Runs, SplitMix64, sample_distinct, take_turns};

    #[test]
    fn random_blocks_are_distinct_and_in_range() {
        let mut some = sample_distinct(1000, 300, &mut SplitMix64::new(1, 1));
        assert_eq!(some.len(), 300);
        some.sort_unstable();
        some.dedup();
        assert!(some.len() == 300 && some[299] < 1000);
        assert_eq!(sample_distinct(5, 99, &mut SplitMix64::new(1, 1)).len(), 5);
        // Of a disk of 2 PiB in blocks of 512 B.
        let mut few = sample_distinct(1 << 42, 20_000, &mut SplitMix64::new(1, 1));
        few.sort_unstable();
        few.dedup();
        assert!(few.len() == 20_000 && few[10_000] > 1 << 40 && few[19_999] < 1 << 42);
    }

    #[test]
    fn methods_take_turns_and_another_one_is_first_in_each_run() {
        let methods = [Method::PreadCopy, Method::P2p, Method::Spin];
        let mut order = Vec::new();
        let all = take_turns(&methods, 3, |method, run| {
            order.push((run, method));
            anyhow::ensure!(method != Method::P2p || run < 2, "it fails");
            Ok(run as f64)
        });
        let first: Vec<_> = (0..4).map(|run| order.iter().find(|(of, _)| *of == run).unwrap().1).collect();
        assert_eq!(first, [Method::PreadCopy, Method::P2p, Method::Spin, Method::PreadCopy]);
        assert_eq!(order.len(), 4 + 3 + 4, "{order:?}");
        assert_eq!(all.iter().map(|(method, _)| *method).collect::<Vec<_>>(), methods);
        assert!(all[1].1.is_err() && all[2].1.as_ref().is_ok_and(|runs| runs.0 == [1.0, 2.0, 3.0]));
    }

    #[test]
    fn mean_and_deviation() {
        let runs = Runs(vec![1.0, 3.0]);
        assert_eq!((runs.mean(), runs.deviation()), (2.0, 1.0));
        assert_eq!(Runs(vec![]).mean(), 0.0);
    }
}
