//! No thread of SPIN runs while the program makes no call: from 10 ms after the last one on.

use std::time::{Duration, Instant};

use spinio_host::settings::StorageEngine;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_testkit::buffer::emulated;
use spinio_testkit::deadline::TIMEOUT;
use spinio_testkit::{Buffer, eventually, file, in_child, mount_fixture};

use super::engines::Engine;
use super::{MIB, SIZE, absent_file, read};

/// Time on a processor in an idle half second that a thread needs for its look, once a second, for files to forget.
const LOOK: u64 = 1_000_000;

/// A thread that SPIN has started, or the kernel for its ring, and nanoseconds of it on a processor and waiting for one. Threads of
/// the emulated device are hardware.
#[derive(Debug)]
struct Used {
    tid: String,
    name: String,
    ran: u64,
    waited: u64,
}

fn own_threads() -> Vec<Used> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let threads = tasks.filter_map(|task| {
        let text = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let name = text("comm").trim().to_owned();
        let is_own = name.starts_with("iou-") || (name.starts_with("spinio-") && !name.starts_with("spinio-emu"));
        // proc_pid_schedstat(5): finer than the clock ticks of stat.
        let schedstat = text("schedstat");
        let mut numbers = schedstat.split(' ').map_while(|number| number.parse().ok());
        let (ran, waited) = (numbers.next()?, numbers.next()?);
        is_own.then(|| Used { tid: task.file_name().to_string_lossy().into_owned(), name, ran, waited })
    });
    threads.collect()
}

fn count_named(start: &str) -> usize {
    own_threads().iter().filter(|thread| thread.name.starts_with(start)).count()
}

/// What threads have used since `before`; one that began since then, all of it.
fn used_since(before: &[Used]) -> Vec<Used> {
    let used = own_threads().into_iter().map(|now| {
        let was = before.iter().find(|was| was.tid == now.tid);
        let (ran, waited) = was.map_or((0, 0), |was| (was.ran, was.waited));
        Used { ran: now.ran - ran, waited: now.waited - waited, ..now }
    });
    used.collect()
}

/// Whether no thread runs in the half second after the next 10 ms, but for its look. On a busy machine a thread may have got
/// no processor to fall asleep on: then it has a later half second, but no more time on a processor than 10 ms in all. What is
/// not of this process may wake a thread once: so one that did not wait for a processor fails the second half second in which
/// it runs.
fn is_idle() -> bool {
    const END: u64 = 10_000_000;
    let (begun, start) = (Instant::now(), own_threads());
    let mut was_woken = false;
    for turn in 1..=20 {
        std::thread::sleep(Duration::from_millis(10));
        let (window_begun, before) = (Instant::now(), own_threads());
        std::thread::sleep(Duration::from_millis(500));
        let (window, all) = (used_since(&before), used_since(&start));
        // This thread may have got no processor for longer, in which others had more looks.
        let looks = |since: Instant| LOOK * (1 + since.elapsed().as_secs());
        let late: Vec<_> = window.iter().filter(|used| used.ran > looks(window_begun)).collect();
        let too_long: Vec<_> = all.iter().filter(|used| used.ran > END + turn * LOOK + looks(begun)).collect();
        if late.is_empty() && too_long.is_empty() {
            return true;
        }
        eprintln!("threads that ran: {late:?}; for too long: {too_long:?}");
        let is_woken = late.iter().all(|used| used.waited < LOOK);
        if !too_long.is_empty() || (is_woken && was_woken) {
            return false;
        }
        was_woken |= is_woken;
    }
    false
}

/// Whether this kernel says how long a thread ran.
fn is_measured() -> bool {
    let measured = own_threads().iter().any(|thread| thread.ran > 0);
    if !measured {
        eprintln!("skipped: this kernel does not say how long a thread ran");
    }
    measured
}

#[test]
fn threads_sleep_when_idle_after_reads_of_storage() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    for engine in Engine::ALL {
        in_child("idle after reads of storage", || {
            let Some(reader) = engine.start(&file) else { return 0 };
            let buffer = reader.buffer(MIB);
            for from in [7, 3, 11].map(|part| part * MIB) {
                if read(&reader.runtime, &file, &buffer, from, MIB) != Ok(MIB) {
                    return 1;
                }
            }
            i32::from(is_measured() && !is_idle()) * 2
        });
    }
}

#[test]
fn threads_sleep_when_idle_after_many_have_copied() {
    const LEN: usize = 64 * MIB;
    let fixture = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&fixture.file("file"), LEN as u64);
    file.sync_all().unwrap();
    for storage_engine in [StorageEngine::Ring, StorageEngine::Workers] {
        in_child("idle after a cached read", || {
            let mut settings = Settings { threads: 8, storage_engine, ..Settings::default() };
            settings.routes.retain(|route| *route != Route::Dma);
            let (runtime, buffer) = (Runtime::new(settings), Buffer::new(emulated("size=128M"), LEN));
            if read(&runtime, &file, &buffer, 0, LEN) != Ok(LEN) {
                return 1;
            }
            // And the caller.
            if count_named("spinio-copy") != 7 {
                return 2;
            }
            i32::from(is_measured() && !is_idle()) * 3
        });
    }
}

#[test]
fn ring_is_used_again_after_it_slept_and_its_thread_ends_with_the_runtime() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    in_child("an idle ring", || {
        let Some(reader) = Engine::Ring.start(&file) else { return 0 };
        if count_named("iou-sqp") != 1 {
            return 1;
        }
        std::thread::sleep(Duration::from_millis(50));
        // Woken, then used.
        let (reads, begun, buffer) = (reader.runtime.ring_reads(), Instant::now(), reader.buffer(MIB));
        while reader.runtime.ring_reads() == reads {
            file::evict(&file);
            if read(&reader.runtime, &file, &buffer, 0, MIB) != Ok(MIB) || begun.elapsed() > TIMEOUT {
                return 2;
            }
        }
        drop(reader);
        eventually("the kernel thread has ended", || count_named("iou-sqp") == 0);
        0
    });
}
