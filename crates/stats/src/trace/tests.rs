//! The trace: what is read is what was written, even if the ring is corrupt.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_device::{DeviceId, DeviceKind};

use super::{Event, Reader};
use crate::layout::{RECORD_WORDS, RECORDS, RING, TABLE_WORDS};
use crate::*;

fn traced() -> Stats {
    let words = SharedWords::anonymous(TABLE_WORDS).unwrap();
    words[header::TRACING].store(u64::MAX, Relaxed);
    Stats::new(Some(words))
}

/// Reads a table as another process would.
fn bytes_of(stats: &Stats) -> impl Fn(&mut [u8], u64) -> io::Result<()> {
    let words = stats.words.as_ref().unwrap();
    move |into, offset| {
        let mut words = words.get(offset as usize / 8..).unwrap_or_default().iter();
        for chunk in into.chunks_exact_mut(8) {
            let word = words.next().ok_or(io::ErrorKind::UnexpectedEof)?;
            chunk.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        Ok(())
    }
}

const GPU: DeviceId = DeviceId { kind: DeviceKind::Cuda, ordinal: 3 };

#[test]
fn trace_reports_path_and_device() {
    let (stats, file) = (traced(), tempfile::NamedTempFile::new().unwrap());
    let fd = file.as_file().as_raw_fd();
    let mut span = stats.begin(Direction::Read, fd, Some(4096), 3 << 20);
    span.traced.as_mut().unwrap().set_device(GPU);
    stats.record_piece(&span, Route::Direct, Reason::Absent, 0, 2 << 20, Instant::now());
    stats.record_piece(&span, Route::Copy, Reason::Cached, 2 << 20, 1 << 20, Instant::now());
    stats.end(&span, &Ok(3 << 20));
    let small = stats.begin_small(Direction::Write, None, fd, None, 100);
    let error = spinio_sys::Errno::NOSPC;
    stats.end_small(&small, Route::Copy, Reason::Small, &Err(error));

    let mut reader = Reader::default();
    let events = reader.poll(bytes_of(&stats), true).unwrap();
    let [Event::Piece(first), Event::Piece(second), Event::Request(large), Event::Request(small)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((first.route, first.reason, first.offset, first.bytes), (Route::Direct, Reason::Absent, 0, 2 << 20));
    assert_eq!((second.route, second.offset, second.request), (Route::Copy, 2 << 20, large.id));
    assert_eq!(large.path.as_deref(), file.path().to_str());
    assert_eq!(large.device.as_deref(), Some("cuda:3"));
    assert_eq!((large.offset, large.len, large.result, large.route_reason), (Some(4096), 3 << 20, Ok(3 << 20), None));
    assert_eq!((large.pid, large.fd), (std::process::id(), fd));
    assert!(large.start > 0 && first.start >= large.start, "{events:?}");
    assert_eq!((small.direction, small.offset, small.len), (Direction::Write, Some(0), 100));
    assert_eq!((small.result, small.route_reason), (Err(28), Some((Route::Copy, Reason::Small))));
    assert_eq!((small.path.as_deref(), reader.lost()), (file.path().to_str(), 0));
    assert_eq!(reader.poll(bytes_of(&stats), true).unwrap(), [], "no event is reported twice");
}

#[test]
fn expired_tracing_records_nothing() {
    let stats = traced();
    for until in [0, 1] {
        stats.words.as_ref().unwrap()[header::TRACING].store(until, Relaxed);
        let span = stats.begin(Direction::Read, 0, Some(0), 10);
        stats.record_piece(&span, Route::Copy, Reason::Cached, 0, 10, Instant::now());
        stats.end(&span, &Ok(10));
    }
    assert_eq!(Reader::default().poll(bytes_of(&stats), true).unwrap(), []);
}

#[test]
fn late_reader_gets_paths_only() {
    let (stats, file) = (traced(), tempfile::NamedTempFile::new().unwrap());
    let fd = file.as_file().as_raw_fd();
    let request = || {
        let span = stats.begin(Direction::Read, fd, Some(0), 10);
        stats.end(&span, &Ok(10));
    };
    request();
    let mut reader = Reader::from_now(bytes_of(&stats)).unwrap();
    request();
    let events = reader.poll(bytes_of(&stats), true).unwrap();
    let [Event::Request(only)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((only.id, only.path.as_deref()), (2, file.path().to_str()));
    // The ring has wrapped since the path was recorded, so it is recorded again.
    (0..RECORDS).for_each(|_| request());
    let mut late = Reader::from_now(bytes_of(&stats)).unwrap();
    request();
    let events = late.poll(bytes_of(&stats), true).unwrap();
    assert!(matches!(&events[..], [Event::Request(r)] if r.path.as_deref() == file.path().to_str()), "{events:?}");
}

#[test]
fn long_path_is_complete() {
    let directory = tempfile::tempdir().unwrap();
    let deep = directory.path().join("x".repeat(200)).join("y".repeat(200));
    std::fs::create_dir_all(&deep).unwrap();
    let file = tempfile::NamedTempFile::new_in(&deep).unwrap();
    let stats = traced();
    let span = stats.begin(Direction::Read, file.as_file().as_raw_fd(), Some(0), 10);
    stats.end(&span, &Ok(10));
    let events = Reader::default().poll(bytes_of(&stats), true).unwrap();
    assert!(matches!(&events[..], [Event::Request(r)] if r.path.as_deref() == file.path().to_str()), "{events:?}");
}

#[test]
fn overrun_and_torn_records_count_as_lost() {
    let stats = traced();
    let words = stats.words.as_ref().unwrap();
    let requests = |n: usize| {
        for _ in 0..n {
            let span = stats.begin(Direction::Read, -1, None, 10);
            stats.end(&span, &Ok(10));
        }
    };
    let mut reader = Reader::default();
    requests(RECORDS + 10);
    assert_eq!(reader.poll(bytes_of(&stats), true).unwrap().len(), RECORDS);
    assert_eq!(reader.lost(), 10);
    // Corrupts one word of the second of three records.
    requests(3);
    let slot = (RECORDS + 11) % RECORDS;
    words[RING + slot * RECORD_WORDS + 5].fetch_xor(1, Relaxed);
    assert_eq!(reader.poll(bytes_of(&stats), true).unwrap().len(), 2);
    assert_eq!(reader.lost(), 11);
    // A reader waits for a writer that has a ticket and has not written yet; the last poll does not.
    words[header::TICKETS].fetch_add(1, Relaxed);
    requests(1);
    assert_eq!(reader.poll(bytes_of(&stats), false).unwrap(), []);
    assert_eq!(reader.poll(bytes_of(&stats), true).unwrap().len(), 1);
    assert_eq!(reader.lost(), 12);
}

#[test]
fn corrupt_ring_never_panics() {
    let stats = traced();
    let words = stats.words.as_ref().unwrap();
    for head in [u64::MAX, u64::MAX / 2, 1 << 20, 3] {
        for kind in 0..5u64 {
            let mut body = [u64::MAX - kind; RECORD_WORDS - 2];
            body[0] = kind | 0xffff_ffff_ffff_ff00;
            (0..100).for_each(|_| {
                ring::write(words, &body);
            });
            body[0] = kind | 3 << 16 | 7 << 32;
            ring::write(words, &body);
        }
        let _ = Reader::default().poll(bytes_of(&stats), true).unwrap();
        words[header::TICKETS].store(head, Relaxed);
        let mut reader = Reader::default();
        let _ = reader.poll(bytes_of(&stats), true).unwrap();
        // The head moves back.
        words[header::TICKETS].store(1, Relaxed);
        let _ = reader.poll(bytes_of(&stats), true).unwrap();
    }
    let short = |_: &mut [u8], _| Err(io::ErrorKind::UnexpectedEof.into());
    assert!(Reader::default().poll(short, true).is_err());
}

#[test]
fn concurrent_writers_lose_no_records() {
    let stats = traced();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..1000 {
                    let span = stats.begin(Direction::Batch, -1, None, 10);
                    stats.record_piece(&span, Route::Gather, Reason::Cached, 0, 10, Instant::now());
                    stats.end(&span, &Ok(10));
                }
            });
        }
    });
    let mut reader = Reader::default();
    let events = reader.poll(bytes_of(&stats), true).unwrap();
    assert_eq!((events.len(), reader.lost()), (8000, 0));
    let mut ids: Vec<u64> =
        events.iter().filter_map(|e| if let Event::Request(r) = e { Some(r.id) } else { None }).collect();
    ids.sort();
    assert!(ids.into_iter().eq(1..=4000));
}
