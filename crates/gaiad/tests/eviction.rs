//! Maps that are larger than the device memory they may have: every byte arrives, whatever is evicted meanwhile.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::io::Errno;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Map, StreamRelease};

use crate::common::TestMount;
use crate::common::both::Random;
use crate::common::gpu::{PAGE, open};

const MIB: u64 = 1 << 20;
const P: u64 = PAGE as u64;
/// Of the maps of these tests.
const CHUNK: u64 = 2 * MIB;
const FILE: u64 = 32 * MIB;
const LIMIT: u64 = 8 * MIB;

#[test]
fn server_role() {
    common::server_role();
}

fn contents() -> Vec<u8> {
    (0..FILE as usize).map(|n| (n * 7 % 251) as u8).collect()
}

fn mounted() -> Option<(TestMount, File)> {
    let fill = |dir: &Path| std::fs::write(dir.join("file"), contents()).unwrap();
    let mount = TestMount::with_supervisor(fill, |supervisor| {
        supervisor.env(common::MEMORY, (64 * MIB).to_string());
    })?;
    let file = open(&mount.dir.join("file"));
    Some((mount, file))
}

/// A device that is as large as the file, and a limit.
fn device(limit: u64) -> &'static Emulated {
    let device = Emulated::start(Config::parse("size=32M").unwrap()).unwrap();
    spinio_gaia::limit_memory(device, Some(limit));
    device
}

fn map(file: &File, access: Access, device: &'static Emulated) -> Map {
    Map::new(file.as_raw_fd(), 0, FILE, access, device).unwrap()
}

fn load(device: &Emulated, map: &Map, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let from = DeviceAddr(map.address() + offset);
    // SAFETY: the bytes live until the device was synchronized.
    unsafe { device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, bytes.len()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

fn store(device: &Emulated, map: &Map, offset: u64, bytes: &[u8]) {
    let to = DeviceAddr(map.address() + offset);
    // SAFETY: as above.
    unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
}

/// Windows that begin and end inside of chunks.
fn windows() -> impl Iterator<Item = (u64, u64)> {
    const WINDOW: u64 = 3 * MIB + 5 * P;
    (0..FILE).step_by(WINDOW as usize).map(|start| (start, WINDOW.min(FILE - start)))
}

#[test]
fn file_of_four_times_the_limit_is_read_and_written_window_by_window() {
    let Some((mount, file)) = mounted() else { return };
    let device = device(LIMIT);
    let (reader, writer) = (map(&file, Access::Read, device), map(&file, Access::Write, device));
    let mut wanted = contents();
    for (at, len) in windows() {
        assert_eq!(reader.acquire(at, len, Access::Read).unwrap(), len);
        assert!(load(device, &reader, at, len) == wanted[at as usize..][..len as usize], "window at {at}");
        assert_eq!(reader.release(at, len).unwrap(), 0);
    }
    for (at, len) in windows() {
        assert_eq!(writer.acquire(at, len, Access::Write).unwrap(), len);
        let mut bytes = load(device, &writer, at, len);
        bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        store(device, &writer, at, &bytes);
        assert_eq!(writer.release(at, len).unwrap(), len);
        assert!(reader.info().device_bytes + writer.info().device_bytes <= LIMIT);
    }
    wanted.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    let mut now = vec![0; FILE as usize];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == wanted, "through the mount");
    for (at, len) in windows() {
        reader.acquire(at, len, Access::Read).unwrap();
        assert!(load(device, &reader, at, len) == wanted[at as usize..][..len as usize], "window at {at}, again");
        reader.release(at, len).unwrap();
    }
    for map in [&reader, &writer] {
        assert!(map.info().chunks_evicted >= (FILE - LIMIT) / CHUNK, "{:?}", map.info());
    }
    drop((reader, writer));
    assert_eq!(device.resources_in_use().chunks, 0);
    let (dir, _root) = {
        drop(file);
        mount.unmount()
    };
    assert!(std::fs::read(dir.join("file")).unwrap() == wanted, "below the mount");
}

#[test]
fn map_that_is_larger_than_the_device_is_overwritten_in_parts() {
    let Some((_mount, file)) = mounted() else { return };
    let device = Emulated::start(Config::parse("size=7M").unwrap()).unwrap();
    let gpu = map(&file, Access::Write, device);
    for (at, len) in windows() {
        // Partial pages at both ends are fetched, whose neighbours may be evicted already.
        let (at, len) = (at + 7, len - 14);
        assert_eq!(gpu.overwrite(at, len).unwrap(), len);
        store(device, &gpu, at, &vec![at as u8 | 1; len as usize]);
        gpu.release(at, len).unwrap();
    }
    let mut wanted = contents();
    windows().for_each(|(at, len)| wanted[at as usize + 7..][..len as usize - 14].fill((at as u8 + 7) | 1));
    let mut now = vec![0; FILE as usize];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == wanted);
    assert!(gpu.info().chunks_evicted > 10);
}

