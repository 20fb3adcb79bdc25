//! Maps of files of a mount, in CUDA memory, by the fake driver: it dies where the real one would crash, as in a thread
//! that does not share the program's descriptors.
//!
//! Maps on a GPU are tested there: crates/python/tests/test_gaia.py, and the demo.

#![expect(unsafe_code, reason = "device memory")]

mod common;
#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use spinio_device::{Device, DeviceAddr, DeviceKind, StreamId, WaitMode, registry};
use spinio_gaia::{Access, InPlaceWay, Map, PeerRefusal, StreamRelease};
use spinio_sys::cuda::Driver;

use crate::common::TestMount;

const PAGE: usize = 4096;
/// In the environment of a process that runs one test.
const ALONE: &str = "SPINIO_GAIAD_TEST_ALONE";

#[test]
fn server_role() {
    common::server_role();
}

/// The device of the context that is now current on this thread.
fn gpu() -> Option<&'static dyn Device> {
    gpu_of(0)
}

fn gpu_of(ordinal: i32) -> Option<&'static dyn Device> {
    let _fake = fake::open()?;
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    let context = driver.primary_retain(ordinal).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { driver.set_current(context) }.unwrap();
    registry::current_device()
}

/// Runs a test of this program in a process of its own, which has this value of [`ALONE`].
fn run_alone(name: &str, value: &str) {
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    assert!(test.args(["--exact", name, "--nocapture"]).env(ALONE, value).status().unwrap().success());
}

/// Whether this process has been started for the test; if not, another one has run it.
fn runs_alone(name: &str) -> bool {
    let alone = std::env::var_os(ALONE).is_some();
    if !alone {
        run_alone(name, "1");
    }
    alone
}

fn load(device: &dyn Device, map: &Map, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let from = DeviceAddr(map.address() + offset as u64);
    // SAFETY: the fake driver copies at once.
    unsafe { device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, len) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

fn store(device: &dyn Device, map: &Map, offset: usize, bytes: &[u8]) {
    let to = DeviceAddr(map.address() + offset as u64);
    // SAFETY: as above.
    unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
}

#[test]
fn cuda_memory_and_cpu_programs_see_each_other() {
    let Some(device) = gpu() else { return };
    assert_eq!(device.id().kind, DeviceKind::Cuda);
    let before: Vec<u8> = (0..10 * PAGE + 100).map(|i| (i * 7) as u8).collect();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), &before).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = |access| Map::new(file.as_raw_fd(), 0, 11 * PAGE as u64, access, device).unwrap();
    let (writer, reader) = (map(Access::Write), map(Access::Read));
    let whole = writer.len();
    let mut now = before;
    assert_eq!(writer.acquire(0, whole, Access::Write).unwrap(), now.len() as u64);
    assert_eq!(load(device, &writer, 0, now.len()), now);
    for round in 0..20_u8 {
        // Different bytes of one page: by a kernel, and by a CPU program that the kernel does not see yet.
        let page = usize::from(round) % 10 * PAGE;
        store(device, &writer, page + 3, &[round, 250]);
        file.write_all_at(&[round, 249], (page + 9) as u64).unwrap();
        now[page + 3..page + 5].copy_from_slice(&[round, 250]);
        now[page + 9..page + 11].copy_from_slice(&[round, 249]);
        if round % 5 == 4 {
            writer.release(0, whole).unwrap();
            reader.acquire(0, whole, Access::Read).unwrap();
            assert_eq!(load(device, &reader, 0, now.len()), now, "round {round}");
            let mut read = vec![0; now.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(read, now, "round {round}");
            if round == 9 {
                mount.kill_server();
            }
            writer.acquire(0, whole, Access::Write).unwrap();
        }
    }
    let info = writer.info();
    assert_eq!((info.releases, info.reattached, info.pages_committed), (4, 1, 20));
    assert_eq!(writer.release(0, whole).unwrap(), 0, "no store changed a byte");
}

