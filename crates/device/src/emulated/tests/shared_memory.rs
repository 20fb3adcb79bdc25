//! Chunks: in this process, and in two.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use super::*;
use crate::emulated::chunks::GRANULARITY;

const G: u64 = GRANULARITY;
/// Set in the second process, to what it does with the chunk that is its standard input.
const ROLE: &str = "SPINIO_TEST_CHUNK_ROLE";

/// Maps private chunks, and makes those accessible that there was memory for.
fn map_accessible(device: &Emulated, at: DeviceAddr, lens: &[u64]) -> Result<usize> {
    let count = device.map_private_chunks(at, lens)?;
    let len = lens[..count].iter().sum();
    if count > 0 { device.protect_chunks(at, len, true).map(|()| count) } else { Ok(0) }
}

unsafe extern "C" fn store_seven(to: *mut c_void) {
    // SAFETY: the test passes an address of device memory, or expects the trap.
    unsafe { to.cast::<u8>().write_volatile(7) }
}

fn run_kernel(device: &Emulated, at: DeviceAddr) {
    // SAFETY: waited for; the argument is an address of device memory.
    unsafe { device.launch(DEFAULT_STREAM, store_seven, at.0 as *mut c_void) }.unwrap();
    device.wait_stream(DEFAULT_STREAM).unwrap();
}

