//! What changes around reads in flight: the program cancels them, starts other programs, has few processors or no right
//! to lock memory.

#![expect(unsafe_code, reason = "tests set limits and an affinity mask")]

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use spinio_io::{Runtime, install_cancel_poll};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, file, in_child, mount_fixture, with_deadline};

use super::{MIB, SIZE, absent_file, read, settings, warm_up};

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
    let device = emulated("size=256M");
    let (runtime, buffer) = (Runtime::new(settings()), Buffer::new(device, SIZE));
    if !warm_up(&runtime, &file, &buffer) {
        return;
    }
    let mut early = 0;
    for turn in 0..40 {
        file::evict(&file);
        buffer.fill(0xa5);
        let _poll = install_cancel_poll(|| true, Duration::from_micros(turn * 50));
        let got = with_deadline("a cancelled read", || read(&runtime, &file, &buffer, 0, SIZE));
        let got = match got {
            Ok(got) => got,
            Err(errno) => {
                assert_eq!(errno, Errno::INTR);
                0
            }
        };
        early += usize::from(got < SIZE);
        assert!(buffer.range_bytes(0..got) == file::bytes(0, got, 0), "{got} bytes");
        // Nothing writes into the buffer after the return.
        let after = buffer.range_bytes(0..SIZE);
        std::thread::sleep(Duration::from_millis(3));
        assert!(buffer.range_bytes(0..SIZE) == after, "a read was in flight after the return");
    }
    println!("{early} of 40 reads ended early");
    assert!(early > 0);
}

#[test]
fn other_programs_start_while_reads_are_in_flight() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    let device = emulated("size=256M");
    let runtime = Runtime::new(settings());
    if !warm_up(&runtime, &file, &Buffer::new(device, MIB)) {
        return;
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> =
            (0..2).map(|_| scope.spawn(|| reads_are_right(&runtime, &file, &Buffer::new(device, MIB)))).collect();
        scope.spawn(|| {
            while !over.load(SeqCst) {
                // posix_spawn: the child runs on this process's memory until it starts its program.
                assert!(Command::new("true").status().unwrap().success());
            }
        });
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        over.store(true, SeqCst);
        assert!(results.into_iter().all(|result| result.ok() == Some(0)));
    });
}

#[test]
fn reads_with_little_locked_memory_and_on_one_processor() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture, "file", SIZE) else { return };
    // Less than the ring's memory, and none.
    for limit in [64 << 10, 0] {
        in_child("reads with a small RLIMIT_MEMLOCK", || {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: sets a limit of this child.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
            let (device, runtime) = (emulated("size=64M"), Runtime::new(settings()));
            let buffer = Buffer::new(device, MIB);
            // Kernels that count a ring as locked memory refuse it: workers read.
            warm_up(&runtime, &file, &buffer);
            reads_are_right(&runtime, &file, &buffer)
        });
    }
    in_child("reads on one processor", || {
        // SAFETY: a set of this function; the child has one thread.
        unsafe {
            let mut one = std::mem::zeroed::<libc::cpu_set_t>();
            libc::sched_getaffinity(0, size_of_val(&one), &mut one);
            let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &one)).unwrap();
            libc::CPU_ZERO(&mut one);
            libc::CPU_SET(first, &mut one);
            assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &one), 0);
        }
        let (device, runtime) = (emulated("size=64M"), Runtime::new(settings()));
        let buffer = Buffer::new(device, MIB);
        if !warm_up(&runtime, &file, &buffer) {
            return 0;
        }
        reads_are_right(&runtime, &file, &buffer)
    });
}