/// The context of a map may be destroyed: its calls then fail, and the map can be dropped.
#[test]
fn map_of_a_destroyed_context_fails_and_can_be_unmapped() {
    // In a process of its own: the other test uses the context.
    if !runs_alone("map_of_a_destroyed_context_fails_and_can_be_unmapped") {
        return;
    }
    let Some(device) = gpu() else { return };
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGE]).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = Map::new(file.as_raw_fd(), 0, PAGE as u64, Access::Write, device).unwrap();
    map.acquire(0, PAGE as u64, Access::Write).unwrap();
    fake::open().unwrap().reset(0);
    assert_eq!(map.release(0, PAGE as u64).unwrap_err().errno, Errno::IO);
    drop(map);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1]);
}

/// A file of four times the limit, through chunks of the driver's virtual memory management.
#[test]
fn chunks_of_cuda_memory_are_evicted_and_come_back() {
    // In a process of its own, which has a limit.
    if !runs_alone("chunks_of_cuda_memory_are_evicted_and_come_back") {
        return;
    }
    const CHUNK: usize = 2 << 20;
    let Some(device) = gpu() else { return };
    spinio_gaia::limit_memory(device, Some(2 * CHUNK as u64));
    let before: Vec<u8> = (0..8 * CHUNK).map(|i| (i * 7 % 251) as u8).collect();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), &before).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = Arc::new(Map::new(file.as_raw_fd(), 0, before.len() as u64, Access::Write, device).unwrap());
    let page = PAGE as u64;
    let stream = device.acquire_stream().unwrap();
    let mut wanted = before;
    for round in 1..4_u8 {
        for chunk in 0..8 {
            // Two pages on both sides of the end of a chunk, but of the last one.
            let at = (chunk + 1) * CHUNK - PAGE;
            let len = (2 * PAGE).min(wanted.len() - at);
            if round == 2 {
                map.acquire_async(at as u64, len as u64, Access::Write, stream).unwrap();
                map.sync(0, page).unwrap();
            } else {
                map.acquire(at as u64, len as u64, Access::Write).unwrap();
            }
            assert_eq!(load(device, &map, at, len), wanted[at..at + len], "round {round}, chunk {chunk}");
            store(device, &map, at + 100, &[round]);
            wanted[at + 100] = round;
            if round == 2 {
                map.release_async(at as u64, len as u64, StreamRelease::new(stream, |_| ())).unwrap();
            } else {
                assert_eq!(map.release(at as u64, len as u64).unwrap(), page);
            }
            assert!(map.info().device_bytes <= 2 * CHUNK as u64);
        }
    }
    map.sync(0, page).unwrap();
    let mut now = vec![0; wanted.len()];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == wanted);
    assert!(map.info().chunks_evicted >= 20, "{:?}", map.info());
    // While a stream is captured nothing is evicted.
    fake::open().unwrap().capture(1);
    assert_eq!(map.acquire(0, page, Access::Write).unwrap_err().errno, Errno::BUSY);
    fake::open().unwrap().capture(0);
    map.acquire(0, page, Access::Write).unwrap();
    assert_eq!(fake::open().unwrap().invalidated(), 0);
    let at = map.address();
    device.release_stream(stream);
    drop(map);
    assert!(registry::find(at as *const u8, 1).is_none());
}

