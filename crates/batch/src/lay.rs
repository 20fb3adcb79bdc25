//! Which pieces are worth registering, and the order in which they are taken.
//!
//! ```text
//!   items   as the program has them
//!     │ look        how many of each file and device, how many bytes, how far apart
//!     │ Crowd       register them, copy them, or both? (plan/src/gathering.rs)
//!     ▼ distribute
//!   [register, part 0] [part 1] ... [both, part 0] [part 1] ...   [the rest]
//!                             floor ┘
//! ```
//!
//! Within a part items lie in any order. Very many are distributed by all threads, into a vector of their own: every chunk
//! counts how many of its items go to each part, and so knows places that are its alone.

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use spinio_device::Device;
use spinio_plan::{Crowd, Means, Reason};
use spinio_sys::linux::PAGE;

use crate::readers::Readers;
use spinio_host::parallel::{self, Room};
use crate::work::{HOST, Item, Work};
use crate::ctx::BatchCtx;
use spinio_host::lock;

/// Bytes of a part at most: 0.35 ms of the driver's lock, half a millisecond beside threads that copy. In that time a
/// reader fills half a page, or a whole one where pieces are long; it has one in reserve.
const PART: u64 = 16 << 20;

/// Where items lie that are worth registering: in front of the others.
#[derive(Default)]
pub(crate) struct Parts {
    /// Where each part ends.
    pub(crate) ends: Vec<usize>,
    /// Items that only the caller takes.
    pub(crate) floor: usize,
}