#[test]
fn chunks_side_by_side_are_one_range() {
    let device = device("size=1M");
    let at = device.reserve(4 * G).unwrap();
    assert!(device.allocation(at, 1).is_none(), "addresses without memory are no allocation");
    let (small, _) = device.create_chunk(G).unwrap();
    let (large, _) = device.create_chunk(2 * G).unwrap();
    device.map_chunk(at, G, small, true).unwrap();
    device.map_chunk(at.offset(G), 2 * G, large, true).unwrap();
    let found = registry::find((at.0 + G + 5) as *const u8, 1).unwrap();
    assert_eq!((found.start, found.len), (at, 3 * G));
    assert_eq!(read_device(device, at.offset(G - 2), 4), [0; 4], "a new chunk has zeros");
    let bytes = pattern(5000, 1);
    write_device(device, at.offset(G - 100), &bytes);
    assert_eq!(read_device(device, at.offset(G - 100), 5000), bytes);
    assert!(device.map_chunk(at.offset(2 * G), G, small, true).is_err(), "occupied");
    assert!(device.free_reservation(at, 4 * G).is_err(), "chunks are mapped there");
    // The handle may go, the mapping stays.
    device.release_chunk(large).unwrap();
    device.unmap_chunk(at, G).unwrap();
    assert_eq!(read_device(device, at.offset(G), 4900), bytes[100..]);
    // SAFETY: refused.
    assert!(unsafe { device.copy_out(DEFAULT_STREAM, [0u8; 1].as_mut_ptr(), at, 1) }.is_err());
    // Mapped again, elsewhere: the same bytes.
    device.map_chunk(at.offset(3 * G), G, small, false).unwrap();
    assert_eq!(read_device(device, at.offset(4 * G - 100), 100), bytes[..100]);
    device.unmap_chunk(at.offset(3 * G), G).unwrap();
    device.unmap_chunk(at.offset(G), 2 * G).unwrap();
    device.release_chunk(small).unwrap();
    device.free_reservation(at, 4 * G).unwrap();
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn private_chunks_are_memory_of_the_device_until_they_are_unmapped() {
    let device = device("size=8M");
    let at = device.reserve(5 * G).unwrap();
    assert_eq!(map_accessible(device, at, &[G, 2 * G]), Ok(2));
    assert_eq!(read_device(device, at.offset(G - 2), 4), [POISON; 4]);
    let bytes = pattern(5000, 1);
    write_device(device, at.offset(G - 100), &bytes);
    run_kernel(device, at.offset(G - 99));
    assert_eq!(read_device(device, at.offset(G - 100), 4), [bytes[0], 7, bytes[2], bytes[3]]);
    let found = registry::find((at.0 + G - 5) as *const u8, 1).unwrap();
    assert_eq!((found.start, found.len), (at, 3 * G));
    assert!(map_accessible(device, at, &[G]).is_err(), "occupied");
    // One fits, and then neither a chunk nor an allocation.
    assert_eq!(map_accessible(device, at.offset(3 * G), &[G, G]), Ok(1));
    assert_eq!(map_accessible(device, at.offset(4 * G), &[G]), Ok(0));
    assert_eq!(device.alloc(1, false).unwrap_err().kind, ErrorKind::NoMemory);
    device.unmap_chunk(at, G).unwrap();
    // SAFETY: refused.
    assert!(unsafe { device.copy_out(DEFAULT_STREAM, [0u8; 1].as_mut_ptr(), at, 1) }.is_err());
    // Its memory is free: for an allocation, and then not for a chunk.
    let memory = device.alloc(1, false).unwrap();
    assert_eq!(map_accessible(device, at, &[G]), Ok(0));
    device.free(memory).unwrap();
    assert_eq!(map_accessible(device, at, &[G]), Ok(1));
    assert_eq!(read_device(device, at.offset(G - 100), 100), [POISON; 100], "new memory");
    for (chunk, len) in [(0, G), (1, 2 * G), (3, G)] {
        device.unmap_chunk(at.offset(chunk * G), len).unwrap();
    }
    device.free_reservation(at, 5 * G).unwrap();
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn private_chunks_are_accessible_once_that_was_asked_for() {
    let device = device("size=8M");
    let at = device.reserve(3 * G).unwrap();
    assert_eq!(device.map_private_chunks(at, &[G, G, G]), Ok(3));
    let mut byte = [0];
    // SAFETY: the byte lives until the device was synchronized.
    let mut load = |chunk: u64| unsafe { device.copy_out(DEFAULT_STREAM, byte.as_mut_ptr(), at.offset(chunk * G), 1) };
    assert_eq!(load(0).unwrap_err().kind, ErrorKind::BadAddress);
    device.protect_chunks(at, G, true).unwrap();
    device.protect_chunks(at.offset(2 * G), G, false).unwrap();
    assert_eq!([0, 1, 2].map(|chunk| load(chunk).is_ok()), [true, false, true]);
    // SAFETY: refused, or waited for.
    let store = |chunk: u64| unsafe { device.copy_in(DEFAULT_STREAM, at.offset(chunk * G), [1].as_ptr(), 1) };
    assert_eq!([1, 2].map(|chunk| store(chunk).is_ok()), [false, false]);
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    // A range with an inaccessible chunk in it is refused as a whole.
    // SAFETY: refused.
    assert!(unsafe { device.copy_out(DEFAULT_STREAM, [0; 2].as_mut_ptr(), at.offset(G - 1), 2) }.is_err());
    (0..3).for_each(|chunk| device.unmap_chunk(at.offset(chunk * G), G).unwrap());
    device.free_reservation(at, 3 * G).unwrap();
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn exported_private_chunk_keeps_its_bytes_when_it_is_unmapped() {
    let device = device("size=8M");
    let at = device.reserve(3 * G).unwrap();
    assert_eq!(map_accessible(device, at, &[G, 2 * G]), Ok(2));
    let bytes = pattern(5000, 3);
    write_device(device, at.offset(G + 100), &bytes);
    let fd = device.export_private_chunk(at.offset(G), 2 * G).unwrap();
    for (wrong, len) in [(at, 2 * G), (at.offset(2 * G), G), (at.offset(3 * G), G)] {
        assert!(device.export_private_chunk(wrong, len).is_err(), "no chunk of this length");
    }
    device.unmap_chunk(at.offset(G), 2 * G).unwrap();
    assert!(device.export_private_chunk(at.offset(G), 2 * G).is_err(), "unmapped");
    // Its memory counts no more.
    assert_eq!(map_accessible(device, at.offset(G), &[2 * G]), Ok(1));
    device.unmap_chunk(at.offset(G), 2 * G).unwrap();
    let chunk = device.import_chunk(fd.as_fd(), 2 * G).unwrap();
    device.map_chunk(at.offset(G), 2 * G, chunk, false).unwrap();
    assert_eq!(read_device(device, at.offset(G + 100), 5000), bytes);
    device.release_chunk(chunk).unwrap();
    device.unmap_chunk(at.offset(G), 2 * G).unwrap();
    device.unmap_chunk(at, G).unwrap();
    device.free_reservation(at, 3 * G).unwrap();
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn chunk_is_unmapped_after_the_work_that_uses_it() {
    let device = device("size=4M");
    let at = device.reserve(G).unwrap();
    assert_eq!(map_accessible(device, at, &[G]), Ok(1));
    let (source, mut back) = ([9u8; 100], [0u8; 100]);
    device.pause();
    std::thread::scope(|scope| {
        // SAFETY: the bytes live until the copies are done, which unmapping waits for.
        unsafe {
            device.copy_in(DEFAULT_STREAM, at, source.as_ptr(), 100).unwrap();
            device.copy_out(DEFAULT_STREAM, back.as_mut_ptr(), at, 100).unwrap();
        }
        let unmapping = scope.spawn(|| device.unmap_chunk(at, G).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(!unmapping.is_finished());
        device.resume();
    });
    assert_eq!(back, source);
}

#[test]
fn device_without_chunks_says_so() {
    assert!(device("size=1M,vmm=0").shared_memory().is_none());
}

#[test]
fn read_only_chunk_refuses_copies() {
    let device = device("size=1M");
    let at = device.reserve(G).unwrap();
    let (chunk, _fd) = device.create_chunk(G).unwrap();
    device.map_chunk(at, G, chunk, true).unwrap();
    write_device(device, at, &[1, 2, 3]);
    run_kernel(device, at.offset(1));
    device.protect_chunks(at, G, false).unwrap();
    // SAFETY: refused.
    assert!(unsafe { device.copy_in(DEFAULT_STREAM, at, [9u8].as_ptr(), 1) }.is_err());
    assert_eq!(read_device(device, at, 3), [1, 7, 3]);
    device.protect_chunks(at, G, true).unwrap();
    write_device(device, at, &[4]);
    assert!(device.protect_chunks(at, 2 * G, true).is_err());
    assert_eq!(pread_into(at), Err(Errno::FAULT), "the CPU cannot access it");
    device.unmap_chunk(at, G).unwrap();
    device.release_chunk(chunk).unwrap();
    device.free_reservation(at, G).unwrap();
}

/// The second process; its standard input is the chunk.
#[test]
fn second_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let device = device("size=1M");
    let chunk = device.import_chunk(std::io::stdin().as_fd(), G).unwrap();
    let at = device.reserve(G).unwrap();
    device.map_chunk(at, G, chunk, role == "write").unwrap();
    if role == "write" {
        assert_eq!(read_device(device, at, 4), [1, 2, 3, 4]);
        write_device(device, at.offset(100), &[5, 6]);
        run_kernel(device, at.offset(102));
    } else {
        run_kernel(device, at);
    }
}

fn second(role: &str, chunk: &std::os::fd::OwnedFd) -> std::process::ExitStatus {
    let name = "emulated::tests::shared_memory::second_process";
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", name, "-q"]).env(ROLE, role).stdin(chunk.try_clone().unwrap());
    command.stdout(Stdio::null()).status().unwrap()
}

#[test]
fn two_processes_share_a_chunk_and_a_store_to_a_read_only_one_traps() {
    let device = device("size=1M");
    let at = device.reserve(G).unwrap();
    let (chunk, fd) = device.create_chunk(G).unwrap();
    device.map_chunk(at, G, chunk, true).unwrap();
    write_device(device, at, &[1, 2, 3, 4]);
    assert!(second("write", &fd).success());
    assert_eq!(read_device(device, at.offset(100), 3), [5, 6, 7]);
    assert_eq!(second("store read-only", &fd).signal(), Some(libc::SIGSEGV));
    assert_eq!(read_device(device, at, 1), [1]);
    let other = Emulated::start(Config::default()).unwrap();
    assert_ne!(device.uuid().unwrap(), other.uuid().unwrap());
}

#[test]
fn descriptor_that_is_no_chunk_is_refused() {
    let device = device("size=1M");
    assert!(device.import_chunk(File::open("/dev/zero").unwrap().as_fd(), G).is_err());
    let unsealed = tempfile::tempfile().unwrap();
    unsealed.set_len(G).unwrap();
    assert!(device.import_chunk(unsealed.as_fd(), G).is_err(), "it could be truncated while it is mapped");
}