/// A large release goes through a stage that the driver knows, unless it refuses.
#[test]
fn stage_is_registered_by_a_large_release_and_unregistered_with_the_map() {
    // In a process of its own: the other tests register memory too.
    if !runs_alone("stage_is_registered_by_a_large_release_and_unregistered_with_the_map") {
        return;
    }
    const LEN: usize = 12 << 20;
    let Some(device) = gpu() else { return };
    let Some(mount) = TestMount::with_supervisor(
        |dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap(),
        |command| {
            command.env(common::MEMORY, (LEN * 3).to_string());
        },
    ) else {
        return;
    };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = || Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device).unwrap();
    let fake = fake::open().unwrap();
    let release = |map: &Map, byte: u8, len: usize| {
        map.overwrite(0, len as u64).unwrap();
        store(device, map, 0, &vec![byte; len]);
        assert_eq!(map.release(0, len as u64).unwrap(), len as u64);
        let mut now = vec![0; len];
        file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == vec![byte; len], "{byte}");
    };
    let before = fake.live_pins();
    let often = map();
    for time in 1..=8 {
        release(&often, time, 8 << 20);
        assert_eq!(fake.live_pins(), before + i32::from(time == 8), "time {time}: 64 MiB are worth it");
    }
    drop(often);
    assert_eq!(fake.live_pins(), before);
    let (known, refused) = (map(), map());
    release(&known, 2, 8 << 20);
    assert_eq!(fake.live_pins(), before, "as much as the stage: it would cost more than it saves");
    release(&known, 3, LEN);
    release(&known, 4, LEN);
    assert_eq!(fake.live_pins(), before + 1);
    fake.fail_register(2);
    release(&refused, 5, LEN);
    fake.fail_register(0);
    release(&refused, 6, LEN);
    assert_eq!(fake.live_pins(), before + 1, "it is not asked again");
    // The stage of a server that has ended stays until the map ends.
    mount.kill_server();
    release(&known, 7, LEN);
    assert_eq!(fake.live_pins(), before + 2);
    drop(known);
    assert_eq!(fake.live_pins(), before);
    drop(refused);
}

/// Stops of streams, with the driver's waits and, as on a driver that has none, in host functions. The fake driver dies
/// if anything is made, registered or freed while a stream waits.
#[test]
fn calls_in_stream_order_run_beside_the_stopped_stream() {
    // In a process of its own: the other tests make and free memory meanwhile.
    let Some(waits) = std::env::var_os(ALONE) else {
        for waits in ["1", "0"] {
            run_alone("calls_in_stream_order_run_beside_the_stopped_stream", waits);
        }
        return;
    };
    let Some(device) = gpu() else { return };
    fake::open().unwrap().no_stream_wait(i32::from(waits == "0"));
    const PAGES: usize = 700;
    let before: Vec<u8> = (0..PAGES * PAGE).map(|i| (i * 7 % 251) as u8).collect();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), &before).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = || Arc::new(Map::new(file.as_raw_fd(), 0, before.len() as u64, Access::Write, device).unwrap());
    let (one, two) = (map(), map());
    let (whole, stream) = (one.len(), device.acquire_stream().unwrap());
    let (sender, published) = mpsc::channel();
    for round in 0..10_u8 {
        for (map, stream, at) in [(&one, StreamId(0), 3), (&two, stream, 5)] {
            map.acquire_async(0, whole, Access::Write, stream).unwrap();
            // Many pages: ten are what the memory of a mount of the tests has room for.
            let stores = vec![round; if round == 4 { 10 * PAGE } else { 1 }];
            let to = DeviceAddr(map.address() + at);
            // SAFETY: the fake driver copies at once.
            unsafe { device.copy_in(stream, to, stores.as_ptr(), stores.len()) }.unwrap();
            // Of a CPU program meanwhile, in the same page.
            file.write_all_at(&[round, 77], 9).unwrap();
            let sender = sender.clone();
            let report = move |result: &Result<u64, _>| sender.send(result.is_ok()).unwrap();
            map.release_async(0, whole, StreamRelease::new(stream, report)).unwrap();
        }
    }
    assert_eq!(published.iter().take(20).filter(|done| *done).count(), 20);
    let mut now = vec![0; before.len()];
    file.read_exact_at(&mut now, 0).unwrap();
    let mut wanted = before;
    wanted[3..5 + 10 * PAGE].fill(4);
    wanted[3] = 9;
    wanted[5] = 9;
    wanted[9..11].copy_from_slice(&[9, 77]);
    assert!(now == wanted);
    one.acquire(0, whole, Access::Read).unwrap();
    assert_eq!(load(device, &one, 0, now.len()), now);
    // What the driver refuses is reported by the next call.
    let fake = fake::open().unwrap();
    two.acquire_async(0, whole, Access::Write, stream).unwrap();
    fake.fail_copy(700);
    two.release_async(0, whole, StreamRelease::new(stream, |_| ())).unwrap();
    fake.fail_copy(0);
    assert_eq!(two.sync(0, whole).unwrap_err().errno, Errno::IO);
    two.sync(0, whole).unwrap();
    fake.capture(1);
    assert_eq!(two.acquire_async(0, whole, Access::Write, StreamId(0)).unwrap_err().errno, Errno::BUSY);
    fake.capture(0);
    assert_eq!(fake.invalidated(), 0);
    device.release_stream(stream);
    drop(two);
    // The context is destroyed while calls are queued: no call waits for them.
    fake.hang(1);
    for _ in 0..3 {
        one.acquire_async(0, whole, Access::Write, StreamId(0)).unwrap();
    }
    let syncing = Arc::clone(&one);
    let synced = std::thread::spawn(move || syncing.sync(0, 1));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!synced.is_finished());
    fake.reset(0);
    assert!(synced.join().unwrap().is_ok(), "it uses no device");
    assert_eq!(one.acquire_async(0, whole, Access::Write, StreamId(0)).unwrap_err().errno, Errno::IO);
    assert_eq!(one.acquire(0, whole, Access::Write).unwrap_err().errno, Errno::IO);
}

