//! What changes around reads in flight: the program cancels them, starts other programs, has few processors or no right
//! to lock memory.

#![expect(unsafe_code, reason = "tests set limits and an affinity mask")]

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use spinio_io::{NoRing, Runtime, Settings, install_cancel_poll};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, eventually, file, in_child, mount_fixture, with_deadline};

use super::engines::Engine;
use super::{MIB, SIZE, absent_file, read};

/// Reads the whole file in pieces of 1 MiB that are not cached; 0 if all bytes are right.
fn reads_are_right(runtime: &Runtime, file: &std::fs::File, buffer: &Buffer) -> i32 {
    for _ in 0..3 {
        for from in (0..23).map(|turn| turn * 5 % 23 * MIB) {
            file::evict(file);
            buffer.fill(0xa5);
            if read(runtime, file, buffer, from, MIB) != Ok(MIB) {
                return 1;
            }
            if buffer.range_bytes(0..MIB) != file::bytes(from as u64, MIB, 0) {
                return 2;
            }
        }
    }
    0
}

#[test]
fn cancelled_reads_leave_nothing_in_flight() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    for engine in Engine::ALL {
        let Some(reader) = engine.start(&file) else { continue };
        // What the calling thread reads by itself is one command, up to 16 MiB.
        let len = if engine == Engine::OwnRing { 16 * MIB } else { SIZE };
        let (runtime, buffer) = (&reader.runtime, reader.buffer(len));
        let (mut early, mut turns) = (0, 0);
        // Workers may be done before the caller looks for a cancellation: then there are more turns.
        eventually("a read ends early", || {
            file::evict(&file);
            buffer.fill(0xa5);
            let _poll = install_cancel_poll(|| true, Duration::from_micros(turns % 40 * 50));
            let got = match with_deadline("a cancelled read", || read(runtime, &file, &buffer, 0, len)) {
                Ok(got) => got,
                Err(errno) => {
                    assert_eq!(errno, Errno::INTR);
                    0
                }
            };
            early += usize::from(got < len);
            assert!(buffer.range_bytes(0..got) == file::bytes(0, got, 0), "{engine:?}: {got} bytes");
            // Nothing writes into the buffer after the return.
            let after = buffer.range_bytes(0..len);
            std::thread::sleep(Duration::from_millis(3));
            assert!(buffer.range_bytes(0..len) == after, "{engine:?}: a read was in flight after the return");
            turns += 1;
            turns >= 40 && (early > 0 || engine == Engine::OwnRing)
        });
        println!("{engine:?}: {early} of {turns} reads ended early");
    }
}

#[test]
fn other_programs_start_while_reads_are_in_flight() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    for engine in Engine::ALL {
        let Some(reader) = engine.start(&file) else { continue };
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let read_all = || reads_are_right(&reader.runtime, &file, &reader.buffer(MIB));
            let readers: Vec<_> = (0..2).map(|_| scope.spawn(read_all)).collect();
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    // posix_spawn: the child runs on this process's memory until it starts its program.
                    assert!(Command::new("true").status().unwrap().success());
                }
            });
            let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
            over.store(true, SeqCst);
            assert!(results.into_iter().all(|result| result.ok() == Some(0)), "{engine:?}");
        });
    }
}

#[test]
fn reads_with_little_locked_memory() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    for engine in Engine::ALL {
        // Less than the ring's memory, and none.
        for limit in [64 << 10, 0] {
            in_child("reads with a small RLIMIT_MEMLOCK", || {
                let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
                // SAFETY: sets a limit of this child.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
                // Kernels that count a ring as locked memory refuse it: workers read.
                let Some(reader) = engine.start(&file).or_else(|| Engine::Workers.start(&file)) else { return 3 };
                reads_are_right(&reader.runtime, &file, &reader.buffer(MIB))
            });
        }
    }
}

/// Keeps this thread, and those that it starts, on the first `count` of its processors; false if it has fewer.
fn keep_to(count: usize) -> bool {
    // SAFETY: a set of this function, and the calling thread's own mask.
    unsafe {
        let mut mask = std::mem::zeroed::<libc::cpu_set_t>();
        libc::sched_getaffinity(0, size_of_val(&mask), &mut mask);
        let usable: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &mask)).collect();
        libc::CPU_ZERO(&mut mask);
        usable.iter().take(count).for_each(|&cpu| libc::CPU_SET(cpu, &mut mask));
        usable.len() >= count && libc::sched_setaffinity(0, size_of_val(&mask), &mask) == 0
    }
}

#[test]
fn reads_on_few_and_many_processors() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    for processors in [1, 2, 4, 16] {
        for engine in Engine::ALL {
            in_child("reads on a number of processors", || {
                if !keep_to(processors) {
                    eprintln!("skipped: fewer than {processors} processors here");
                    return 0;
                }
                let Some(reader) = engine.start(&file) else { return 0 };
                reads_are_right(&reader.runtime, &file, &reader.buffer(MIB))
            });
        }
        in_child("reads by the engine that this number of processors selects", || {
            if !keep_to(processors) {
                return 0;
            }
            let (device, runtime) = (emulated("size=64M"), Runtime::new(Settings::default()));
            let right = reads_are_right(&runtime, &file, &Buffer::new(device, MIB));
            let workers = runtime.ring_refusal() == Some(NoRing::FewProcessors);
            if processors < 4 && !workers { 3 } else { right }
        });
    }
}