impl Parts {
    /// Whether nothing is to be registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// Items of one file that go to one device.
struct Seen {
    crowd: Crowd,
    first: u64,
    end: u64,
}

impl Seen {
    /// So many more, of so many bytes, between a first one and an end.
    fn add(&mut self, pieces: usize, (bytes, first, end): (u64, u64, u64)) {
        self.crowd.pieces += pieces as u64;
        self.crowd.bytes += bytes;
        self.first = self.first.min(first);
        self.end = self.end.max(end);
    }
}

/// Where the items of a crowd go.
#[derive(Clone, Copy)]
struct Buckets {
    /// The first part's.
    at: usize,
    first: u64,
    shift: u32,
}

/// Bytes of a part, as a power of two.
fn shift(device: &dyn Device) -> u32 {
    PART.min(device.abilities().max_pin).max(PAGE as u64).ilog2()
}

/// Brings the items into the order in which they are taken.
pub(crate) fn lay(work: &Work, items: &mut Vec<Item>) -> Parts {
    // Many threads are no reason here: the choice below counts them.
    if matches!(work.ctx.reader.policy.may_register(), Err(reason) if reason != Reason::ManyThreads) {
        return Parts::default();
    }
    let wide = work.outlets.len();
    let crowd_of = |item: &Item| item.source as usize * wide + item.outlet as usize;
    let seen = look(work, items, crowd_of);
    let mut buckets: Vec<Option<Buckets>> = vec![None; seen.len()];
    let (mut used, mut floor) = (0, 0);
    for means in [Means::Register, Means::Both] {
        for (which, seen) in seen.iter().enumerate() {
            if seen.crowd.pieces == 0 || !may_register(work, which, wide) || seen.crowd.means() != means {
                continue;
            }
            let shift = shift(work.outlets[which % wide].device);
            let (first, last) = (seen.first >> shift, (seen.end - 1) >> shift);
            buckets[which] = Some(Buckets { at: used, first, shift });
            used += (last - first) as usize + 1;
            if means == Means::Register {
                floor += seen.crowd.pieces as usize;
            }
        }
    }
    if used == 0 {
        return Parts::default();
    }
    let bucket = |item: &Item| match buckets.get(crowd_of(item)) {
        Some(Some(b)) if item.outlet != HOST => b.at + ((item.offset >> b.shift) - b.first) as usize,
        _ => used,
    };
    let shared = items.len() >= parallel::MANY && parallel::chunks(items.len()) * (used + 1) <= items.len();
    let mut ends = match shared {
        true => distribute_shared(&work.ctx, items, used + 1, bucket),
        false => distribute(items, used + 1, bucket),
    };
    ends.pop();
    ends.dedup();
    ends.retain(|&end| end > 0);
    Parts { ends, floor }
}

/// What there is of each file and device.
fn look(work: &Work, items: &[Item], crowd_of: impl Fn(&Item) -> usize) -> Vec<Seen> {
    let threads = work.ctx.reader.files.workers().batch_threads();
    // Readers know one device, and only they leave the driver alone meanwhile.
    let one = work.alike || items.iter().all(|i| i.outlet == items[0].outlet);
    let (threads, beside) = (threads as u64, if one { Readers::most(threads) as u64 } else { 0 });
    let mut all = Vec::with_capacity(work.sources.len() * work.outlets.len());
    for _ in &work.sources {
        for outlet in &work.outlets {
            let crowd = Crowd { pieces: 0, bytes: 0, span: 0, part: 1 << shift(outlet.device), threads, beside };
            all.push(Seen { crowd, first: u64::MAX, end: 0 });
        }
    }
    if let Some(first) = items.first().filter(|i| work.alike && i.outlet != HOST) {
        let seen = Mutex::new(&mut all[crowd_of(first)]);
        parallel::share(|| work.ctx.reader.files.workers().batch_readers(), Readers::most(work.ctx.reader.files.workers().batch_threads()), items.len(), |chunk| {
            let some = &items[parallel::chunk(chunk, items.len())];
            let of = some.iter().fold((0, u64::MAX, 0), |(bytes, first, end), i| {
                let len = u64::from(i.len);
                (bytes + len, u64::min(first, i.offset), u64::max(end, i.offset + len))
            });
            lock(&seen).add(some.len(), of);
        });
    } else {
        for item in items.iter().filter(|i| i.outlet != HOST) {
            let len = u64::from(item.len);
            all[crowd_of(item)].add(1, (len, item.offset, item.offset + len));
        }
    }
    for seen in &mut all {
        seen.crowd.span = seen.end.saturating_sub(seen.first);
    }
    all
}

/// Whether pages of a file can be registered with a device.
fn may_register(work: &Work, crowd: usize, wide: usize) -> bool {
    let (file, to) = (&work.sources[crowd / wide].file, &work.outlets[crowd % wide]);
    to.gathers() && to.device.abilities().pins && file.is_mappable() && !file.pins_refused.load(Relaxed)
}

/// Brings items into their buckets, in place; where each bucket ends. Within one they lie in any order.
fn distribute<T>(items: &mut [T], buckets: usize, bucket: impl Fn(&T) -> usize) -> Vec<usize> {
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

/// The same by all threads, into a vector of its own: every chunk of the items has its places in every bucket.
fn distribute_shared<T: Copy + Send + Sync + 'static>(
    ctx: &BatchCtx,
    items: &mut Vec<T>,
    buckets: usize,
    bucket: impl Fn(&T) -> usize + Sync,
) -> Vec<usize> {
    let (n, chunks) = (items.len(), parallel::chunks(items.len()));
    // How many of each chunk go to each bucket, and then where the next one of them goes.
    let counts: Vec<Mutex<Vec<usize>>> = (0..chunks).map(|_| Mutex::default()).collect();
    parallel::share(|| ctx.reader.files.workers().batch_readers(), Readers::most(ctx.reader.files.workers().batch_threads()), n, |chunk| {
        let mut count = vec![0; buckets];
        items[parallel::chunk(chunk, n)].iter().for_each(|item| count[bucket(item)] += 1);
        *lock(&counts[chunk]) = count;
    });
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
    let mut sorted = Vec::with_capacity(n);
    let room = Room::of(&mut sorted);
    parallel::share(|| ctx.reader.files.workers().batch_readers(), Readers::most(ctx.reader.files.workers().batch_threads()), n, |chunk| {
        let mut next = lock(&places[chunk]);
        for item in &items[parallel::chunk(chunk, n)] {
            let place = &mut next[bucket(item)];
            // SAFETY: the places of a chunk in a bucket are its own, as many as it counted; the vector waits.
            unsafe { room.put(*place, *item) };
            *place += 1;
        }
    });
    // SAFETY: every item has filled one of as many places.
    unsafe { sorted.set_len(n) };
    let old = std::mem::replace(items, sorted);
    // So much memory takes the kernel two milliseconds to take back: the readers are waiting.
    if let Some(mates) = ctx.reader.files.workers().batch_copy() {
        mates.send(move || drop(old));
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use spinio_io::{Runtime, Settings};
    use spinio_host::syscalls::Linux;

    #[test]
    fn items_come_into_their_buckets_and_none_is_lost() {
        let runtime = Runtime::new(Settings { batch_threads: 4, ..Settings::default() });
        let ctx = BatchCtx::of(&runtime);
        let one: &dyn Fn(&mut Vec<usize>, usize) -> Vec<usize> = &|items, n| distribute(items, n, |i| i % n);
        let all: &dyn Fn(&mut Vec<usize>, usize) -> Vec<usize> =
            &|items, n| distribute_shared(&ctx, items, n, |i| i % n);
        let few = [(0usize, 1usize), (1, 3), (1000, 1), (1000, 7), (5, 100)].map(|(n, buckets)| (n, buckets, one));
        let many = [(0, 1), (parallel::MANY, 7), (10 * parallel::MANY + 5, 100)].map(|(n, buckets)| (n, buckets, all));
        for (n, buckets, distribute) in few.into_iter().chain(many) {
            let mut items: Vec<usize> = (0..n).map(|i| i * 7919 % 10_007).collect();
            let mut sorted = items.clone();
            let ends = distribute(&mut items, buckets);
            let mut start = 0;
            for (bucket, &end) in ends.iter().enumerate() {
                assert!(items[start..end].iter().all(|i| i % buckets == bucket));
                start = end;
            }
            assert_eq!(start, n);
            items.sort_unstable();
            sorted.sort_unstable();
            assert_eq!(items, sorted);
        }
    }
}