/// A device whose copies fail: the call says so, nothing is published, no byte is wrong later, and other programs use the
/// file as before.
#[test]
fn copies_that_fail_in_an_epoch_publish_nothing_and_harm_no_other_program() {
    // In a process of its own: the other tests copy meanwhile.
    const PAGES: usize = 40;
    if !runs_alone("copies_that_fail_in_an_epoch_publish_nothing_and_harm_no_other_program") {
        return;
    }
    let Some(device) = gpu() else { return };
    let fake = fake::open().unwrap();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGES * PAGE]).unwrap()) else {
        return;
    };
    let file = common::gpu::open(&mount.dir.join("file"));
    let map = Map::new(file.as_raw_fd(), 0, (PAGES * PAGE) as u64, Access::Write, device).unwrap();
    // Another program, on another device.
    let other = common::gpu::Gpu::new(&file, PAGES);
    let (whole, mut shown) = (map.len(), 1);
    for round in 10..20_u8 {
        let fails_acquire = round % 2 == 0;
        if fails_acquire {
            file.write_all_at(&[round; PAGES * PAGE], 0).unwrap();
            fake.fail_copy(700);
            assert_eq!(map.acquire(0, whole, Access::Write).unwrap_err().errno, Errno::IO);
            fake.fail_copy(0);
        }
        other.acquire();
        other.store(5, &[round]);
        other.release();
        if map.acquire(0, whole, Access::Write).is_err_and(|error| error.errno == Errno::STALE) {
            map.acquire(0, whole, Access::Write).unwrap();
        }
        if fails_acquire {
            shown = round;
        }
        let mut wanted = vec![shown; PAGES * PAGE];
        wanted[5] = round;
        assert!(load(device, &map, 0, PAGES * PAGE) == wanted, "round {round}");
        store(device, &map, 100, &vec![round + 100; 30 * PAGE]);
        fake.fail_copy(700);
        assert_eq!(map.release(0, whole).unwrap_err().errno, Errno::IO);
        fake.fail_copy(0);
        let mut now = vec![0; PAGES * PAGE];
        file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == wanted, "round {round}: nothing is published");
        // The program discards the epoch, whatever is left of it.
        map.discard(0, whole).unwrap();
        file.sync_all().unwrap();
    }
    drop((map, other, file));
    assert_eq!(mount.servers(), 1);
    common::audit::nothing_is_left(&mount, 0);
}

