//! Futex calls of reads with either engine, as the kernel counts them.

use std::collections::HashSet;

use spinio_host::settings::StorageEngine;
use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::futex_trace::{FutexTrace, TraceLine};
use spinio_testkit::{Buffer, file, in_child, mount_fixture};

use super::{ALONE, MIB, ROUNDS, SIZE, absent_file, read, settings, shows, warm_up};

/// Futexes of the emulated device, which is hardware.
fn device_addresses(lines: &[TraceLine]) -> HashSet<&str> {
    let futexes = lines.iter().filter_map(|line| match line {
        TraceLine::Futex(name, address, _) if name.starts_with("spinio-emu") => Some(address.as_str()),
        _ => None,
    });
    futexes.collect()
}

/// No thread of this process makes a futex call for a read of an awake ring, but for the emulated device's: the kernel
/// counts.
#[test]
fn read_of_awake_ring_makes_no_futex_call() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    in_child("traced reads of an awake ring", || {
        let trace = match FutexTrace::start() {
            Ok(trace) => trace,
            Err(why) => {
                eprintln!("skipped: {why}");
                return 0;
            }
        };
        let device = emulated("size=64M");
        let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(device, SIZE));
        if !warm_up(&runtime, &file, &buffer) {
            return 0;
        }
        let (mut seen, mut rounds) = (Seen::default(), 0);
        while seen.alone < ALONE && rounds < ROUNDS {
            rounds += 1;
            file::evict(&file);
            for from in (0..24).map(|turn| turn * 7 % 24 * MIB) {
                let before = runtime.ring_reads();
                trace.mark("begin");
                if read(&runtime, &file, &buffer, from, MIB) != Ok(MIB) {
                    return 1;
                }
                trace.mark(if runtime.ring_reads() >= before + 2 { "by the ring" } else { "by workers" });
            }
            match Seen::of(&trace.lines()) {
                Some(now) => seen = now,
                None => {
                    eprintln!(
                        "skipped: the tracepoint does not see this process, which has a PID namespace of its own"
                    );
                    return 0;
                }
            }
        }
        let Seen { by_ring, alone } = seen;
        println!("{by_ring} of {} reads by the ring, {alone} of them without a futex call", rounds * 24);
        i32::from(alone < ALONE && shows(by_ring)) * 3
    });
}

/// Reads in a trace.
#[derive(Default)]
struct Seen {
    by_ring: usize,
    /// Without a futex call but for the emulated device's.
    alone: usize,
}

impl Seen {
    /// `None`: not even the device's calls were recorded.
    fn of(lines: &[TraceLine]) -> Option<Seen> {
        let (addresses, of_device) = (device_addresses(lines), |name: &str| name.starts_with("spinio-emu"));
        let (mut seen, mut calls) = (Seen::default(), 0);
        for line in lines {
            match line {
                TraceLine::Mark(text) if text == "begin" => calls = 0,
                TraceLine::Mark(text) if text == "by the ring" => {
                    seen.by_ring += 1;
                    seen.alone += usize::from(calls == 0);
                }
                TraceLine::Futex(name, address, _) => {
                    calls += usize::from(!of_device(name) && !addresses.contains(address.as_str()));
                }
                TraceLine::Mark(_) => {}
            }
        }
        (!addresses.is_empty()).then_some(seen)
    }
}

/// Calls that wake a thread, by the caller and by workers, without those of the emulated device.
fn wake_ups(lines: &[TraceLine], caller: &str) -> Vec<(usize, usize)> {
    let of_device = |name: &str| name.starts_with("spinio-emu");
    let (addresses, mut reads) = (device_addresses(lines), Vec::new());
    for line in lines {
        match line {
            TraceLine::Mark(text) if text == "begin" => reads.push((0, 0)),
            TraceLine::Futex(name, address, true) if !of_device(name) && !addresses.contains(address.as_str()) => {
                let Some((by_caller, by_others)) = reads.last_mut() else { continue };
                *if caller.starts_with(name.as_str()) { by_caller } else { by_others } += 1;
            }
            _ => {}
        }
    }
    reads
}

/// The second engine: a worker is woken for each piece of a read, all of which are read side by side, and none for anything
/// else. On a busy machine more, by threads that wait for a lock.
#[test]
fn read_by_workers_wakes_a_worker_for_each_piece() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    for (len, pieces) in [(256 << 10, 1), (MIB, 4)] {
        in_child("traced reads by workers", || {
            let trace = match FutexTrace::start() {
                Ok(trace) => trace,
                Err(why) => {
                    eprintln!("skipped: {why}");
                    return 0;
                }
            };
            let device = emulated("size=64M");
            let settings = Settings { storage_engine: StorageEngine::Workers, ..Settings::default() };
            let (runtime, buffer) = (Runtime::new(settings), Buffer::new(device, SIZE));
            let (mut few, mut rounds, mut seen) = (0, 0, Vec::new());
            while few < ALONE && rounds < ROUNDS {
                rounds += 1;
                file::evict(&file);
                for from in (0..24).map(|turn| turn * 7 % 24 * MIB) {
                    trace.mark("begin");
                    if read(&runtime, &file, &buffer, from, len) != Ok(len) {
                        return 1;
                    }
                    // What workers do to fall asleep again is no part of the read.
                    trace.mark("end");
                }
                let lines = trace.lines();
                if device_addresses(&lines).is_empty() {
                    eprintln!("skipped: the tracepoint does not see this process");
                    return 0;
                }
                let caller = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
                seen = wake_ups(&lines, &caller);
                // The first read makes the workers.
                few = seen.iter().skip(1).filter(|read| read.0 <= pieces).count();
            }
            println!("{few} of {} reads of {len} bytes woke up to {pieces} workers: {:?}", seen.len(), &seen[..12]);
            i32::from(few < ALONE) * 2
        });
    }
}
