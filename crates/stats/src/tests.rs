//! Counting, and reading the counters from the bytes of a file.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::layout::{COUNTERS, FINGERPRINT, MAGIC, TABLE_WORDS};
use super::*;

fn stats() -> Stats {
    Stats::new(Some(SharedWords::anonymous(TABLE_WORDS).unwrap()))
}

fn bytes(stats: &Stats) -> Vec<u8> {
    let words = stats.words.as_ref().unwrap();
    words[header::MAGIC].store(MAGIC, Relaxed);
    words[header::FINGERPRINT].store(FINGERPRINT, Relaxed);
    words[..COUNTERS].iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect()
}

fn row(snapshot: &Snapshot, route: Route) -> &RouteRow {
    snapshot.rows.iter().find(|l| l.route == route).unwrap()
}

#[test]
fn snapshot_reports_counters_and_deltas() {
    let stats = stats();
    let span = stats.begin(Direction::Read, 3, Some(0), 4103);
    stats.record_piece(&span, Route::Copy, Reason::Cached, 0, 10, Instant::now());
    let before = stats.snapshot();
    stats.record_piece(&span, Route::Copy, Reason::Cached, 0, 7, Instant::now());
    stats.record_piece(&span, Route::Direct, Reason::Absent, 7, 4096, Instant::now());
    stats.record_piece(&span, Route::Dma, Reason::CachedLarge, 0, 0, Instant::now());
    stats.end(&span, &Ok(4103));
    stats.record_refusal(Reason::NoP2pMapping, 4096);
    stats.residency_probed(Residency::Absent, 4096 * 3);
    stats.set_gauge(Gauge::BounceBytes, 70);
    stats.set_gauge(Gauge::BounceBytes, 30);
    let delta = stats.snapshot().since(&before);
    assert_eq!((delta.read.calls, delta.read.bytes, delta.read.failed), (1, 4103, 0));
    assert_eq!(delta.read.latency.total(), 1);
    assert_eq!(delta.rows.len(), 2, "{:?}", delta.rows);
    let (copy, direct) = (row(&delta, Route::Copy), row(&delta, Route::Direct));
    assert_eq!((copy.pieces, copy.bytes, copy.reason), (1, 7, Reason::Cached));
    assert_eq!((direct.pieces, direct.bytes, direct.direction), (1, 4096, Direction::Read));
    assert_eq!(delta.refusals, [Refusal { reason: Reason::NoP2pMapping, count: 1, bytes: 4096 }]);
    assert_eq!((delta.pages(Residency::Absent), delta.pages(Residency::Clean)), (3, 0));
    assert_eq!(delta.gauge(Gauge::BounceBytes), (30, 70));
    assert_eq!(Snapshot::from_bytes(&bytes(&stats)), Ok(stats.snapshot()));
}

#[test]
fn directions_are_counted_separately() {
    let stats = stats();
    for (direction, bytes) in [(Direction::Read, 1), (Direction::Write, 2), (Direction::Batch, 3)] {
        let span = stats.begin(direction, 3, None, 10);
        stats.record_piece(&span, Route::Copy, Reason::Cached, 0, bytes, Instant::now());
        stats.end(&span, &Ok(bytes as usize));
    }
    let span = stats.begin(Direction::Write, 3, None, 10);
    stats.end(&span, &Err(spinio_sys::Errno::IO));
    let s = stats.snapshot();
    assert_eq!([s.read.bytes, s.write.bytes, s.batch.bytes], [1, 2, 3]);
    assert_eq!((s.write.calls, s.write.failed), (2, 1));
    assert_eq!(
        s.rows.iter().map(|l| (l.direction, l.bytes)).collect::<Vec<_>>(),
        [(Direction::Read, 1), (Direction::Write, 2), (Direction::Batch, 3)]
    );
}

#[test]
fn small_calls_are_counted_and_sampled() {
    let stats = stats();
    for n in 0..1000 {
        let span = stats.begin_small(Direction::Read, None, 3, Some(n), 100);
        stats.end_small(&span, Route::Copy, Reason::Small, &Ok(100));
    }
    let span = stats.begin_small(Direction::Read, None, 3, None, 100);
    stats.end_small(&span, Route::Store, Reason::HostMapped, &Ok(5));
    let s = stats.snapshot();
    assert_eq!((s.read.calls, s.read.bytes), (1001, 100_005));
    assert_eq!((row(&s, Route::Copy).pieces, row(&s, Route::Copy).bytes), (1000, 100_000));
    assert_eq!((row(&s, Route::Store).pieces, row(&s, Route::Store).bytes), (1, 5));
    let timed = s.read.latency.total();
    assert!((500..=1001).contains(&timed), "{timed} of 1001 calls are covered by a latency");
}

