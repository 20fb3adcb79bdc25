//! Memory in chunks: what is evicted, and what is not.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::limit_memory;

/// Bytes and pages of a chunk of these maps.
const CHUNK: u64 = 2 << 20;

/// A device on which maps may have 2 chunks.
fn two_chunks(len: u64) -> Bench {
    let bench = bench_on("size=16M", len as usize);
    limit_memory(bench.device, Some(2 * CHUNK));
    bench
}

impl Bench {
    fn chunks(&self, map: &Map) -> u64 {
        let info = map.info();
        assert_eq!(info.device_bytes % CHUNK, 0);
        info.device_bytes / CHUNK
    }

    /// Acquires one page of a chunk, and verifies its bytes.
    fn check(&self, map: &Map, chunk: u64, access: Access) {
        let at = chunk * CHUNK + 3 * P;
        map.acquire(at, P, access).unwrap();
        let wanted = &contents((at + P) as usize)[at as usize..];
        assert_eq!(self.load(map, at, PAGE), wanted, "chunk {chunk}");
    }
}

#[test]
fn least_recently_acquired_chunk_is_evicted_and_fetched_again() {
    let bench = two_chunks(4 * CHUNK);
    let map = bench.map(0, 4 * CHUNK, Access::Write).unwrap();
    assert_eq!(bench.chunks(&map), 0, "only what is acquired has memory");
    for chunk in [0, 1, 0, 2, 0, 1] {
        bench.check(&map, chunk, Access::Write);
        map.release(chunk * CHUNK, 4 * P).unwrap_err();
        assert_eq!(map.release(chunk * CHUNK + 3 * P, P).unwrap(), 0);
        assert!(bench.chunks(&map) <= 2);
    }
    // 1 for 2, and 2 for 1; chunk 0 was acquired in between.
    assert_eq!((map.info().chunks_evicted, map.info().bytes_from_file), (2, 4 * P));
    // SAFETY: refused.
    let evicted = unsafe {
        let at = DeviceAddr(map.address() + 2 * CHUNK);
        bench.device.copy_out(StreamId(0), [0; 1].as_mut_ptr(), at, 1)
    };
    assert!(evicted.is_err(), "nothing is there");
}

#[test]
fn released_bytes_come_back_after_eviction() {
    let bench = two_chunks(3 * CHUNK);
    let map = bench.map(0, 3 * CHUNK, Access::Write).unwrap();
    for chunk in 0..3 {
        map.acquire(chunk * CHUNK, P, Access::Write).unwrap();
        bench.store(&map, chunk * CHUNK, &[200 + chunk as u8]);
        assert_eq!(map.release(chunk * CHUNK, P).unwrap(), P);
    }
    map.acquire(0, P, Access::Write).unwrap();
    assert_eq!(bench.load(&map, 0, 2), [200, contents(2)[1]]);
    assert_eq!(map.release(0, P).unwrap(), 0, "the fingerprints are those of the new memory");
    assert_eq!(map.info().chunks_evicted, 2);
}

#[test]
fn pages_in_use_are_not_evicted_until_they_are_given_up() {
    let bench = two_chunks(3 * CHUNK);
    let map = bench.map(0, 3 * CHUNK, Access::Write).unwrap();
    let read_only = bench.map(0, 3 * CHUNK, Access::Read).unwrap();
    map.acquire(0, P, Access::Write).unwrap();
    bench.store(&map, 7, &[200]);
    bench.check(&read_only, 0, Access::Read);
    for _ in 0..2 {
        let error = map.acquire(CHUNK, P, Access::Read).unwrap_err();
        assert_eq!(error.errno, Errno::NOMEM);
        assert!(error.to_string().contains("SPINIO_GAIA_MEMORY") && error.to_string().contains("release"), "{error}");
    }
    // What is in use stays as it was.
    assert_eq!((bench.load(&map, 7, 1), map.info().chunks_evicted), (vec![200], 0));
    assert_eq!(read_only.release(3 * P, P).unwrap(), 0);
    bench.check(&map, 1, Access::Read);
    assert_eq!((read_only.info().chunks_evicted, bench.chunks(&read_only)), (1, 0));
    // Now an epoch for writing and one for reading, which a discard ends too.
    assert_eq!(errno(map.acquire(2 * CHUNK, P, Access::Read)), Errno::NOMEM);
    map.discard(CHUNK, 4 * P).unwrap();
    bench.check(&map, 2, Access::Read);
    assert_eq!(map.release(0, P).unwrap(), P);
    assert_eq!(bench.snapshot(0).unwrap()[7], 200);
    assert_eq!(errno(map.acquire(0, 3 * CHUNK, Access::Read)), Errno::NOMEM, "more than the limit");
    assert_eq!(map.info().chunks_evicted, 1);
}