#[test]
fn epochs_of_threads_keep_their_stores_beside_evictions_and_servers_that_die() {
    const ROUNDS: u64 = 60;
    let Some((mount, file)) = mounted() else { return };
    let device = device(LIMIT);
    let maps: Vec<Map> = (0..2).map(|_| map(&file, Access::Write, device)).collect();
    let redone = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (gpu, redone) = (&maps[thread as usize % 2], &redone);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for round in 0..ROUNDS {
                    // Each thread adds to bytes of its own, in pages of all.
                    let at = random.range(0, FILE / P / 16) * 16 * P;
                    let byte = at + 100 + thread;
                    loop {
                        match gpu.acquire(at, P, Access::Write) {
                            Ok(_) => {}
                            Err(e) if e.errno == Errno::STALE => {
                                gpu.discard(at, P).unwrap();
                                continue;
                            }
                            Err(e) => panic!("{e}"),
                        }
                        let now = load(device, gpu, byte, 1)[0].wrapping_add(1);
                        store(device, gpu, byte, &[now]);
                        match gpu.release(at, P) {
                            // Another thread has released the page.
                            Ok(_) => break,
                            Err(e) if e.errno == Errno::INVAL => break,
                            Err(e) if e.errno == Errno::STALE => redone.fetch_add(1, SeqCst),
                            Err(e) => panic!("round {round}: {e}"),
                        };
                    }
                }
            });
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        mount.kill_server();
    });
    let evicted: u64 = maps.iter().map(|map| map.info().chunks_evicted).sum();
    assert!(evicted > ROUNDS, "{evicted} evicted, {} redone", redone.load(SeqCst));
    // What is not one of these bytes is as it was.
    let mut now = vec![0; FILE as usize];
    file.read_exact_at(&mut now, 0).unwrap();
    let wanted = contents();
    for (page, bytes) in now.chunks(PAGE).enumerate() {
        let before = &wanted[page * PAGE..][..PAGE];
        assert!(bytes[..100] == before[..100] && bytes[104..] == before[104..], "page {page}");
    }
}

#[test]
fn two_maps_compete_and_lose_no_update() {
    const ROUNDS: usize = 3;
    let Some((mount, file)) = mounted() else { return };
    let device = device(3 * CHUNK);
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let file = &file;
            scope.spawn(move || {
                let gpu = map(file, Access::Write, device);
                for chunk in (0..FILE / CHUNK).cycle().skip(thread as usize * 5).take(ROUNDS * 16) {
                    // The two write different bytes of the same pages.
                    let at = chunk * CHUNK + CHUNK - P;
                    let done = loop {
                        let acquired = gpu.acquire(at, P, Access::Write);
                        let done = acquired.and_then(|_| {
                            let now = load(device, &gpu, at + thread, 1)[0].wrapping_add(1);
                            store(device, &gpu, at + thread, &[now]);
                            gpu.release(at, P)
                        });
                        match done {
                            Err(e) if e.errno == Errno::STALE => gpu.discard(at, P).unwrap(),
                            done => break done,
                        }
                    };
                    assert_eq!(done.unwrap(), P);
                }
                assert!(gpu.info().chunks_evicted > 0);
            });
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        mount.kill_server();
    });
    let mut wanted = contents();
    for chunk in 0..FILE / CHUNK {
        let at = (chunk * CHUNK + CHUNK - P) as usize;
        wanted[at..at + 2].iter_mut().for_each(|byte| *byte = byte.wrapping_add(ROUNDS as u8));
    }
    let mut now = vec![0; FILE as usize];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == wanted);
}

