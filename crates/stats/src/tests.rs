//! Counting, and reading what was counted out of the bytes of a file.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::layout::{COUNTERS, FINGERPRINT, MAGIC, WORDS};
use super::*;

fn stats() -> Stats {
    Stats::new(Some(Words::private(WORDS).unwrap()))
}

fn bytes(stats: &Stats) -> Vec<u8> {
    let words = stats.words.as_ref().unwrap();
    words[header::MAGIC].store(MAGIC, Relaxed);
    words[header::FINGERPRINT].store(FINGERPRINT, Relaxed);
    words[..COUNTERS].iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect()
}

fn line(snapshot: &Snapshot, route: Route) -> &Line {
    snapshot.lines.iter().find(|l| l.route == route).unwrap()
}

#[test]
fn a_snapshot_tells_what_was_counted_and_when() {
    let stats = stats();
    let watch = stats.begin(Direction::Read, 3, Some(0), 4103);
    stats.piece(&watch, Route::Copy, Reason::Cached, 0, 10, Instant::now());
    let before = stats.snapshot();
    stats.piece(&watch, Route::Copy, Reason::Cached, 0, 7, Instant::now());
    stats.piece(&watch, Route::Direct, Reason::Absent, 7, 4096, Instant::now());
    stats.piece(&watch, Route::Dma, Reason::CachedLarge, 0, 0, Instant::now());
    stats.end(&watch, &Ok(4103));
    stats.refused(Reason::NoP2pMapping, 4096);
    stats.seen(Residency::Absent, 4096 * 3);
    stats.set(Gauge::Staging, 70);
    stats.set(Gauge::Staging, 30);
    let delta = stats.snapshot().since(&before);
    assert_eq!((delta.read.calls, delta.read.bytes, delta.read.failed), (1, 4103, 0));
    assert_eq!(delta.read.latency.total(), 1);
    assert_eq!(delta.lines.len(), 2, "{:?}", delta.lines);
    let (copy, direct) = (line(&delta, Route::Copy), line(&delta, Route::Direct));
    assert_eq!((copy.pieces, copy.bytes, copy.reason), (1, 7, Reason::Cached));
    assert_eq!((direct.pieces, direct.bytes, direct.direction), (1, 4096, Direction::Read));
    assert_eq!(delta.refused, [Refused { reason: Reason::NoP2pMapping, times: 1, bytes: 4096 }]);
    assert_eq!((delta.pages(Residency::Absent), delta.pages(Residency::Clean)), (3, 0));
    assert_eq!(delta.gauge(Gauge::Staging), (30, 70));
    assert_eq!(Snapshot::from_bytes(&bytes(&stats)), Ok(stats.snapshot()));
}

#[test]
fn directions_are_counted_apart() {
    let stats = stats();
    for (direction, bytes) in [(Direction::Read, 1), (Direction::Write, 2), (Direction::Batch, 3)] {
        let watch = stats.begin(direction, 3, None, 10);
        stats.piece(&watch, Route::Copy, Reason::Cached, 0, bytes, Instant::now());
        stats.end(&watch, &Ok(bytes as usize));
    }
    let watch = stats.begin(Direction::Write, 3, None, 10);
    stats.end(&watch, &Err(spinio_sys::Errno::IO));
    let s = stats.snapshot();
    assert_eq!([s.read.bytes, s.write.bytes, s.batch.bytes], [1, 2, 3]);
    assert_eq!((s.write.calls, s.write.failed), (2, 1));
    assert_eq!(
        s.lines.iter().map(|l| (l.direction, l.bytes)).collect::<Vec<_>>(),
        [(Direction::Read, 1), (Direction::Write, 2), (Direction::Batch, 3)]
    );
}

#[test]
fn every_small_call_is_counted_and_some_are_timed_for_all() {
    let stats = stats();
    for n in 0..1000 {
        let watch = stats.begin_small(Direction::Read, 3, Some(n), 100);
        stats.end_small(&watch, Route::Copy, Reason::Small, &Ok(100));
    }
    let watch = stats.begin_small(Direction::Read, 3, None, 100);
    stats.end_small(&watch, Route::Store, Reason::HostMapped, &Ok(5));
    let s = stats.snapshot();
    assert_eq!((s.read.calls, s.read.bytes), (1001, 100_005));
    assert_eq!((line(&s, Route::Copy).pieces, line(&s, Route::Copy).bytes), (1000, 100_000));
    assert_eq!((line(&s, Route::Store).pieces, line(&s, Route::Store).bytes), (1, 5));
    let timed = s.read.latency.total();
    assert!((500..=1001).contains(&timed), "{timed} of 1001 calls are accounted for by a latency");
}

