//! Which fragments are worth registering, and the order in which they are taken.
//!
//! ```text
//!   fragments   in the program's order
//!     │ collect_stats   how many of each file and device, how many bytes, how far apart
//!     │ DensityStats    register them, copy them, or both? (plan/src/batch_cost.rs)
//!     ▼ partition
//!   [register, part 0] [part 1] ... [hybrid, part 0] [part 1] ...   [the rest]
//!                                   └ caller_only: fragments before this one are never copied
//! ```
//!
//! Within a part fragments are in any order. A large number of fragments is distributed by all threads, into a new
//! vector: every chunk counts how many of its fragments go to each part, and so knows the slots that only it writes.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::Device;
use spinio_plan::{BatchStrategy, DensityStats, Reason};
use spinio_sys::linux::PAGE;

use crate::batch_readers::BatchReaders;
use crate::ctx::BatchCtx;
use crate::state::{BatchState, Fragment, HOST_SINK};
use spinio_host::lock;
use spinio_host::parallel::{self, UninitSlots};

/// The most bytes of a part: 0.35 ms of the driver's lock, half a millisecond while others copy. In that time a reader
/// fills half a buffer, or a whole one if operations are long; it has one in reserve.
const MAX_PART: u64 = 16 << 20;

/// Fragments in the order of work; those that are worth registering come first.
#[derive(Default)]
pub(crate) struct Partitions {
    /// Where each part ends.
    pub(crate) ends: Vec<usize>,
    /// Fragments that only the caller takes.
    pub(crate) caller_only: usize,
}

