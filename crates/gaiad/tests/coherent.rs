//! Maps in place on a device whose kernels access all memory of the process: mappings of the file.

#![expect(unsafe_code, reason = "mappings, kernels and device memory")]

mod common;

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use spinio_device::StreamId;
use spinio_device::emulated::{Config, Emulated};
use spinio_gaia::coherent::Map;
use spinio_gaia::{Access, Advice, InPlaceWay, StreamRelease};
use spinio_gaiad::MapKind;
use spinio_testkit::eventually;

use crate::common::TestMount;
use crate::common::gpu::{Gpu, PAGE, open};

const PAGES: usize = 8;
const LEN: usize = PAGES * PAGE;
/// In the environment of a process that loads a page that was cut off, to its file.
const CUT: &str = "SPINIO_GAIAD_TEST_CUT";

#[test]
fn server_role() {
    common::server_role();
}

/// A device whose kernels access all memory of the process.
fn device() -> &'static Emulated {
    Emulated::start(Config::parse("size=16M,hmm=1").unwrap()).unwrap()
}

/// A map, and its device.
struct Coherent(Map, &'static Emulated);

/// What a kernel does: stores `len` bytes of one value, or loads one.
struct Work {
    at: *mut u8,
    len: usize,
    byte: u8,
    /// Until it stores.
    sleep_ms: u64,
}

unsafe extern "C" fn store(work: *mut c_void) {
    // SAFETY: `Coherent::launch` waits before it returns, or the test does before `work` is dropped.
    let work = unsafe { &*work.cast::<Work>() };
    std::thread::sleep(std::time::Duration::from_millis(work.sleep_ms));
    // SAFETY: pages of a map for writing.
    (0..work.len).for_each(|at| unsafe { work.at.add(at).write_volatile(work.byte) });
}

unsafe extern "C" fn load(work: *mut c_void) {
    // SAFETY: as above.
    let work = unsafe { &mut *work.cast::<Work>() };
    // SAFETY: a page of a map.
    work.byte = unsafe { work.at.read_volatile() };
}

impl Coherent {
    fn new(file: &File, access: Access) -> Coherent {
        let device = device();
        Coherent(Map::new(file.as_raw_fd(), 0, LEN as u64, access, device).unwrap(), device)
    }

    fn acquire(&self, access: Access) -> u64 {
        self.0.acquire(0, LEN as u64, access).unwrap()
    }

    fn run(&self, kernel: unsafe extern "C" fn(*mut c_void), at: usize, len: usize, byte: u8) -> u8 {
        let at = (self.0.address() as *mut u8).wrapping_add(at);
        let mut work = Work { at, len, byte, sleep_ms: 0 };
        // SAFETY: waited for.
        unsafe { self.1.launch(StreamId(0), kernel, (&raw mut work).cast()) }.unwrap();
        self.1.wait_stream(StreamId(0)).unwrap();
        work.byte
    }

    fn load(&self, at: usize) -> u8 {
        self.run(load, at, 1, 0)
    }

    fn store(&self, at: usize, len: usize, byte: u8) {
        self.run(store, at, len, byte);
    }

    /// One epoch that stores.
    fn epoch(&self, at: usize, len: usize, byte: u8) {
        self.acquire(Access::Write);
        self.store(at, len, byte);
        self.0.release(0, LEN as u64).unwrap();
    }
}

/// A CPU program's mapping of the first pages.
struct CpuMapping(*mut u8);

impl CpuMapping {
    fn new(file: &File) -> CpuMapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, protection, MapFlags::SHARED, file, 0) };
        CpuMapping(at.unwrap().cast())
    }

    fn load(&self, at: usize) -> u8 {
        // SAFETY: inside the mapping, and the tests keep the file as long as that.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn store(&self, at: usize, byte: u8) {
        // SAFETY: as above.
        unsafe { self.0.add(at).write_volatile(byte) }
    }
}

impl Drop for CpuMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping, which nothing uses any more.
        unsafe { rustix::mm::munmap(self.0.cast(), LEN).unwrap() };
    }
}

fn read(file: &File, at: usize) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at as u64).unwrap();
    byte[0]
}

fn mounted() -> Option<(TestMount, PathBuf)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap())?;
    let path = mount.dir.join("file");
    Some((mount, path))
}