#[test]
fn acquire_fails_while_all_memory_is_in_epochs_and_succeeds_after_a_release() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device(LIMIT);
    let (one, two) = (map(&file, Access::Write, device), map(&file, Access::Read, device));
    one.acquire(0, LIMIT / 2, Access::Write).unwrap();
    store(device, &one, 5, &[200]);
    two.acquire(0, LIMIT / 2, Access::Read).unwrap();
    for map in [&one, &two] {
        let error = map.acquire(LIMIT, 1, Access::Read).unwrap_err();
        assert_eq!(error.errno, Errno::NOMEM);
        assert!(error.to_string().contains("release"), "{error}");
    }
    // What is there can be acquired again, and released.
    two.acquire(0, P, Access::Read).unwrap();
    assert_eq!(one.release(0, LIMIT / 2).unwrap(), P);
    two.acquire(LIMIT, LIMIT / 2, Access::Read).unwrap();
    assert!(load(device, &two, LIMIT, LIMIT / 2) == contents()[LIMIT as usize..][..LIMIT as usize / 2]);
    assert_eq!((one.info().device_bytes, one.info().chunks_evicted), (0, LIMIT / 2 / CHUNK));
    assert!(one.acquire(0, P, Access::Read).is_err());
    // Advice gives up what was read.
    two.advise(0, FILE, Advice::DontNeed).unwrap();
    assert_eq!(two.info().device_bytes, 0);
    one.acquire(0, LIMIT, Access::Read).unwrap();
    assert_eq!(load(device, &one, 5, 1), [200]);
}

#[test]
fn bytes_of_cpu_programs_arrive_in_chunks_that_were_evicted_meanwhile() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device(2 * CHUNK);
    let gpu = map(&file, Access::Read, device);
    let mut random = Random::new(3);
    let mut wanted = contents();
    for round in 0..100 {
        let page = random.range(0, FILE / P);
        let (at, byte) = (page * P + random.range(0, P), round as u8);
        if random.range(0, 2) == 0 {
            file.write_all_at(&[byte], at).unwrap();
            wanted[at as usize] = byte;
        }
        // Around it, and somewhere else.
        for first in [page.saturating_sub(3), random.range(0, FILE / P)] {
            let (first, len) = (first * P, (7 * P).min(FILE - first * P));
            gpu.acquire(first, len, Access::Read).unwrap();
            assert!(load(device, &gpu, first, len) == wanted[first as usize..][..len as usize], "round {round}");
            gpu.release(first, len).unwrap();
        }
    }
    assert!(gpu.info().chunks_evicted > 50);
}

type Body = Box<dyn FnOnce() + Send>;

unsafe extern "C" fn call(argument: *mut c_void) {
    // SAFETY: made by `launch` for this call.
    let body = unsafe { Box::from_raw(argument.cast::<Body>()) };
    body();
}

/// A GPU kernel that adds 1 to each byte of a range.
fn add_one(device: &Emulated, stream: StreamId, at: u64, len: u64) {
    let body: Body = Box::new(move || {
        // SAFETY: device memory is accessible while a kernel runs.
        let bytes = unsafe { core::slice::from_raw_parts_mut(at as *mut u8, len as usize) };
        bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    });
    // SAFETY: the function is called once with its box.
    unsafe { device.launch(stream, call, Box::into_raw(Box::new(body)).cast()) }.unwrap();
}

#[test]
fn calls_in_stream_order_stay_within_the_limit() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device(LIMIT);
    let gpu = Arc::new(map(&file, Access::Write, device));
    let streams = [StreamId(0), device.new_stream().unwrap(), device.new_stream().unwrap()];
    let published = Arc::new(AtomicU64::new(0));
    for (n, (at, len)) in windows().enumerate() {
        let stream = streams[n % streams.len()];
        gpu.acquire_async(at, len, Access::Write, stream).unwrap();
        add_one(device, stream, gpu.address() + at, len);
        let sum = Arc::clone(&published);
        let report = move |bytes: &Result<u64, spinio_gaia::Error>| {
            sum.fetch_add(bytes.as_ref().map_or(0, |bytes| *bytes), SeqCst);
        };
        gpu.release_async(at, len, StreamRelease::new(stream, report)).unwrap();
        assert!(gpu.info().device_bytes <= LIMIT);
    }
    gpu.sync(0, FILE).unwrap();
    assert_eq!(published.load(SeqCst), FILE);
    let wanted: Vec<u8> = contents().iter().map(|byte| byte.wrapping_add(1)).collect();
    let mut now = vec![0; FILE as usize];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == wanted);
    // Reading in stream order: what is not released stays, and the call that finds no memory fails at once.
    gpu.acquire_async(0, LIMIT, Access::Read, streams[0]).unwrap();
    assert_eq!(gpu.acquire_async(LIMIT, 1, Access::Read, streams[1]).unwrap_err().errno, Errno::NOMEM);
    gpu.release_async(0, LIMIT, StreamRelease::new(streams[0], |_| ())).unwrap();
    gpu.acquire_async(LIMIT, 1, Access::Read, streams[1]).unwrap();
    gpu.sync(0, 1).unwrap();
    assert_eq!(load(device, &gpu, LIMIT, 1), wanted[LIMIT as usize..][..1]);
}