impl Partitions {
    /// Whether nothing is to be registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// Fragments of one file that go to one device.
struct GroupStats {
    density: DensityStats,
    first: u64,
    end: u64,
}

impl GroupStats {
    /// Adds `ops` fragments with `bytes` bytes between `first` and `end`.
    fn add(&mut self, ops: usize, (bytes, first, end): (u64, u64, u64)) {
        self.density.ops += ops as u64;
        self.density.bytes += bytes;
        self.first = self.first.min(first);
        self.end = self.end.max(end);
    }
}

/// Buckets of a group.
#[derive(Clone, Copy)]
struct Buckets {
    /// The first part's.
    first_bucket: usize,
    first: u64,
    shift: u32,
}

/// Bytes of a part, as a power of two.
fn part_shift(device: &dyn Device) -> u32 {
    MAX_PART.min(device.capabilities().max_pin).max(PAGE as u64).ilog2()
}

/// Sorts the fragments into the order in which they are taken.
pub(crate) fn partition(work: &BatchState, items: &mut Vec<Fragment>) -> Partitions {
    // The number of threads does not matter here: the choice below includes it.
    if matches!(work.ctx.reader.policy.may_register(0), Err(reason) if reason != Reason::ManyThreads) {
        return Partitions::default();
    }
    let sink_count = work.sinks.len();
    let group_of = |item: &Fragment| item.source as usize * sink_count + item.sink as usize;
    let stats = collect_stats(work, items, group_of);
    let mut buckets: Vec<Option<Buckets>> = vec![None; stats.len()];
    let (mut used, mut floor) = (0, 0);
    for strategy in [BatchStrategy::Register, BatchStrategy::Hybrid] {
        for (which, stats) in stats.iter().enumerate() {
            if stats.density.ops == 0 || !may_register(work, which, sink_count) || stats.density.strategy() != strategy
            {
                continue;
            }
            let shift = part_shift(work.sinks[which % sink_count].device);
            let (first, last) = (stats.first >> shift, (stats.end - 1) >> shift);
            buckets[which] = Some(Buckets { first_bucket: used, first, shift });
            used += (last - first) as usize + 1;
            if strategy == BatchStrategy::Register {
                floor += stats.density.ops as usize;
            }
        }
    }
    if used == 0 {
        return Partitions::default();
    }
    let bucket = |item: &Fragment| match buckets.get(group_of(item)) {
        Some(Some(b)) if item.sink != HOST_SINK => b.first_bucket + ((item.offset >> b.shift) - b.first) as usize,
        _ => used,
    };
    let parallel = items.len() >= parallel::SHARE_MIN && parallel::chunk_count(items.len()) * (used + 1) <= items.len();
    let mut ends = match parallel {
        true => partition_parallel(&work.ctx, items, used + 1, bucket),
        false => partition_in_place(items, used + 1, bucket),
    };
    ends.pop();
    ends.dedup();
    ends.retain(|&end| end > 0);
    Partitions { ends, caller_only: floor }
}

/// Statistics of each file and device.
fn collect_stats(work: &BatchState, items: &[Fragment], group_of: impl Fn(&Fragment) -> usize) -> Vec<GroupStats> {
    let threads = work.ctx.reader.files.workers().batch_threads();
    // Readers serve one device, and only they do not use the driver meanwhile.
    let single_sink = work.uniform || items.iter().all(|i| i.sink == items[0].sink);
    let (threads, readers) = (threads as u64, if single_sink { BatchReaders::max_readers(threads) as u64 } else { 0 });
    let mut all = Vec::with_capacity(work.sources.len() * work.sinks.len());
    for _ in &work.sources {
        for outlet in &work.sinks {
            let density = DensityStats {
                ops: 0,
                bytes: 0,
                span: 0,
                chunk: 1 << part_shift(outlet.device),
                threads,
                concurrent_threads: readers,
            };
            all.push(GroupStats { density, first: u64::MAX, end: 0 });
        }
    }
    if let Some(first) = items.first().filter(|i| work.uniform && i.sink != HOST_SINK) {
        let stats = Mutex::new(&mut all[group_of(first)]);
        parallel::share(
            || work.ctx.reader.files.workers().batch_readers(),
            BatchReaders::max_readers(work.ctx.reader.files.workers().batch_threads()),
            items.len(),
            |chunk| {
                let some = &items[parallel::chunk_range(chunk, items.len())];
                let of = some.iter().fold((0, u64::MAX, 0), |(bytes, first, end), i| {
                    let len = u64::from(i.len);
                    (bytes + len, u64::min(first, i.offset), u64::max(end, i.offset + len))
                });
                lock(&stats).add(some.len(), of);
            },
        );
    } else {
        for item in items.iter().filter(|i| i.sink != HOST_SINK) {
            let len = u64::from(item.len);
            all[group_of(item)].add(1, (len, item.offset, item.offset + len));
        }
    }
    for stats in &mut all {
        stats.density.span = stats.end.saturating_sub(stats.first);
    }
    all
}

/// Whether pages of a file can be registered with a device.
fn may_register(work: &BatchState, group: usize, sink_count: usize) -> bool {
    let (file, to) = (&work.sources[group / sink_count].file, &work.sinks[group % sink_count]);
    to.gathers() && to.device.capabilities().can_pin && file.is_mappable() && !file.pin_refused.load(Relaxed)
}

/// Moves fragments into their buckets, in place; the end of each bucket. Within one they are in any order.
fn partition_in_place<T>(items: &mut [T], buckets: usize, bucket: impl Fn(&T) -> usize) -> Vec<usize> {
    let mut ends = vec![0; buckets];
    items.iter().for_each(|item| ends[bucket(item)] += 1);
    let mut next = Vec::with_capacity(buckets);
    let mut before = 0;
    for end in &mut ends {
        next.push(before);
        before += *end;
        *end = before;
    }
    for here in 0..buckets {
        while next[here] < ends[here] {
            let to = bucket(&items[next[here]]);
            if to != here {
                items.swap(next[here], next[to]);
            }
            next[to] += 1;
        }
    }
    ends
}

/// The same by all threads, into a new vector: every chunk of the fragments has its slots in every bucket.
fn partition_parallel<T: Copy + Send + Sync + 'static>(
    ctx: &BatchCtx,
    items: &mut Vec<T>,
    buckets: usize,
    bucket: impl Fn(&T) -> usize + Sync,
) -> Vec<usize> {
    let (n, chunks) = (items.len(), parallel::chunk_count(items.len()));
    // How many fragments of each chunk go to each bucket, and then the slot of the next one.
    let counts: Vec<Mutex<Vec<usize>>> = (0..chunks).map(|_| Mutex::default()).collect();
    parallel::share(
        || ctx.reader.files.workers().batch_readers(),
        BatchReaders::max_readers(ctx.reader.files.workers().batch_threads()),
        n,
        |chunk| {
            let mut count = vec![0; buckets];
            items[parallel::chunk_range(chunk, n)].iter().for_each(|item| count[bucket(item)] += 1);
            *lock(&counts[chunk]) = count;
        },
    );
    let mut places: Vec<Vec<usize>> = counts.iter().map(|count| std::mem::take(&mut *lock(count))).collect();
    let mut ends = Vec::with_capacity(buckets);
    let mut end = 0;
    for bucket in 0..buckets {
        for place in &mut places {
            end += std::mem::replace(&mut place[bucket], end);
        }
        ends.push(end);
    }
    let places: Vec<Mutex<Vec<usize>>> = places.into_iter().map(Mutex::new).collect();
    let mut output = Vec::with_capacity(n);
    let slots = UninitSlots::spare_of(&mut output);
    parallel::share(
        || ctx.reader.files.workers().batch_readers(),
        BatchReaders::max_readers(ctx.reader.files.workers().batch_threads()),
        n,
        |chunk| {
            let mut next = lock(&places[chunk]);
            for item in &items[parallel::chunk_range(chunk, n)] {
                let place = &mut next[bucket(item)];
                // SAFETY: only this chunk writes its slots in a bucket, as many as it counted; the vector is not used
                // meanwhile.
                unsafe { slots.write(*place, *item) };
                *place += 1;
            }
        },
    );
    // SAFETY: every fragment has filled one of as many places.
    unsafe { output.set_len(n) };
    let old = std::mem::replace(items, output);
    // The Linux kernel needs two milliseconds to free this much memory: the readers are waiting.
    if let Some(workers) = ctx.reader.files.workers().batch_copy() {
        workers.spawn_detached(move || drop(old));
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use spinio_io::{Runtime, Settings};

    #[test]
    fn every_item_lands_in_its_bucket() {
        let runtime = Runtime::new(Settings { batch_threads: 4, ..Settings::default() });
        let ctx = BatchCtx::of(&runtime);
        let single: &dyn Fn(&mut Vec<usize>, usize) -> Vec<usize> = &|items, n| partition_in_place(items, n, |i| i % n);
        let all: &dyn Fn(&mut Vec<usize>, usize) -> Vec<usize> =
            &|items, n| partition_parallel(&ctx, items, n, |i| i % n);
        let few = [(0usize, 1usize), (1, 3), (1000, 1), (1000, 7), (5, 100)].map(|(n, buckets)| (n, buckets, single));
        let many = [(0, 1), (parallel::SHARE_MIN, 7), (10 * parallel::SHARE_MIN + 5, 100)]
            .map(|(n, buckets)| (n, buckets, all));
        for (n, buckets, distribute) in few.into_iter().chain(many) {
            let mut items: Vec<usize> = (0..n).map(|i| i * 7919 % 10_007).collect();
            let mut expected = items.clone();
            let ends = distribute(&mut items, buckets);
            let mut start = 0;
            for (bucket, &end) in ends.iter().enumerate() {
                assert!(items[start..end].iter().all(|i| i % buckets == bucket));
                start = end;
            }
            assert_eq!(start, n);
            items.sort_unstable();
            expected.sort_unstable();
            assert_eq!(items, expected);
        }
    }
}
