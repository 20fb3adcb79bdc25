//! The device process, with the emulated device of this process and that of a real child.

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use spinio_device::{Device, DeviceAddr, SharedMemory, StreamId, WaitMode, emulated};

use super::*;

/// Set in the environment of the child.
const ROLE: &str = "SPINIO_TEST_DEVICE_PROCESS";
pub(crate) const CHUNK: u64 = 4 << 20;

/// The child begins here.
#[test]
fn device_process_role() {
    if std::env::var_os(ROLE).is_some() {
        let code = crate::server_role();
        std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
    }
}

fn child() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "device_process::tests::device_process_role", "--nocapture", "-q"]).env(ROLE, "1");
    command
}

fn process(idle: Duration) -> Arc<DeviceProcess> {
    DeviceProcess::with(Box::new(child), idle, WITHIN)
}

/// One whose requests may take this time.
pub(crate) fn impatient_process(within: Duration) -> Arc<DeviceProcess> {
    DeviceProcess::with(Box::new(child), Duration::from_secs(60), within)
}

/// A chunk of a program with these bytes.
#[expect(unsafe_code, reason = "copies to device memory")]
pub(crate) fn chunk_with(bytes: &[u8]) -> ([u8; 16], OwnedFd) {
    let device = emulated::device(0).unwrap();
    let (chunk, fd) = device.create_chunk(CHUNK).unwrap();
    let at: DeviceAddr = device.reserve(CHUNK).unwrap();
    device.map_chunk(at, CHUNK, chunk, true).unwrap();
    // SAFETY: waited for in the next line.
    unsafe { device.copy_in(StreamId(0), at, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    device.unmap_chunk(at, CHUNK).unwrap();
    device.free_reservation(at, CHUNK).unwrap();
    device.release_chunk(chunk).unwrap();
    (device.uuid().unwrap(), fd)
}

pub(crate) fn bytes() -> Vec<u8> {
    (0..CHUNK as usize).map(|i| (i / 4096) as u8 ^ (i % 251) as u8).collect()
}

fn memory_file(len: u64) -> OwnedFd {
    let file = memfd_create("target", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

fn content(file: &OwnedFd, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(file, &mut bytes, at).unwrap(), len);
    bytes
}

#[test]
fn ranges_of_a_chunk_arrive_where_they_belong_and_nothing_else_is_written() {
    let (process, all) = (process(Duration::from_secs(60)), bytes());
    let (uuid, fd) = chunk_with(&all);
    let chunk = process.chunk(uuid, fd, CHUNK);
    let file = memory_file(16 << 20);
    let target = process.target(file.try_clone().unwrap());
    assert_eq!(process.starts(), 0, "not before the first request");
    process.import(&chunk).unwrap();
    let range = |from, to, len| CopyRange { from, to, len };
    let many: Vec<CopyRange> = (0..300).map(|n| range((299 - n) * 4096, (1 << 20) + n * 8192, 4096)).collect();
    process.copy(&chunk, &target, &many).unwrap();
    process.copy(&chunk, &target, &[range(7, 5, 100), range(0, 8 << 20, CHUNK)]).unwrap();
    assert_eq!(content(&file, 0, 5), [0; 5]);
    assert!(content(&file, 5, 100) == all[7..107] && content(&file, 105, 100) == [0; 100]);
    for n in 0..300 {
        let at = (299 - n) * 4096;
        assert!(content(&file, (1 << 20) + n as u64 * 8192, 4096) == all[at..at + 4096], "{n}");
        assert!(content(&file, (1 << 20) + n as u64 * 8192 + 4096, 4096) == [0; 4096], "{n}");
    }
    assert!(content(&file, 8 << 20, CHUNK as usize) == all);
    // Outside of the chunk, or of the file: an answer, and the process lives on.
    for wrong in [range(CHUNK - 1, 0, 2), range(u64::MAX, 0, 2), range(0, (16 << 20) - 1, 2), range(0, u64::MAX, 1)] {
        assert_eq!(process.copy(&chunk, &target, &[wrong]), Err(Errno::INVAL));
    }
    let not_a_chunk = process.chunk(uuid, memory_file(CHUNK), CHUNK);
    assert_eq!(process.import(&not_a_chunk), Err(Errno::IO));
    let no_device = process.chunk(*b"spinio-emu\0\0\x63\0\0\0", memory_file(CHUNK), CHUNK);
    assert_eq!(process.import(&no_device), Err(Errno::NODEV));
    assert_eq!(process.starts(), 1);
}

#[test]
fn copy_whose_process_is_killed_is_repeated_by_another() {
    let (process, all) = (process(Duration::from_secs(60)), bytes());
    let (uuid, fd) = chunk_with(&all);
    let chunk = process.chunk(uuid, fd, CHUNK);
    let file = memory_file(CHUNK);
    let target = process.target(file.try_clone().unwrap());
    let whole = [CopyRange { from: 0, to: 0, len: CHUNK }];
    process.copy(&chunk, &target, &whole).unwrap();
    let mut killed = 0;
    std::thread::scope(|scope| {
        let copies = scope.spawn(|| (0..20).try_for_each(|_| process.copy(&chunk, &target, &whole)));
        while !copies.is_finished() && killed < 3 {
            std::thread::sleep(Duration::from_millis(20));
            // One that was killed before may be gone by now.
            if process.pid().is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok()) {
                killed += 1;
            }
        }
        copies.join().unwrap().unwrap();
    });
    process.copy(&chunk, &target, &whole).unwrap();
    assert!(content(&file, 0, CHUNK as usize) == all);
    assert!(killed == 0 || process.starts() > 1);
}

#[test]
fn process_that_closes_its_socket_and_ends_later_is_one_attempt() {
    let first = AtomicBool::new(true);
    let command = move || {
        if !first.swap(false, Relaxed) {
            return child();
        }
        let mut command = Command::new("sh");
        command.args(["-c", "exec 0<&-; sleep 0.3"]);
        command
    };
    let process = DeviceProcess::with(Box::new(command), Duration::from_secs(60), WITHIN);
    let (uuid, fd) = chunk_with(&bytes());
    let chunk = process.chunk(uuid, fd, CHUNK);
    process.prepare(uuid);
    std::thread::sleep(Duration::from_millis(100));
    process.import(&chunk).unwrap();
    assert_eq!(process.starts(), 2);
}

#[test]
fn processes_that_die_one_after_the_other_are_an_error_that_may_pass() {
    let deaths = AtomicU32::new(0);
    let command = move || if deaths.fetch_add(1, Relaxed) < 4 { Command::new("false") } else { child() };
    let process = DeviceProcess::with(Box::new(command), Duration::from_secs(60), WITHIN);
    let (uuid, fd) = chunk_with(&bytes());
    let chunk = process.chunk(uuid, fd, CHUNK);
    assert_eq!(process.import(&chunk), Err(Errno::AGAIN));
    process.import(&chunk).unwrap();
}

#[test]
fn idle_process_ends_and_the_next_request_starts_another() {
    let process = process(Duration::from_millis(200));
    let (uuid, fd) = chunk_with(&bytes());
    let chunk = process.chunk(uuid, fd, CHUNK);
    process.import(&chunk).unwrap();
    let give_up = Instant::now() + Duration::from_secs(60);
    while process.pid().is_some() {
        assert!(Instant::now() < give_up, "it has not ended");
        std::thread::sleep(Duration::from_millis(10));
    }
    let file = memory_file(4096);
    let target = process.target(file.try_clone().unwrap());
    process.copy(&chunk, &target, &[CopyRange { from: 4096, to: 0, len: 4096 }]).unwrap();
    assert_eq!((content(&file, 0, 4096), process.starts()), (bytes()[4096..8192].to_vec(), 2));
}

#[test]
fn second_process_copies_to_a_file_after_the_first_has_ended() {
    let (first, second) = (process(Duration::from_secs(60)), process(Duration::from_secs(60)));
    let (uuid, fd) = chunk_with(&bytes());
    let file = memory_file(4096);
    let copy = [CopyRange { from: 0, to: 0, len: 4096 }];
    let targets = [&first, &second].map(|process| process.target(file.try_clone().unwrap()));
    let chunk = first.chunk(uuid, fd.try_clone().unwrap(), CHUNK);
    first.copy(&chunk, &targets[0], &copy).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| second.copy(&second.chunk(uuid, fd, CHUNK), &targets[1], &copy));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waits.is_finished(), "the first has the lock");
        kill_process(first.pid().unwrap(), Signal::KILL).unwrap();
        waits.join().unwrap().unwrap();
    });
}