/// The cost of single pages: calls of the driver, however many pages have changed.
#[test]
fn scattered_pages_take_a_few_calls_of_the_driver() {
    // In a process of its own: calls are counted.
    if !runs_alone("scattered_pages_take_a_few_calls_of_the_driver") {
        return;
    }
    const PAGES: usize = 2048;
    const SCATTERED: usize = 512;
    let Some(device) = gpu() else { return };
    let fake = fake::open().unwrap();
    let mut now: Vec<u8> = (0..PAGES * PAGE).map(|i| (i / 4 % 251) as u8).collect();
    let Some(mount) = TestMount::with_supervisor(
        |dir| std::fs::write(dir.join("file"), &now).unwrap(),
        |command| {
            command.env(common::MEMORY, (PAGES * PAGE * 2).to_string());
        },
    ) else {
        return;
    };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = Map::new(file.as_raw_fd(), 0, now.len() as u64, Access::Write, device).unwrap();
    let whole = map.len();
    let calls_of = |call: &dyn Fn()| {
        let before = fake.calls();
        call();
        fake.calls() - before
    };
    let acquire = || assert_eq!(map.acquire(0, whole, Access::Write).unwrap(), whole);
    let release = || assert!(map.release(0, whole).unwrap() <= whole);
    acquire();
    release();
    let at = |n: usize| n * (PAGES / SCATTERED) * PAGE;
    for round in 1..4 {
        for n in 0..SCATTERED {
            file.write_all_at(&[round; 3], (at(n) + 9) as u64).unwrap();
            now[at(n) + 9..][..3].fill(round);
        }
        // One for the pages, a scan and the copy of its result.
        assert_eq!(calls_of(&acquire), 3, "round {round}");
        assert!(load(device, &map, 0, now.len()) == now, "round {round}");
        for n in 0..SCATTERED {
            store(device, &map, at(n) + 50, &[round; 5]);
            now[at(n) + 50..][..5].fill(round);
        }
        assert_eq!(calls_of(&release), 3, "round {round}");
        let mut read = vec![0; now.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == now, "round {round}");
        assert_eq!((calls_of(&acquire), calls_of(&release)), (0, 2), "nothing has changed");
    }
    assert_eq!(map.info().pages_committed, 3 * SCATTERED as u64);
    // Pages far from each other are not scanned, and once there were some hundred of them, copied by one call.
    map.sync(0, whole).unwrap();
    drop(map);
    let map = Map::new(file.as_raw_fd(), 0, now.len() as u64, Access::Write, device).unwrap();
    map.acquire(0, whole, Access::Write).unwrap();
    map.release(0, whole).unwrap();
    let calls: Vec<_> = (0..9u8)
        .map(|round| {
            (0..32).for_each(|n| file.write_all_at(&[round], (n * 64 * PAGE) as u64).unwrap());
            let calls = calls_of(&|| assert_eq!(map.acquire(0, whole, Access::Write).unwrap(), whole));
            map.release(0, whole).unwrap();
            calls
        })
        .collect();
    assert_eq!((&calls[..7], calls[8]), (&[32; 7][..], 1));
}

