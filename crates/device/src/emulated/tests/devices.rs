//! Several devices in one process: their identities, their streams, copies and kernels across them.

use std::os::fd::AsFd;
use std::sync::Mutex;

use super::*;
use crate::{PeerError, PeerMemory, PeerPiece, emulated};

/// The devices of this process: the same for all tests here, each of which has its own of the first.
fn devices() -> [&'static Emulated; 3] {
    emulated::configure("devices=3,size=64M").unwrap();
    [0, 1, 2].map(|ordinal| emulated::device(ordinal).unwrap())
}

#[test]
fn device_has_its_number_whichever_is_first() {
    emulated::configure("devices=3,size=64M").unwrap();
    let last = emulated::device(2).unwrap();
    let [first, second, third] = devices();
    assert!(core::ptr::eq(last, third));
    assert_eq!([first, second, third].map(|d| d.id().to_string()), ["emulated:0", "emulated:1", "emulated:2"]);
    let uuids = [first, second, third].map(|d| d.uuid().unwrap());
    assert_eq!(uuids.map(|uuid| (uuid[..10] == *b"spinio-emu", uuid[12])), [(true, 0), (true, 1), (true, 2)]);
    assert_eq!(emulated::device(3).unwrap_err().kind, ErrorKind::Unsupported);
    // They exist: another configuration has no effect.
    emulated::configure("devices=8").unwrap();
    assert_eq!(emulated::count(), 3);
}

#[test]
fn address_belongs_to_the_device_that_allocated_it() {
    let [first, second, _] = devices();
    for device in [second, first] {
        let addr = registry::alloc(DeviceKind::Emulated, device.ordinal, 5000, false).unwrap();
        let found = registry::find(addr.0 as *const u8, 5000).unwrap();
        assert_eq!((found.device.id(), found.start), (device.id(), addr));
        write_device(device, addr, &pattern(5000, 3));
        registry::free(addr).unwrap();
        assert!(registry::find(addr.0 as *const u8, 1).is_none());
    }
}

#[test]
fn stream_of_another_device_is_refused() {
    let [first, second, _] = devices();
    let (of_first, of_second) = (first.new_stream().unwrap(), second.new_stream().unwrap());
    assert_ne!(of_first, of_second);
    let unknown = |result: Result<()>| result.unwrap_err().kind == ErrorKind::BadAddress;
    assert!(unknown(first.synchronize(of_second, WaitMode::Block)));
    assert!(unknown(second.synchronize(of_first, WaitMode::Block)));
    second.synchronize(of_second, WaitMode::Block).unwrap();
    let internal = second.acquire_stream().unwrap();
    assert!(unknown(first.synchronize(internal, WaitMode::Block)));
    second.release_stream(internal);
    assert!(unknown(second.synchronize(internal, WaitMode::Block)));
}

#[test]
fn thread_chooses_its_device() {
    let [first, second, third] = devices();
    let id = || emulated::current().unwrap().id();
    assert_eq!(id(), first.id());
    emulated::set_current(1).unwrap();
    assert_eq!((id(), registry::current_device().unwrap().id()), (second.id(), second.id()));
    let other = std::thread::spawn(move || {
        let before = emulated::current_ordinal();
        emulated::set_current(2).unwrap();
        (before, emulated::current().unwrap().id())
    });
    assert_eq!(other.join().unwrap(), (0, third.id()));
    assert_eq!(id(), second.id());
    assert!(emulated::set_current(3).is_err());
    assert_eq!(id(), second.id());
}

#[test]
fn copies_between_devices_are_in_stream_order() {
    let [first, second, _] = devices();
    let (from, to) = (first.alloc(100_000, false).unwrap(), second.alloc(100_000, false).unwrap());
    let bytes = pattern(100_000, 9);
    write_device(first, from, &bytes);
    second.pause();
    // SAFETY: both stay allocated until the stream was waited for.
    unsafe { second.copy_between(DEFAULT_STREAM, to, from, bytes.len()) }.unwrap();
    // The source is read when the copy runs.
    write_device(first, from, &[7; 10]);
    second.resume();
    let expected = [&[7; 10], &bytes[10..]].concat();
    assert_eq!(read_device(second, to, bytes.len()), expected);
    // A stream of one device may copy out of the other, or within it.
    write_device(second, to, &bytes);
    // SAFETY: as above.
    unsafe { second.copy_between(DEFAULT_STREAM, from, to, 50_000) }.unwrap();
    second.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    assert_eq!(read_device(first, from, 100_000), [&bytes[..50_000], &expected[50_000..]].concat());
    // SAFETY: refused.
    let outside = unsafe { second.copy_between(DEFAULT_STREAM, to, from, 100_001) };
    assert_eq!(outside.unwrap_err().kind, ErrorKind::BadAddress);
    first.free(from).unwrap();
    second.free(to).unwrap();
}

