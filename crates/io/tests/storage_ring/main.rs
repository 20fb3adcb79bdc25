//! Reads of storage through the ring: right bytes, no other thread, and workers where it is refused or sleeps.

mod engines;
mod futexes;
mod idle;
mod surroundings;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use self::engines::Engine;
use spinio_host::settings::StorageEngine;
use spinio_io::{NoRing, Runtime, Settings};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::deadline::TIMEOUT;
use spinio_testkit::faulty_syscalls::{Call, Effect};
use spinio_testkit::mount_fixture::MountFixture;
use spinio_testkit::{
    Buffer, FaultySyscalls, Rng, as_user, eventually, file, in_child, leak_check, mount_fixture, with_deadline,
};

const MIB: usize = 1 << 20;
const SIZE: usize = 24 * MIB + 777;

fn settings() -> Settings {
    Settings { storage_engine: StorageEngine::Ring, ..Settings::default() }
}

fn absent_file(fixture: &MountFixture, name: &str, len: usize) -> Option<File> {
    file::create_evicted(&fixture.file(name), len as u64)
}

fn read(runtime: &Runtime, file: &File, buffer: &Buffer, from: usize, len: usize) -> Result<usize, Errno> {
    runtime.read(file.as_raw_fd(), Some(from as u64), buffer.target(0), len).map_err(|e| e.kind.errno())
}

/// Reads until the ring has made a read, so that it exists, is awake and has the file; false if the kernel refuses it.
fn warm_up(runtime: &Runtime, file: &File, buffer: &Buffer) -> bool {
    let begun = Instant::now();
    while runtime.ring_reads() == 0 {
        file::evict(file);
        assert_eq!(read(runtime, file, buffer, 0, MIB), Ok(MIB));
        if runtime.ring_refusal().is_some() || begun.elapsed() > TIMEOUT {
            assert!(runtime.ring_refusal().is_some(), "no read took the ring");
            eprintln!("skipped: {:?}", runtime.ring_refusal());
            return false;
        }
    }
    true
}

#[test]
fn absent_reads_take_the_ring_and_are_right() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    let device = emulated("size=512M");
    let runtime = Runtime::new(settings());
    if !warm_up(&runtime, &file, &Buffer::new(device, MIB)) {
        return;
    }
    let before = runtime.ring_reads();
    with_deadline("reads by four threads", || {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (runtime, file) = (&runtime, &file);
                scope.spawn(move || {
                    let (mut rng, buffer) = (Rng::from_env(thread), Buffer::new(device, SIZE));
                    let mut rounds = 0;
                    while rounds < 25 || runtime.ring_reads() <= before + 20 {
                        rounds += 1;
                        let from = rng.near_page_edge(SIZE as u64) as usize;
                        let len = (1 + rng.near_page_edge(9 << 20) as usize).min(SIZE - from);
                        buffer.fill(0xa5);
                        assert_eq!(read(runtime, file, &buffer, from, len), Ok(len));
                        assert!(buffer.range_bytes(0..len) == file::bytes(from as u64, len, 0), "{from}+{len}");
                        buffer.assert_poison_from(len);
                        file::evict(file);
                    }
                });
            }
        });
    });
}

/// A file of procfs of each thread of this process, as far as it is still there.
fn of_each_thread(name: &'static str) -> impl Iterator<Item = String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter_map(move |task| std::fs::read_to_string(task.path().join(name)).ok())
}

/// Context switches of the threads that SPIN has started; those of the emulated device are hardware.
fn switches_of_own_threads() -> u64 {
    let mut all = 0;
    for text in of_each_thread("status") {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        if text.starts_with("Name:\tspinio-") && !text.starts_with("Name:\tspinio-emu") {
            all += value("voluntary_ctxt_switches:") + value("nonvoluntary_ctxt_switches:");
        }
    }
    all
}

/// So many reads without another thread show that a read needs none. Others have one on a busy machine, where the
/// ring's kernel thread waits for a processor until a worker is asked; and a worker wakes once a second to forget
/// unused files, and wakes the kernel thread if that fell asleep meanwhile.
const ALONE: usize = 24;
/// Rounds of 24 reads in which they must have been seen.
const ROUNDS: usize = 40;