/// What copies from another GPU cost: a driver call for each run of pages in a chunk of the other map; and once, for all chunks
/// that lie side by side, one that lets this GPU load them.
#[test]
fn pages_of_another_gpu_take_one_driver_call_for_each_chunk() {
    // In a process of its own: calls are counted.
    if !runs_alone("pages_of_another_gpu_take_one_driver_call_for_each_chunk") {
        return;
    }
    const LEN: usize = 8 << 20;
    const CHUNKS: i32 = 4;
    let (Some(one), Some(other)) = (gpu_of(0), gpu_of(1)) else { return };
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = |access, device| Map::new(file.as_raw_fd(), 0, LEN as u64, access, device).unwrap();
    let (source, copy) = (map(Access::Write, one), map(Access::Read, other));
    // Its memory is there.
    copy.acquire(0, LEN as u64, Access::Read).unwrap();
    let mut wanted: Vec<u8> = (0..LEN).map(|n| (n * 7 % 253) as u8).collect();
    file.write_all_at(&wanted, 0).unwrap();
    source.acquire(0, LEN as u64, Access::Write).unwrap();
    store(one, &source, LEN / 2, &[77; 100]);
    wanted[LEN / 2..][..100].fill(77);
    source.release(0, LEN as u64).unwrap();
    let fake = fake::open().unwrap();
    let acquire = || {
        let before = (fake.calls(), fake.vmm_calls());
        copy.acquire(0, LEN as u64, Access::Read).unwrap();
        (fake.calls() - before.0, fake.vmm_calls() - before.1)
    };
    let first = acquire();
    assert_eq!(copy.info().bytes_from_peer, LEN as u64, "{:?}", copy.info());
    assert!(load(other, &copy, 0, LEN) == wanted);
    // All of it changes, and is copied again.
    wanted.iter_mut().for_each(|byte| *byte ^= 1);
    file.write_all_at(&wanted, 0).unwrap();
    source.acquire(0, LEN as u64, Access::Write).unwrap();
    source.release(0, LEN as u64).unwrap();
    assert_eq!((first, acquire()), ((CHUNKS, 1), (CHUNKS, 0)));
    assert_eq!(copy.info().bytes_from_peer, 2 * LEN as u64);
    assert!(load(other, &copy, 0, LEN) == wanted);
    // A driver that does not copy: the file is read, as far as it is needed, and the reason is told.
    file.write_all_at(&wanted[..LEN / 2], 0).unwrap();
    file.write_all_at(&[5], 0).unwrap();
    file.write_all_at(&[5; 2 << 20], 2 << 20).unwrap();
    wanted[0] = 5;
    wanted[2 << 20..4 << 20].fill(5);
    source.acquire(0, LEN as u64, Access::Write).unwrap();
    source.release(0, LEN as u64).unwrap();
    fake.fail_copy_within(801);
    copy.acquire(0, LEN as u64, Access::Read).unwrap();
    fake.fail_copy_within(0);
    assert!(load(other, &copy, 0, LEN) == wanted);
    let info = copy.info();
    // Of the pages that were written with the bytes that they had, too.
    assert_eq!((info.bytes_from_peer, info.peer_bytes_refused), (2 * LEN as u64, LEN as u64 / 2));
    assert_eq!(PeerRefusal::of_number(info.peer_refused), Some(PeerRefusal::Copy));
}