#[test]
fn a_table_without_free_cells_counts_what_it_cannot_place() {
    let stats = stats();
    let words = stats.words.as_ref().unwrap();
    (0..CELL_COUNT).for_each(|i| words[CELLS + i * CELL_WORDS].store(u64::MAX, Relaxed));
    let watch = stats.begin(Direction::Read, 3, None, 10);
    stats.piece(&watch, Route::Copy, Reason::Cached, 0, 10, Instant::now());
    let s = stats.snapshot();
    assert_eq!((s.lines.len(), s.unplaced), (0, 1));
}

#[test]
fn what_is_switched_off_counts_nothing() {
    let stats = Stats::new(None);
    let watch = stats.begin(Direction::Read, 3, None, 10);
    stats.piece(&watch, Route::Copy, Reason::Cached, 0, 10, Instant::now());
    stats.end(&watch, &Ok(10));
    let small = stats.begin_small(Direction::Read, 3, None, 10);
    stats.end_small(&small, Route::Copy, Reason::Small, &Ok(10));
    stats.set(Gauge::Pinned, 10);
    assert_eq!(stats.snapshot(), Snapshot::default());
}

#[test]
fn a_short_foreign_or_other_file_is_no_table() {
    assert_eq!(Snapshot::from_bytes(&[0; 16]), Err(Foreign::Unknown));
    assert_eq!(Snapshot::from_bytes(&vec![7; WORDS * 8]), Err(Foreign::Unknown));
    assert_eq!(Snapshot::from_bytes(&vec![0; WORDS * 8]), Ok(Snapshot::default()));
    let mut other = bytes(&stats());
    other[8] ^= 1;
    assert_eq!(Snapshot::from_bytes(&other), Err(Foreign::OtherBuild));
}

#[test]
fn hostile_bytes_give_nonsense_and_no_panic() {
    let mut table = bytes(&stats());
    let head = table[..16].to_vec();
    for seed in 0..64u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for word in table.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Often all ones, the worst for sums; often a key that means something.
            let value = match state % 4 {
                0 => u64::MAX,
                1 => 1 << 32 | (state >> 8 & 0x1_0303),
                _ => state,
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        table[..16].copy_from_slice(&head);
        let hostile = Snapshot::from_bytes(&table).unwrap();
        let mut sum = hostile.clone();
        sum.add(&hostile);
        let _ = (sum.since(&hostile), hostile.since(&sum));
        for line in &hostile.lines {
            let _ = (line.latency.quantile(0.5), line.latency.quantile(1.0), line.latency.total());
        }
    }
}

#[test]
fn sums_of_processes_are_sums() {
    let (a, b) = (stats(), stats());
    for (stats, route) in [(&a, Route::Copy), (&b, Route::Direct), (&b, Route::Copy)] {
        let watch = stats.begin(Direction::Read, 3, None, 10);
        stats.piece(&watch, route, Reason::Cached, 0, 10, Instant::now());
        stats.refused(Reason::NoP2pMapping, 1);
        stats.end(&watch, &Ok(10));
    }
    let (mut sum, b) = (a.snapshot(), b.snapshot());
    let only_a = sum.clone();
    sum.add(&b);
    assert_eq!((sum.read.calls, sum.read.bytes), (3, 30));
    assert_eq!(
        sum.lines.iter().map(|l| (l.route, l.bytes)).collect::<Vec<_>>(),
        [(Route::Copy, 20), (Route::Direct, 10)]
    );
    assert_eq!(sum.refused, [Refused { reason: Reason::NoP2pMapping, times: 3, bytes: 3 }]);
    assert_eq!(sum.since(&b).read, only_a.read);
}

#[test]
fn threads_count_small_calls_exactly_also_when_there_are_more_than_lanes() {
    let stats = stats();
    let count = |n: u64| {
        for _ in 0..n {
            let watch = stats.begin_small(Direction::Read, 3, Some(0), 3);
            stats.end_small(&watch, Route::Copy, Reason::Small, &Ok(3));
        }
    };
    let threads = layout::OWN_LANES as u64 + 8;
    for _ in 0..threads / 8 {
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| count(50)))));
    }
    assert_eq!((stats.snapshot().read.calls, stats.snapshot().read.bytes), (threads * 50, threads * 150));
    // Another table in the same thread, and back again.
    let other = self::stats();
    let watch = other.begin_small(Direction::Read, 3, Some(0), 3);
    other.end_small(&watch, Route::Copy, Reason::Small, &Ok(3));
    count(1);
    assert_eq!((other.snapshot().read.calls, stats.snapshot().read.calls), (1, threads * 50 + 1));
}