#[test]
fn full_table_counts_overflow() {
    let stats = stats();
    let words = stats.words.as_ref().unwrap();
    (0..CELL_COUNT).for_each(|i| words[CELLS + i * CELL_WORDS].store(u64::MAX, Relaxed));
    let span = stats.begin(Direction::Read, 3, None, 10);
    stats.record_piece(&span, Route::Copy, Reason::Cached, 0, 10, Instant::now());
    let s = stats.snapshot();
    assert_eq!((s.rows.len(), s.overflow), (0, 1));
}

#[test]
fn disabled_stats_count_nothing() {
    let stats = Stats::new(None);
    let span = stats.begin(Direction::Read, 3, None, 10);
    stats.record_piece(&span, Route::Copy, Reason::Cached, 0, 10, Instant::now());
    stats.end(&span, &Ok(10));
    let small = stats.begin_small(Direction::Read, None, 3, None, 10);
    stats.end_small(&small, Route::Copy, Reason::Small, &Ok(10));
    stats.set_gauge(Gauge::Pinned, 10);
    assert_eq!(stats.snapshot(), Snapshot::default());
}

#[test]
fn from_bytes_rejects_invalid_tables() {
    assert_eq!(Snapshot::from_bytes(&[0; 16]), Err(SnapshotError::NotCounters));
    assert_eq!(Snapshot::from_bytes(&vec![7; TABLE_WORDS * 8]), Err(SnapshotError::NotCounters));
    assert_eq!(Snapshot::from_bytes(&vec![0; TABLE_WORDS * 8]), Ok(Snapshot::default()));
    let mut other = bytes(&stats());
    other[8] ^= 1;
    assert_eq!(Snapshot::from_bytes(&other), Err(SnapshotError::OtherVersion));
}

#[test]
fn corrupt_bytes_never_panic() {
    let mut table = bytes(&stats());
    let head = table[..16].to_vec();
    for seed in 0..64u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for word in table.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Often all ones, the worst case for sums; often a valid key.
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
        for line in &hostile.rows {
            let _ = (line.latency.quantile(0.5), line.latency.quantile(1.0), line.latency.total());
        }
    }
}

#[test]
fn snapshots_add_up() {
    let (a, b) = (stats(), stats());
    for (stats, route) in [(&a, Route::Copy), (&b, Route::Direct), (&b, Route::Copy)] {
        let span = stats.begin(Direction::Read, 3, None, 10);
        stats.record_piece(&span, route, Reason::Cached, 0, 10, Instant::now());
        stats.record_refusal(Reason::NoP2pMapping, 1);
        stats.end(&span, &Ok(10));
    }
    let (mut sum, b) = (a.snapshot(), b.snapshot());
    let only_a = sum.clone();
    sum.add(&b);
    assert_eq!((sum.read.calls, sum.read.bytes), (3, 30));
    assert_eq!(
        sum.rows.iter().map(|l| (l.route, l.bytes)).collect::<Vec<_>>(),
        [(Route::Copy, 20), (Route::Direct, 10)]
    );
    assert_eq!(sum.refusals, [Refusal { reason: Reason::NoP2pMapping, count: 3, bytes: 3 }]);
    assert_eq!(sum.since(&b).read, only_a.read);
}

#[test]
fn small_calls_are_exact_beyond_exclusive_slots() {
    let stats = stats();
    let count = |n: u64| {
        for _ in 0..n {
            let span = stats.begin_small(Direction::Read, None, 3, Some(0), 3);
            stats.end_small(&span, Route::Copy, Reason::Small, &Ok(3));
        }
    };
    let threads = layout::EXCLUSIVE_SLOTS as u64 + 8;
    for _ in 0..threads / 8 {
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| count(50)))));
    }
    assert_eq!((stats.snapshot().read.calls, stats.snapshot().read.bytes), (threads * 50, threads * 150));
    // Another table in the same thread, then the first one again.
    let other = self::stats();
    let span = other.begin_small(Direction::Read, None, 3, Some(0), 3);
    other.end_small(&span, Route::Copy, Reason::Small, &Ok(3));
    count(1);
    assert_eq!((other.snapshot().read.calls, stats.snapshot().read.calls), (1, threads * 50 + 1));
}

#[test]
fn small_calls_that_fail_or_take_another_route_are_sampled() {
    for result in [Err(Errno::IO), Ok(100)] {
        let (stats, mut timed) = (stats(), 0);
        for n in 0..1000 {
            let span = stats.begin_small(Direction::Read, None, 3, Some(n), 100);
            timed += u64::from(span.is_timed());
            stats.end_small(&span, Route::Store, Reason::HostMapped, &result);
        }
        let read = stats.snapshot().read;
        let counted: u64 = read.latency.total();
        assert_eq!((read.calls, timed), (1000, 12), "0, powers of two, and each 256th");
        assert!((750..=1000).contains(&counted), "{counted}");
    }
}