#[test]
fn kernels_and_cpu_programs_see_each_other_without_acquire_and_release() {
    let Some((_mount, path)) = mounted() else { return };
    let file = open(&path);
    let (map, cpu) = (Coherent::new(&file, Access::Write), CpuMapping::new(&file));
    assert_eq!(map.acquire(Access::Write), LEN as u64);
    for byte in 2..6 {
        file.write_all_at(&[byte], 100).unwrap();
        cpu.store(PAGE, byte);
        assert_eq!((map.load(100), map.load(PAGE), map.load(PAGE + 1)), (byte, byte, 1));
        map.store(3 * PAGE, 2, byte);
        assert_eq!((read(&file, 3 * PAGE), cpu.load(3 * PAGE + 1), cpu.load(3 * PAGE + 2)), (byte, byte, 1));
    }
    map.0.release(0, LEN as u64).unwrap();
    map.0.sync(0, LEN as u64).unwrap();
    let info = map.0.info();
    let none = [info.device_bytes, info.bytes_registered, info.bytes_from_file, info.bytes_published];
    assert_eq!((none, info.in_place, info.releases), ([0; 4], InPlaceWay::Faults as u64, 1), "{info:?}");
}

/// One writer after the other, so that each byte is known: a map with a replica, CPU programs and the coherent map agree.
#[test]
fn map_agrees_with_a_replica_and_cpu_programs() {
    let Some((mount, path)) = mounted() else { return };
    let file = open(&path);
    let (map, cpu, gpu) = (Coherent::new(&file, Access::Write), CpuMapping::new(&file), Gpu::new(&file, PAGES));
    let reader = Coherent::new(&File::open(&path).unwrap(), Access::Read);
    let (mut model, mut size) = (vec![1; LEN], LEN);
    let mut seed = 1u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    for round in 0..200 {
        let (at, byte) = (random(size), round as u8);
        let len = (random(3 * PAGE) + 1).min(size - at);
        match random(if round % 20 == 10 { 6 } else { 5 }) {
            0 => map.epoch(at, len, byte),
            1 => {
                gpu.acquire();
                gpu.store(at, &vec![byte; len]);
                gpu.release();
            }
            2 => file.write_all_at(&vec![byte; len], at as u64).unwrap(),
            3 => (at..at + len).for_each(|at| cpu.store(at, byte)),
            4 => {
                let to = PAGE + random(LEN - PAGE);
                file.set_len(to as u64).unwrap();
                model[to.min(size)..].fill(0);
                size = to;
                map.acquire(Access::Read);
                continue;
            }
            _ => {
                mount.kill_server();
                continue;
            }
        }
        model[at..at + len].fill(byte);
        assert_eq!((map.acquire(Access::Read), reader.acquire(Access::Read)), (size as u64, size as u64));
        gpu.acquire();
        for at in (0..40).map(|_| random(LEN)).chain([at, at + len - 1, size - 1]) {
            let seen = (map.load(at), reader.load(at), gpu.load(at));
            assert_eq!(seen, (model[at], model[at], model[at]), "round {round}: byte {at} of {size}");
            if at < size {
                assert_eq!((read(&file, at), cpu.load(at)), (model[at], model[at]), "round {round}: byte {at}");
            }
        }
        gpu.release();
    }
    drop((map, reader, cpu, gpu));
    file.sync_all().unwrap();
    assert!(std::fs::read(&path).unwrap() == model[..size], "through the mount");
}

/// Four writers of bytes of their own in every page, at the same time; the server dies meanwhile.
#[test]
fn no_byte_of_simultaneous_writers_is_lost() {
    const ROUNDS: u8 = 60;
    let Some((mount, path)) = mounted() else { return };
    let bytes = |writer: usize| (0..PAGES).map(move |page| page * PAGE + writer * 7);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let map = Coherent::new(&open(&path), Access::Write);
            for byte in 2..ROUNDS {
                map.acquire(Access::Write);
                bytes(0).for_each(|at| map.store(at, 1, byte));
                map.0.release(0, LEN as u64).unwrap();
            }
        });
        scope.spawn(|| {
            let gpu = Gpu::new(&open(&path), PAGES);
            for byte in 2..ROUNDS {
                loop {
                    gpu.acquire();
                    bytes(1).for_each(|at| gpu.store(at, &[byte]));
                    let released = gpu.1.release(0, LEN as u64);
                    if !released.as_ref().is_err_and(|e| e.errno == Errno::STALE) {
                        released.unwrap();
                        break;
                    }
                }
            }
        });
        scope.spawn(|| {
            let file = open(&path);
            (2..ROUNDS).for_each(|byte| bytes(2).for_each(|at| file.write_all_at(&[byte], at as u64).unwrap()));
        });
        scope.spawn(|| {
            let cpu = CpuMapping::new(&open(&path));
            (2..ROUNDS).for_each(|byte| bytes(3).for_each(|at| cpu.store(at, byte)));
        });
        mount.kill_server();
    });
    let (map, gpu, file) =
        (Coherent::new(&File::open(&path).unwrap(), Access::Read), Gpu::new(&open(&path), PAGES), open(&path));
    map.acquire(Access::Read);
    gpu.acquire();
    for at in (0..4).flat_map(bytes) {
        assert_eq!((map.load(at), gpu.load(at), read(&file, at)), (ROUNDS - 1, ROUNDS - 1, ROUNDS - 1), "byte {at}");
    }
}