#[test]
fn kernel_accesses_the_memory_of_a_peer() {
    /// Adds the second word to the first.
    unsafe extern "C" fn add(words: *mut c_void) {
        // SAFETY: the test passes two addresses of device memory, which is accessible while a kernel runs.
        unsafe {
            let [into, from] = *words.cast::<[*mut u64; 2]>();
            *into += *from;
        }
    }
    let (first, second) = (device("size=1M"), device("size=1M"));
    let (into, from) = (first.alloc(8, false).unwrap(), second.alloc(8, false).unwrap());
    write_device(first, into, &5u64.to_le_bytes());
    write_device(second, from, &6u64.to_le_bytes());
    assert!(first.enable_peer_access(second).unwrap());
    assert!(!first.enable_peer_access(second).unwrap());
    let stored = Mutex::new([into.0, from.0]);
    let words = stored.lock().unwrap().as_mut_ptr().cast::<c_void>();
    for _ in 0..3 {
        // SAFETY: the words stay until the stream was waited for.
        unsafe { first.launch(DEFAULT_STREAM, add, words) }.unwrap();
    }
    first.wait_stream(DEFAULT_STREAM).unwrap();
    assert_eq!(read_device(first, into, 8), 23u64.to_le_bytes());
    // No kernel runs: neither memory is the CPU's.
    assert_eq!([into, from].map(pread_into), [Err(Errno::FAULT); 2]);
}

#[test]
fn device_without_peers_is_none() {
    let (with, without) = (device("size=1M"), device("size=1M,peer=0"));
    for (one, other) in [(with, without), (without, with), (with, with)] {
        assert!(!one.can_access_peer(other));
        assert_eq!(one.enable_peer_access(other).unwrap_err().kind, ErrorKind::Unsupported);
    }
}

#[test]
fn imported_chunks_are_copied_side_by_side_and_leave_nothing() {
    const G: u64 = 2 << 20;
    let [_, first, _] = devices();
    let second = device("size=1M");
    let lens = [G, 2 * G];
    let theirs = lens.map(|len| first.create_chunk(len).unwrap());
    let there = first.reserve(3 * G).unwrap();
    first.map_chunk(there, G, theirs[0].0, true).unwrap();
    first.map_chunk(there.offset(G), 2 * G, theirs[1].0, true).unwrap();
    let bytes = pattern(3 * G as usize, 4);
    write_device(first, there, &bytes);

    let (imports, to) = (second.reserve(3 * G).unwrap(), second.reserve(3 * G).unwrap());
    let (own, _) = second.create_chunk(3 * G).unwrap();
    second.map_chunk(to, 3 * G, own, true).unwrap();
    assert_eq!(second.check_access(first.uuid().unwrap()), Ok(()));
    assert_eq!(second.check_access(second.uuid().unwrap()), Err(PeerError::NoAccess));
    assert_eq!(second.check_access([7; 16]), Err(PeerError::NoDevice));
    let piece = PeerPiece { from: imports, to, len: 3 * G as usize };
    let copy = || second.copy_from_chunks(&mut [Ok(&[piece][..])].into_iter());
    assert!(matches!(copy(), Err(PeerError::Copy(_))), "nothing is imported");
    for (at, (_, fd)) in [imports, imports.offset(G)].into_iter().zip(&theirs) {
        let len = if at == imports { G } else { 2 * G };
        let imported = second.import_chunk(fd.as_fd(), len).unwrap();
        second.map_without_access(at, len, imported).unwrap();
        second.release_chunk(imported).unwrap();
    }
    assert!(matches!(copy(), Err(PeerError::Copy(_))), "without access");
    second.protect_chunks(imports, 3 * G, false).unwrap();
    assert_eq!(copy(), Ok(()));
    assert!(read_device(second, to, bytes.len()) == bytes);
    // They are for loads.
    let into_import = PeerPiece { from: imports, to: imports.offset(G), len: G as usize };
    let refused = second.copy_from_chunks(&mut [Ok(&[into_import][..])].into_iter());
    assert!(matches!(refused, Err(PeerError::Copy(_))), "{refused:?}");
    // What fails before a group does not take back the groups before it.
    write_device(second, to, &pattern(bytes.len(), 5));
    let groups = [Ok(&[piece][..]), Err(PeerError::NoDevice)];
    assert_eq!(second.copy_from_chunks(&mut groups.into_iter()), Err(PeerError::NoDevice));
    assert!(read_device(second, to, bytes.len()) == bytes);

    second.unmap_imports(imports, &lens).unwrap();
    second.free_reservation(imports, 3 * G).unwrap();
    second.unmap_chunk(to, 3 * G).unwrap();
    second.release_chunk(own).unwrap();
    second.free_reservation(to, 3 * G).unwrap();
    assert_eq!(second.resources_in_use(), ResourceCounts::default());
    first.unmap_chunk(there, G).unwrap();
    first.unmap_chunk(there.offset(G), 2 * G).unwrap();
    first.free_reservation(there, 3 * G).unwrap();
    for (chunk, _) in theirs {
        first.release_chunk(chunk).unwrap();
    }
}