#[test]
fn device_that_is_full_evicts_too_and_a_map_may_be_larger() {
    let bench = bench_on("size=5M", 4 * CHUNK as usize);
    let map = bench.map(0, 4 * CHUNK, Access::Read).unwrap();
    for chunk in [0, 1, 2, 3, 0] {
        bench.check(&map, chunk, Access::Read);
        assert_eq!(map.release(chunk * CHUNK + 3 * P, P).unwrap(), 0);
    }
    assert_eq!((bench.chunks(&map), map.info().chunks_evicted), (2, 3));
    // All of it does not fit, however much is evicted; then the rest works as before.
    let error = map.acquire(0, 4 * CHUNK, Access::Read).unwrap_err();
    assert!(error.errno == Errno::NOMEM && error.to_string().contains("The device has no memory left"), "{error}");
    bench.check(&map, 3, Access::Read);
    // Memory of the program itself takes the room.
    map.release(3 * CHUNK + 3 * P, P).unwrap();
    map.advise(0, 4 * CHUNK, Advice::DontNeed).unwrap();
    let memory = bench.device.alloc(4 << 20, false).unwrap();
    assert_eq!(errno(map.acquire(0, P, Access::Read)), Errno::NOMEM);
    bench.device.free(memory).unwrap();
    bench.check(&map, 0, Access::Read);
}

#[test]
fn release_of_what_was_read_publishes_nothing_and_ends_it() {
    let bench = two_chunks(2 * CHUNK);
    let map = bench.map(0, 2 * CHUNK, Access::Read).unwrap();
    assert_eq!(errno(map.release(0, P)), Errno::INVAL, "never acquired");
    map.acquire(0, 2 * P, Access::Read).unwrap();
    assert_eq!(errno(map.release(0, 3 * P)), Errno::INVAL);
    assert_eq!(map.release(0, 2 * P).unwrap(), 0);
    assert_eq!(errno(map.release(0, P)), Errno::INVAL, "given up already");
    // The bytes are still there.
    map.acquire(0, 2 * P, Access::Read).unwrap();
    assert_eq!((map.info().bytes_from_file, map.info().releases), (2 * P, 0));
    // Pages that were read around one that was written: one release ends both.
    let map = bench.map(0, CHUNK, Access::Write).unwrap();
    map.acquire(0, 6 * P, Access::Read).unwrap();
    map.acquire(2 * P, P, Access::Write).unwrap();
    map.acquire(4 * P, P, Access::Write).unwrap();
    bench.store(&map, 2 * P, &[200]);
    bench.store(&map, 4 * P + 1, &[201]);
    assert_eq!(map.release(0, 6 * P).unwrap(), 2 * P);
    assert_eq!((bench.snapshot(2).unwrap()[0], bench.snapshot(4).unwrap()[1]), (200, 201));
    assert_eq!(errno(map.release(0, P)), Errno::INVAL);
    map.acquire(0, 6 * P, Access::Write).unwrap();
    assert_eq!(map.release(0, 6 * P).unwrap(), 0);
}

#[test]
fn advice_gives_whole_chunks_back() {
    let bench = bench_on("size=16M", 3 * CHUNK as usize);
    let map = bench.map(0, 3 * CHUNK, Access::Write).unwrap();
    (0..3).for_each(|chunk| bench.check(&map, chunk, Access::Read));
    map.acquire(2 * CHUNK, P, Access::Write).unwrap();
    bench.store(&map, 2 * CHUNK, &[200]);
    map.advise(0, CHUNK - 1, Advice::DontNeed).unwrap();
    assert_eq!(bench.chunks(&map), 2, "the last page was in the range");
    map.advise(CHUNK, CHUNK - P, Advice::DontNeed).unwrap();
    assert_eq!(bench.chunks(&map), 2, "a part of a chunk");
    map.advise(P, 3 * CHUNK - P, Advice::DontNeed).unwrap();
    assert_eq!(bench.chunks(&map), 1, "an epoch keeps its chunk");
    assert_eq!(map.info().chunks_evicted, 0);
    assert_eq!(map.release(2 * CHUNK, P).unwrap(), P);
    (0..2).for_each(|chunk| bench.check(&map, chunk, Access::Read));
    assert_eq!(bench.chunks(&map), 3);
}