#[test]
fn release_waits_for_the_stream() {
    let Some((_mount, path)) = mounted() else { return };
    let file = open(&path);
    let map = Coherent::new(&file, Access::Write);
    map.acquire(Access::Write);
    let mut work = Work { at: map.0.address() as *mut u8, len: 1, byte: 9, sleep_ms: 100 };
    // SAFETY: the release waits for it, which is tested; at the end the test does.
    unsafe { map.1.launch(StreamId(0), store, (&raw mut work).cast()) }.unwrap();
    map.0.release(0, LEN as u64).unwrap();
    let seen = read(&file, 0);
    map.1.wait_stream(StreamId(0)).unwrap();
    assert_eq!(seen, 9);
}

#[test]
fn epoch_outlives_the_server_and_the_next_one_knows_of_the_map() {
    let Some((mount, path)) = mounted() else { return };
    let file = open(&path);
    let map = Coherent::new(&file, Access::Write);
    let kinds = || {
        let explained = spinio_gaiad::explain(&file).unwrap().unwrap();
        explained.holders.iter().map(|holder| (holder.kind, holder.pages)).collect::<Vec<_>>()
    };
    assert_eq!(kinds(), [(MapKind::Coherent, PAGES as u64)]);
    map.acquire(Access::Write);
    map.store(5, 1, 9);
    mount.kill_server();
    map.store(6, 1, 8);
    map.0.release(0, LEN as u64).unwrap();
    assert_eq!((read(&file, 5), read(&file, 6), map.0.info().reattached), (9, 8, 0));
    map.acquire(Access::Read);
    assert_eq!((kinds(), map.0.info().reattached), (vec![(MapKind::Coherent, PAGES as u64)], 1));
    drop(map);
    eventually("the server forgets it", || kinds().is_empty());
}

#[test]
fn bytes_past_the_end_are_zeros_after_an_acquire_and_stores_to_them_are_dropped() {
    let Some((_mount, path)) = mounted() else { return };
    let file = open(&path);
    let map = Coherent::new(&file, Access::Write);
    map.acquire(Access::Write);
    file.set_len(PAGE as u64 + 10).unwrap();
    assert_eq!(map.acquire(Access::Write), PAGE as u64 + 10);
    assert_eq!((map.load(PAGE + 9), map.load(PAGE + 10), map.load(3 * PAGE)), (1, 0, 0));
    map.store(3 * PAGE, 1, 9);
    map.0.release(0, LEN as u64).unwrap();
    assert_eq!(file.metadata().unwrap().len(), PAGE as u64 + 10);
    // A range that is past the end, and one that the file reaches again.
    assert_eq!(map.0.acquire(4 * PAGE as u64, PAGE as u64, Access::Read).unwrap(), 0);
    file.write_all_at(&[7; 20], 3 * PAGE as u64 + 10).unwrap();
    assert_eq!(map.acquire(Access::Read), 3 * PAGE as u64 + 30);
    assert_eq!((map.load(3 * PAGE), map.load(3 * PAGE + 10), map.load(4 * PAGE)), (0, 7, 0));
    map.0.release(0, LEN as u64).unwrap();
}

/// In a process of its own, which dies of it.
#[test]
fn cut_page_role() {
    let Some(path) = std::env::var_os(CUT) else { return };
    let file = open(Path::new(&path));
    let map = Coherent::new(&file, Access::Read);
    map.acquire(Access::Read);
    file.set_len(PAGE as u64).unwrap();
    map.load(PAGE);
}