/// Whether this many reads by the ring would have shown some alone if any could be: a busy machine may leave fewer.
fn shows(by_ring: usize) -> bool {
    by_ring > 4 * ALONE
}

/// In a child: its only threads are those of this test.
#[test]
fn read_of_awake_ring_needs_no_other_thread() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    in_child("reads of an awake ring", || {
        let device = emulated("size=64M");
        let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(device, SIZE));
        if !warm_up(&runtime, &file, &buffer) {
            return 0;
        }
        let (mut alone, mut by_ring, mut rounds) = (0, 0, 0);
        while alone < ALONE && rounds < ROUNDS {
            rounds += 1;
            file::evict(&file);
            buffer.fill(0);
            // One after the other: the kernel thread falls asleep in the time that comparing bytes takes.
            // Not front to back, which would be left to the read-ahead of the kernel.
            for from in (0..24).map(|turn| turn * 7 % 24 * MIB) {
                let (before, switches) = (runtime.ring_reads(), switches_of_own_threads());
                let to = buffer.target(from);
                if runtime.read(file.as_raw_fd(), Some(from as u64), to, MIB).ok() != Some(MIB) {
                    return 1;
                }
                // All pieces of it.
                if runtime.ring_reads() >= before + 2 {
                    by_ring += 1;
                    alone += usize::from(switches_of_own_threads() == switches);
                }
            }
            if buffer.range_bytes(0..24 * MIB) != file::bytes(0, 24 * MIB, 0) {
                return 2;
            }
        }
        println!("{by_ring} of {} reads by the ring, {alone} of them without another thread", rounds * 24);
        i32::from(alone < ALONE && shows(by_ring)) * 3
    });
}

#[test]
fn failed_and_short_reads_are_finished_by_the_page_cache() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    let device = emulated("size=256M");
    for effect in [Effect::Fail(Errno::IO), Effect::Fail(Errno::AGAIN), Effect::Short(512)] {
        for every in [1, 3] {
            let kernel = FaultySyscalls::with_ring();
            let (runtime, buffer) = (Runtime::with_kernel(settings(), kernel), Buffer::new(device, SIZE));
            if !warm_up(&runtime, &file, &buffer) {
                return;
            }
            kernel.inject_every(Call::Pread(spinio_plan::Route::Direct), every, effect);
            with_deadline("reads with faults", || {
                let reads = runtime.ring_reads();
                while runtime.ring_reads() == reads || kernel.injected() == 0 {
                    file::evict(&file);
                    buffer.fill(0);
                    assert_eq!(read(&runtime, &file, &buffer, 0, SIZE), Ok(SIZE), "{effect:?}");
                    assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 0), "{effect:?}, every {every}");
                }
            });
        }
    }
}

#[test]
fn workers_read_where_the_ring_is_refused() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    let buffer = Buffer::new(emulated("size=64M"), SIZE);
    for errno in [Errno::PERM, Errno::NOSYS, Errno::INVAL, Errno::NOMEM] {
        let kernel = FaultySyscalls::with_ring();
        kernel.inject_always(Call::NewSharedRing, Effect::Fail(errno));
        let runtime = Runtime::with_kernel(settings(), kernel);
        for _ in 0..3 {
            file::evict(&file);
            buffer.fill(0);
            assert_eq!(read(&runtime, &file, &buffer, 0, SIZE), Ok(SIZE));
            assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 0));
        }
        eventually("the refusal is known", || runtime.ring_refusal() == Some(NoRing::Refused(errno)));
        if errno == Errno::NOMEM {
            eventually("a shortage may have passed, and the kernel is asked again", || {
                let _ = read(&runtime, &file, &buffer, 0, SIZE);
                file::evict(&file);
                kernel.calls(Call::NewSharedRing) > 1
            });
        } else {
            assert_eq!((runtime.ring_reads(), kernel.calls(Call::NewSharedRing)), (0, 1), "asked once");
        }
    }
}