#[test]
fn eviction_forgets_what_was_current_without_a_message() {
    let bench = two_chunks(3 * CHUNK);
    bench.server.state.lock().unwrap().no_writers = true;
    let [map, other] = [0, 1].map(|_| bench.map(0, 3 * CHUNK, Access::Read).unwrap());
    for _ in 0..3 {
        bench.check(&map, 0, Access::Read);
        map.release(3 * P, P).unwrap();
    }
    assert_eq!(map.info().acquires_unchanged, 2);
    for chunk in 1..3 {
        bench.check(&other, chunk, Access::Read);
    }
    other.release(CHUNK + 3 * P, P).unwrap();
    assert_eq!((map.info().chunks_evicted, bench.chunks(&map)), (1, 0));
    bench.check(&map, 0, Access::Read);
    assert_eq!((map.info().acquires_unchanged, map.info().bytes_from_file), (2, 2 * P));
}

#[test]
fn map_whose_call_does_not_end_keeps_its_chunks_and_stops_no_other_map() {
    let bench = two_chunks(3 * CHUNK);
    let [stopped, map] = [0, 1].map(|_| bench.map(0, 3 * CHUNK, Access::Read).unwrap());
    bench.check(&stopped, 0, Access::Read);
    stopped.release(3 * P, P).unwrap();
    bench.check(&map, 1, Access::Read);
    crate::room::Room::of(bench.device.replica_memory().unwrap()).wait_for_calls(Duration::ZERO);
    let call = spinio_host::lock(&stopped.state);
    let error = map.acquire(2 * CHUNK, P, Access::Read).unwrap_err();
    assert!(error.errno == Errno::NOMEM && error.to_string().contains("have not ended"), "{error}");
    drop(call);
    bench.check(&map, 2, Access::Read);
    assert_eq!(stopped.info().chunks_evicted, 1);
}

#[test]
fn maps_of_threads_compete_and_lose_nothing() {
    const ROUNDS: u64 = 40;
    let bench = Arc::new(two_chunks(4 * CHUNK));
    let threads: Vec<_> = (0..2u64)
        .map(|thread| {
            let bench = Arc::clone(&bench);
            std::thread::spawn(move || {
                let map = bench.map(0, 4 * CHUNK, Access::Write).unwrap();
                for round in 0..ROUNDS {
                    // Pages of its own: the small server does not merge.
                    let at = (round * 3 + thread) % 4 * CHUNK + thread * P;
                    map.acquire(at, P, Access::Write).unwrap();
                    let byte = bench.load(&map, at, 1)[0].wrapping_add(1);
                    bench.store(&map, at, &[byte]);
                    assert_eq!(map.release(at, P).unwrap(), P);
                }
                map.info().chunks_evicted
            })
        })
        .collect();
    let evicted: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert!(evicted > 10, "{evicted}");
    let before = contents(4 * CHUNK as usize);
    for chunk in 0..4 {
        for thread in 0..2 {
            let at = (chunk * CHUNK + thread * P) as usize;
            let page = bench.snapshot(at as u64 / P).unwrap();
            assert_eq!(page[0], before[at].wrapping_add(ROUNDS as u8 / 4), "chunk {chunk}, thread {thread}");
            assert_eq!(page[1..], before[at + 1..at + PAGE]);
        }
    }
}

#[test]
fn device_without_chunks_has_one_allocation() {
    let bench = bench_on("size=4M,vmm=0", 2 * PAGE);
    limit_memory(bench.device, Some(CHUNK));
    assert_eq!(errno(bench.map(0, 3 * CHUNK, Access::Read)), Errno::NOMEM);
    // No limit counts it.
    drop(bench.map(0, CHUNK + P, Access::Read).unwrap());
    let map = bench.map(0, 2 * P, Access::Write).unwrap();
    assert_eq!(map.info().device_bytes, 2 * P);
    map.acquire(0, 2 * P, Access::Write).unwrap();
    bench.store(&map, P, &[200]);
    assert_eq!(map.release(0, 2 * P).unwrap(), P);
    map.advise(0, 2 * P, Advice::DontNeed).unwrap();
    map.acquire(0, 2 * P, Access::Read).unwrap();
    assert_eq!((bench.load(&map, P, 1), map.info().bytes_from_snapshots), (vec![200], P));
    assert_eq!(map.info().device_bytes, 2 * P);
    drop(map);
    assert_eq!(bench.device.resources_in_use(), Default::default());
}