#[test]
fn kernel_that_loads_a_page_that_was_cut_off_ends_the_process() {
    let Some((_mount, path)) = mounted() else { return };
    let mut role = Command::new(std::env::current_exe().unwrap());
    let ended = role.args(["--exact", "cut_page_role", "-q"]).env(CUT, &path).status().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGBUS), "{ended}");
}

#[test]
fn forked_child_has_no_map_and_the_parents_stays() {
    let Some((_mount, path)) = mounted() else { return };
    let file = open(&path);
    let map = Coherent::new(&file, Access::Write);
    map.acquire(Access::Write);
    file.set_len(3 * PAGE as u64).unwrap();
    map.acquire(Access::Write);
    let address = map.0.address() as *const u8;
    let readable = |at: usize| spinio_sys::linux::is_readable(address.wrapping_add(at), 1);
    assert!(readable(0) && readable(LEN - 1));
    // SAFETY: the child makes system calls only, and drops nothing.
    match unsafe { libc::fork() } {
        0 => {
            let found = i32::from(readable(0)) + 2 * i32::from(readable(LEN - 1));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(found) };
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child that was just made.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "1: pages of the file, 2: pages past its end");
        }
    }
    map.store(5, 1, 9);
    assert_eq!(read(&file, 5), 9);
}

#[test]
fn file_without_a_mount_is_read_while_programs_write_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; LEN]).unwrap();
    let map = Coherent::new(&File::open(&path).unwrap(), Access::Read);
    // Neither a daemon nor a lease: a writer opens it, and nothing waits.
    let file = open(&path);
    for byte in 2..6 {
        assert_eq!(map.acquire(Access::Read), LEN as u64);
        file.write_all_at(&[byte], 5000).unwrap();
        assert_eq!(map.load(5000), byte);
        map.0.release(0, LEN as u64).unwrap();
    }
    file.set_len(100).unwrap();
    assert_eq!((map.acquire(Access::Read), map.load(99), map.load(100), map.load(PAGE)), (100, 1, 0, 0));
    let to_write = Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device()).unwrap_err();
    assert!(to_write.errno == Errno::NOTSUP && to_write.to_string().contains("reading only"), "{to_write}");
    let directory = File::open(dir.path()).unwrap();
    let refused = Map::new(directory.as_raw_fd(), 0, LEN as u64, Access::Read, device()).unwrap_err();
    assert_eq!(refused.errno, Errno::NOTSUP, "{refused}");
}

#[test]
fn end_of_a_block_within_another_one_ends_no_reading() {
    let Some((_mount, path)) = mounted() else { return };
    let (file, page) = (open(&path), PAGE as u64);
    let address = spinio_gaia::map_in_place(file.as_raw_fd(), 0, LEN as u64, Access::Write, device()).unwrap();
    spinio_gaia::with_map(address, |map, _| {
        let begin = |offset, len| {
            map.begin_block(offset, len)?;
            map.acquire(offset, len, Access::Read).map(drop)
        };
        begin(0, 4 * page)?;
        begin(2 * page, 4 * page)?;
        map.end_block(2 * page, 4 * page)?;
        let refused = map.release(4 * page, page).unwrap_err();
        assert_eq!(refused.errno, Errno::INVAL, "no block reads it any more");
        // These end an epoch, if there is one, and not what the first block reads.
        map.release(0, 4 * page)?;
        map.acquire(0, page, Access::Write)?;
        map.release(0, 4 * page)?;
        map.end_block(0, 4 * page)?;
        let refused = map.release(0, page).unwrap_err();
        assert_eq!(refused.errno, Errno::INVAL, "the last one has ended");
        Ok(())
    })
    .unwrap();
    spinio_gaia::unmap(address).unwrap();
}