/// All room of the ring is taken for good, as by reads of a disk that hangs.
#[test]
fn workers_take_over_from_a_full_ring() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(emulated("size=64M"), SIZE));
    if !warm_up(&runtime, &file, &buffer) {
        return;
    }
    with_deadline("reads next to a full ring", || {
        let workers = runtime.reader().files.workers();
        let storage = std::os::unix::fs::MetadataExt::dev(&file.metadata().unwrap());
        let ring = loop {
            match workers.storage_ring(storage) {
                Ok(ring) => break ring,
                Err(why) => assert_eq!(why, NoRing::NotAwake),
            }
        };
        let room: Vec<_> = std::iter::from_fn(|| ring.reserve()).collect();
        assert!(!room.is_empty());
        for _ in 0..5 {
            let reads = runtime.ring_reads();
            file::evict(&file);
            buffer.fill(0);
            assert_eq!(read(&runtime, &file, &buffer, 0, SIZE), Ok(SIZE));
            assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 0));
            assert_eq!(runtime.ring_reads(), reads);
        }
        drop(room);
        eventually("the ring is used again", || {
            let reads = runtime.ring_reads();
            file::evict(&file);
            assert_eq!(read(&runtime, &file, &buffer, 0, MIB), Ok(MIB));
            runtime.ring_reads() > reads
        });
    });
}

/// Storage that does not answer takes all room of its own ring, and none of another's.
#[test]
fn full_ring_of_one_file_system_leaves_that_of_another() {
    let (near, far) = (mount_fixture::create("tree").unwrap(), mount_fixture::create("xfs"));
    let far = match far {
        Ok(far) => far,
        Err(why) => return eprintln!("skipped: xfs: {why}"),
    };
    let (Some(first), Some(second)) = (absent_file(&near, "file", MIB), absent_file(&far, "file", SIZE)) else {
        return;
    };
    let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(emulated("size=64M"), SIZE));
    if !warm_up(&runtime, &first, &buffer) {
        return;
    }
    let storage = std::os::unix::fs::MetadataExt::dev(&first.metadata().unwrap());
    let mut room = Vec::new();
    eventually("the ring is awake", || match runtime.reader().files.workers().storage_ring(storage) {
        Ok(ring) => {
            room.extend(std::iter::from_fn(|| ring.reserve()));
            true
        }
        Err(_) => false,
    });
    let reads = runtime.ring_reads();
    eventually("the other file system is read through a ring", || {
        file::evict(&second);
        assert_eq!(read(&runtime, &second, &buffer, 0, SIZE), Ok(SIZE));
        runtime.ring_reads() > reads
    });
    assert!(!room.is_empty() && buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 0));
}

/// Their servers may not answer, and the kernel would leave such reads to its own threads.
#[test]
fn files_of_other_file_systems_are_left_to_workers() {
    let device = emulated("size=64M");
    for kind in ["btrfs", "overlay", "fuse"] {
        let fixture = match mount_fixture::create(kind) {
            Ok(fixture) => fixture,
            Err(why) => {
                eprintln!("skipped: {kind}: {why}");
                continue;
            }
        };
        let file = file::create_filled(&fixture.file("file"), SIZE as u64);
        let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(device, SIZE));
        for _ in 0..5 {
            file::evict(&file);
            assert_eq!(read(&runtime, &file, &buffer, 0, SIZE), Ok(SIZE), "{kind}");
            assert!(buffer.range_bytes(0..SIZE) == file::bytes(0, SIZE, 0), "{kind}");
        }
        assert_eq!(runtime.ring_reads(), 0, "{kind}");
    }
}