/// New chunks of a map are made accessible by one call of the driver, after all of them are there; if that fails, no chunk
/// is used, none is lost, and an epoch goes on.
#[test]
fn memory_that_cannot_be_made_accessible_fails_the_acquire_and_nothing_else() {
    // In a process of its own: calls of virtual memory management fail.
    if !runs_alone("memory_that_cannot_be_made_accessible_fails_the_acquire_and_nothing_else") {
        return;
    }
    const CHUNK: u64 = 2 << 20;
    const LEN: u64 = 4 * CHUNK;
    const NO_MEMORY: i32 = 2;
    let (Some(one), Some(other)) = (gpu_of(0), gpu_of(1)) else { return };
    let wanted: Vec<u8> = (0..LEN).map(|n| (n * 7 % 253) as u8).collect();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), &wanted).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = |access, device| Map::new(file.as_raw_fd(), 0, LEN, access, device).unwrap();
    let fake = fake::open().unwrap();
    // From the file, beside an epoch of another chunk.
    let source = map(Access::Write, one);
    source.acquire(0, CHUNK, Access::Write).unwrap();
    store(one, &source, 5, &[99]);
    fake.fail_access(NO_MEMORY, 0);
    assert_eq!(source.acquire(CHUNK, LEN - CHUNK, Access::Write).unwrap_err().errno, Errno::NOMEM);
    fake.fail_access(0, 0);
    assert_eq!(source.info().device_bytes, LEN, "the chunks stay for the next acquire, or are evicted");
    assert_eq!(source.release(0, CHUNK).unwrap(), PAGE as u64);
    let calls = fake.vmm_calls();
    source.acquire(0, LEN, Access::Write).unwrap();
    assert_eq!(fake.vmm_calls() - calls, 1);
    source.release(0, LEN).unwrap();
    let now = load(one, &source, 0, LEN as usize);
    assert!(now[5] == 99 && now[..5] == wanted[..5] && now[6..] == wanted[6..]);
    // From the other GPU. The first call would let this one access its own memory: without that there is no copy, and no read
    // of the file either. The second one would let it load the other's chunks: the file is read instead.
    let copy = map(Access::Read, other);
    for good in [0, 1] {
        fake.fail_access(NO_MEMORY, good);
        let acquired = copy.acquire(0, LEN, Access::Read);
        fake.fail_access(0, 0);
        let info = copy.info();
        assert_eq!((info.device_bytes, info.bytes_from_peer), (LEN, 0));
        if good == 0 {
            assert_eq!((acquired.unwrap_err().errno, info.bytes_from_file), (Errno::NOMEM, 0));
            assert_eq!(copy.release(0, LEN).unwrap_err().errno, Errno::INVAL, "nothing was acquired");
        } else {
            // The page that was stored to is not in the file.
            assert_eq!((acquired.unwrap(), info.bytes_from_file), (LEN, LEN - PAGE as u64));
            assert!(load(other, &copy, 0, LEN as usize) == now);
            copy.release(0, LEN).unwrap();
        }
        assert_eq!(
            PeerRefusal::of_number(info.peer_refused),
            Some([PeerRefusal::Copy, PeerRefusal::Import][good as usize])
        );
    }
    drop(copy);
    let copy = map(Access::Read, other);
    let calls = fake.vmm_calls();
    copy.acquire(0, LEN, Access::Read).unwrap();
    assert!(load(other, &copy, 0, LEN as usize) == now);
    // Four chunks are mapped, and one call for each side makes them accessible.
    assert_eq!((copy.info().bytes_from_peer, fake.vmm_calls() - calls), (LEN, 4 + 2));
}

/// A map in place is a mapping of the file where the driver says that kernels access memory of the process.
#[test]
fn map_in_place_is_coherent_where_the_driver_says_so() {
    if !runs_alone("map_in_place_is_coherent_where_the_driver_says_so") {
        return;
    }
    let Some(device) = gpu() else { return };
    let fake = fake::open().unwrap();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGE]).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = |access| spinio_gaia::map_in_place(file.as_raw_fd(), 0, PAGE as u64, access, device);
    for (how, way) in [(0, InPlaceWay::Registered), (1, InPlaceWay::Faults), (2, InPlaceWay::HostPageTables)] {
        fake.pageable(how);
        let (address, pins) = (map(Access::Read).unwrap(), fake.live_pins());
        let info = spinio_gaia::with_map(address, |map, _| {
            map.acquire(0, PAGE as u64, Access::Read)?;
            assert_eq!(map.device().kind, DeviceKind::Cuda);
            Ok(map.info())
        });
        assert_eq!((info.unwrap().in_place, fake.live_pins() - pins), (way as u64, i32::from(how == 0)));
        spinio_gaia::unmap(address).unwrap();
        assert_eq!(map(Access::Write).map_err(|e| e.errno).err(), (how == 0).then_some(Errno::INVAL));
    }
    let address = map(Access::Write).unwrap();
    let whole = PAGE as u64;
    spinio_gaia::with_map(address, |map, _| map.acquire(0, whole, Access::Write)).unwrap();
    // SAFETY: a page of the map, which the driver's kernels access as the CPU does.
    unsafe { (address as *mut u8).add(7).write_volatile(9) };
    fake.capture(1);
    let captured = spinio_gaia::with_map(address, |map, _| map.release(0, whole)).unwrap_err();
    fake.capture(0);
    assert_eq!((captured.errno, fake.invalidated()), (Errno::BUSY, 0), "{captured}");
    assert_eq!(spinio_gaia::with_map(address, |map, _| map.release(0, whole)).unwrap(), 0);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 7).unwrap();
    assert_eq!(byte, [9]);
}
