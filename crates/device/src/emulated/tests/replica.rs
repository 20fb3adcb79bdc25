//! Replicas of pages and their scan.

use super::*;
use crate::{Fingerprint, PAGE_BYTES};

fn slots(device: &Emulated) -> DeviceAddr {
    device.alloc_replica(PAGE_BYTES as u64).unwrap()
}

fn scan(device: &Emulated, stream: StreamId, at: DeviceAddr, count: usize) -> Vec<Fingerprint> {
    let mut out = vec![Fingerprint::default(); count];
    let slots = slots(device);
    // SAFETY: the stream is synchronized before the list is read.
    unsafe { device.fingerprint_pages(stream, at, count, slots, out.as_mut_ptr()) }.unwrap();
    device.synchronize(stream, WaitMode::Block).unwrap();
    device.free_replica(slots).unwrap();
    out
}

#[test]
fn scan_returns_the_fingerprints_of_device_pages() {
    let device = device("size=1M");
    let at = device.alloc_replica(4 * PAGE_BYTES as u64).unwrap();
    let bytes = pattern(4 * PAGE_BYTES, 3);
    write_device(device, at, &bytes);
    let wanted: Vec<_> = bytes.as_chunks().0.iter().map(Fingerprint::of).collect();
    assert_eq!(scan(device, DEFAULT_STREAM, at, 4), wanted);
    write_device(device, at.offset(PAGE_BYTES as u64 + 9), &[99]);
    let changed = scan(device, DEFAULT_STREAM, at, 4);
    let differ: Vec<_> = (0..4).filter(|&i| changed[i] != wanted[i]).collect();
    assert_eq!(differ, [1]);
    device.free_replica(at).unwrap();
}

#[test]
fn scan_runs_in_the_order_of_its_stream() {
    let device = device("size=1M");
    let at = device.alloc_replica(PAGE_BYTES as u64).unwrap();
    let (old, new) = ([1u8; PAGE_BYTES], [2u8; PAGE_BYTES]);
    write_device(device, at, &old);
    let (stream, slots) = (device.acquire_stream().unwrap(), slots(device));
    let mut out = [Fingerprint::default(); 2];
    device.pause();
    // SAFETY: the list and the bytes live until the synchronization below.
    unsafe {
        device.fingerprint_pages(stream, at, 1, slots, out.as_mut_ptr()).unwrap();
        device.copy_in(stream, at, new.as_ptr(), new.len()).unwrap();
        device.fingerprint_pages(stream, at, 1, slots, out.as_mut_ptr().add(1)).unwrap();
    }
    device.resume();
    device.synchronize(stream, WaitMode::Block).unwrap();
    device.release_stream(stream);
    assert_eq!(out, [Fingerprint::of(&old), Fingerprint::of(&new)]);
}

#[test]
fn scan_outside_an_allocation_is_refused() {
    let device = device("size=1M");
    let at = device.alloc_replica(2 * PAGE_BYTES as u64).unwrap();
    let (mut out, slots) = ([Fingerprint::default(); 4], slots(device));
    for (at, count) in [(at, 3), (DeviceAddr(4096), 1), (at, usize::MAX / 2)] {
        // SAFETY: refused before anything is enqueued.
        let refused = unsafe { device.fingerprint_pages(DEFAULT_STREAM, at, count, slots, out.as_mut_ptr()) };
        assert_eq!(refused.unwrap_err().kind, ErrorKind::BadAddress);
    }
    assert!(device.alloc_replica(100).is_err());
}