#[test]
fn misuse_is_refused() {
    let Some((_mount, path)) = mounted() else { return };
    let (file, whole) = (open(&path), LEN as u64);
    let new = |file: &File, offset, len, access| Map::new(file.as_raw_fd(), offset, len, access, device());
    let read_only = File::open(&path).unwrap();
    let write_only = OpenOptions::new().write(true).open(&path).unwrap();
    for (errno, refused) in [
        (Errno::ACCESS, new(&read_only, 0, whole, Access::Write)),
        (Errno::ACCESS, new(&write_only, 0, whole, Access::Read)),
        (Errno::INVAL, new(&file, 1, whole, Access::Read)),
        (Errno::INVAL, new(&file, 0, 0, Access::Read)),
        (Errno::NOTSUP, Map::new(file.as_raw_fd(), 0, whole, Access::Read, common::gpu::device())),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.errno, errno, "{error}");
    }
    let (map, reader) = (Coherent::new(&file, Access::Write).0, Coherent::new(&read_only, Access::Read).0);
    map.acquire(0, PAGE as u64, Access::Write).unwrap();
    for (errno, result) in [
        (Errno::ACCESS, reader.acquire(0, whole, Access::Write).map(drop)),
        (Errno::INVAL, map.acquire(0, whole + 1, Access::Read).map(drop)),
        (Errno::INVAL, map.acquire(0, 0, Access::Read).map(drop)),
        (Errno::INVAL, map.release(0, whole)),
        (Errno::NOTSUP, map.advise(0, whole, Advice::Lend)),
        (Errno::NOTSUP, map.discard(0, whole)),
        // The discard has ended it.
        (Errno::INVAL, map.release(0, PAGE as u64)),
    ] {
        let error = result.unwrap_err();
        assert_eq!(error.errno, errno, "{error}");
    }
    map.discard(0, whole).unwrap();
    for advice in [Advice::WillNeed, Advice::Sequential, Advice::Random, Advice::DontNeed] {
        map.advise(PAGE as u64, whole - PAGE as u64, advice).unwrap();
    }
}

#[test]
fn device_decides_how_a_map_is_in_place() {
    let Some((_mount, path)) = mounted() else { return };
    let file = open(&path);
    let plain = common::gpu::device();
    let map = |access, device| spinio_gaia::map_in_place(file.as_raw_fd(), 0, LEN as u64, access, device);
    let refused = map(Access::Write, plain).unwrap_err();
    assert!(refused.errno == Errno::INVAL && refused.to_string().contains("HMM"), "{refused}");
    let ways = [
        (map(Access::Read, plain), InPlaceWay::Registered),
        (map(Access::Read, device()), InPlaceWay::Faults),
        (map(Access::Write, device()), InPlaceWay::Faults),
    ];
    for (address, way) in ways {
        let address = address.unwrap();
        let info = spinio_gaia::with_map(address, |map, _| {
            map.acquire(0, LEN as u64, Access::Read)?;
            let queued = map.acquire_async(0, LEN as u64, Access::Read, StreamId(0));
            assert_eq!(queued.is_err_and(|e| e.errno == Errno::NOTSUP), way == InPlaceWay::Registered);
            Ok(map.info())
        });
        assert_eq!(info.unwrap().in_place, way as u64);
        spinio_gaia::unmap(address).unwrap();
    }
}

#[test]
fn calls_in_stream_order_return_at_once_and_report_when_the_stream_has_come_to_them() {
    let Some((_mount, path)) = mounted() else { return };
    let (file, device, whole) = (open(&path), device(), LEN as u64);
    let address = spinio_gaia::map_in_place(file.as_raw_fd(), 0, whole, Access::Write, device).unwrap();
    let stream = device.new_stream().unwrap();
    let mut work = Work { at: address as *mut u8, len: 1, byte: 9, sleep_ms: 100 };
    let (tell, told) = std::sync::mpsc::channel();
    spinio_gaia::with_map(address, |map, _| {
        map.acquire_async(0, whole, Access::Write, stream)?;
        // SAFETY: the unmap below waits for the release after it.
        unsafe { device.launch(stream, store, (&raw mut work).cast()) }.unwrap();
        let report = move |done: &Result<u64, spinio_gaia::Error>| {
            // SAFETY: the map stays until the unmap has waited for this.
            let stored = unsafe { (address as *const u8).read_volatile() };
            tell.send((done.clone(), stored)).unwrap();
        };
        map.release_async(0, whole, StreamRelease::new(stream, report))?;
        let again = map.release_async(0, whole, StreamRelease::new(stream, |_| unreachable!())).unwrap_err();
        assert_eq!(again.errno, Errno::INVAL, "{again}");
        map.overwrite_async(0, whole, stream)?;
        let discarded =
            map.release_async(0, whole, StreamRelease::new(stream, |_| unreachable!()).discarding()).unwrap_err();
        assert_eq!(discarded.errno, Errno::NOTSUP, "{discarded}");
        Ok(())
    })
    .unwrap();
    spinio_gaia::unmap(address).unwrap();
    assert_eq!((told.try_recv().unwrap(), read(&file, 0)), ((Ok(0), 9), 9));
}