/// More files than slots, one after the other and some at once: a slot is used again only for a file that is checked.
#[test]
fn slots_are_used_again() {
    let fixture = mount_fixture::create("tree").unwrap();
    let device = emulated("size=64M");
    let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(device, 6 * MIB));
    let Some(first) = absent_file(&fixture, "first", MIB) else { return };
    if !warm_up(&runtime, &first, &buffer) {
        return;
    }
    let (begun, mut late) = (Instant::now(), false);
    // The ring sleeps, or has no slot yet, while workers get no processor: then there are more turns.
    for turn in 0_u64.. {
        assert!(begun.elapsed() < TIMEOUT, "no late file got a slot");
        let path = fixture.file("file");
        let _ = std::fs::remove_file(&path);
        let file = file::create(&path);
        let bytes = file::bytes(0, MIB, turn as u8);
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        let before = runtime.ring_reads();
        buffer.fill(0);
        for part in 0..6 {
            file::evict(&file);
            let to = buffer.target(part * MIB);
            assert_eq!(runtime.read(file.as_raw_fd(), Some(0), to, MIB).unwrap(), MIB);
        }
        assert!(buffer.bytes().chunks(MIB).all(|part| part == bytes), "bytes of another file, turn {turn}");
        late |= turn >= 150 && runtime.ring_reads() > before;
        spinio_io::on_close(file.as_raw_fd());
        if late && turn >= 200 {
            break;
        }
    }
}

/// Threads end, and others begin, while the ring is in use; it stays awake for all.
#[test]
fn reads_of_threads_that_come_and_go() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    let device = emulated("size=256M");
    let runtime = Runtime::new(settings());
    let before = leak_check::thread_descriptors();
    with_deadline("threads that come and go", || {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    file::evict(&file);
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for turn in 0..100_usize {
                let (runtime, file) = (&runtime, &file);
                let threads: Vec<_> = (0..3)
                    .map(|thread| {
                        scope.spawn(move || {
                            let (len, from) = (MIB / 4 * (1 + thread), turn % 20 * MIB);
                            let buffer = Buffer::new(device, len);
                            assert_eq!(read(runtime, file, &buffer, from, len), Ok(len));
                            assert!(buffer.bytes() == file::bytes(from as u64, len, 0));
                        })
                    })
                    .collect();
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            }
            stop.store(true, SeqCst);
        });
    });
    assert!(leak_check::thread_descriptors() < before + 50, "descriptors in the program's table");
}

const CHILD: &str = "SPINIO_TEST_RING_CHILD";

/// Does nothing when run as a test: the body of the child processes of the next test. Reads by four threads without an
/// end, and after a while does what the variable says.
#[test]
fn child_with_reads_in_flight() {
    let Some(how) = std::env::var_os(CHILD) else { return };
    let how = how.to_str().unwrap();
    let fixture = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&fixture.file("file"), SIZE as u64);
    let engine = Engine::ALL.into_iter().find(|engine| how.ends_with(&format!("{engine:?}"))).unwrap();
    // Without this engine here, the reads are in flight in another.
    let reader = engine.start(&file).unwrap_or_else(|| Engine::Workers.start(&file).unwrap());
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (reader, file) = (&reader, &file);
            scope.spawn(move || {
                let buffer = reader.buffer(4 * MIB);
                for turn in 0.. {
                    file::evict(file);
                    let _ = read(&reader.runtime, file, &buffer, (turn * 5 + thread) % 20 * MIB, 4 * MIB);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        println!("reads are in flight");
        match how.split(' ').next() {
            Some("exec") => drop(Command::new("true").exec()),
            Some("exit") => std::process::exit(0),
            _ => std::thread::sleep(Duration::from_secs(600)),
        }
    });
}

#[test]
fn exec_exit_and_kill_end_a_process_with_reads_in_flight() {
    let ways = ["exec", "exit", "kill"].into_iter();
    for (way, engine) in ways.flat_map(|way| Engine::ALL.map(|engine| (way, engine))) {
        let how = format!("{way} {engine:?}");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child_with_reads_in_flight", "--exact", "--nocapture"])
            .env(CHILD, &how)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let began = lines.map_while(Result::ok).find(|line| line.contains("reads are in flight"));
        assert!(began.is_some(), "{how}: the child ended early");
        if way == "kill" {
            child.kill().unwrap();
        }
        let mut status = None;
        eventually("the child has ended", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().success(), way != "kill", "{how}: {status:?}");
    }
}

#[test]
fn again_as_ordinary_user() {
    as_user::rerun_as_nobody("again_as_ordinary_user");
}
