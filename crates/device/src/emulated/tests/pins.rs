//! Pins: the pages of a file, as they are when they are copied.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::os::unix::fs::FileExt;

use super::*;

/// Copies from a pin and waits.
fn copy_from_pin(device: &Emulated, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize) -> Vec<u8> {
    // SAFETY: the pin lives until the drain returns.
    unsafe { device.copy_pinned(DEFAULT_STREAM, dst, pin, offset, len) }.unwrap();
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    read_device(device, dst, len)
}

#[test]
fn pin_returns_file_bytes_in_any_order() {
    let device = device("size=4M");
    let addr = device.alloc(MAX_PIN, false).unwrap();
    let bytes = pattern(MAX_PIN, 3);
    let (_file, at) = mapped(&bytes);
    // SAFETY: the mapping is never unmapped.
    let pin = unsafe { device.pin(at, MAX_PIN) }.unwrap();
    for (offset, len) in [(0, MAX_PIN), (MAX_PIN - 5, 5), (0, 1), (70_001, 100_003), (4096, 4096), (5, 4096)] {
        assert_eq!(copy_from_pin(device, addr, &pin, offset, len), bytes[offset..offset + len], "{offset} {len}");
    }
    // SAFETY: refused, so nothing is copied.
    let past = unsafe { device.copy_pinned(DEFAULT_STREAM, addr, &pin, 1, MAX_PIN) };
    assert_eq!(past.unwrap_err().kind, ErrorKind::BadAddress);
    device.unpin(pin);
    // SAFETY: an unaligned range inside the mapping.
    let odd = unsafe { device.pin(at.add(5000), 9000) }.unwrap();
    assert_eq!(copy_from_pin(device, addr, &odd, 17, 8000), bytes[5017..13017]);
    device.unpin(odd);
    assert_eq!(device.resources_in_use().pins, 0);
}

#[test]
fn pin_shows_later_writes_and_survives_truncation() {
    let device = device("size=1M");
    let addr = device.alloc(8192, false).unwrap();
    let (file, at) = mapped(&[1; 8192]);
    // SAFETY: the mapping is never unmapped.
    let pin = unsafe { device.pin(at, 8192) }.unwrap();
    file.write_all_at(&[2; 4096], 0).unwrap();
    assert_eq!(copy_from_pin(device, addr, &pin, 0, 8192), [[2; 4096], [1; 4096]].concat());
    file.set_len(0).unwrap();
    file.write_all_at(&[3; 8192], 0).unwrap();
    assert_eq!(copy_from_pin(device, addr, &pin, 0, 8192), [[2; 4096], [1; 4096]].concat(), "orphans show the past");
    device.unpin(pin);
}

#[test]
fn pin_past_eof_is_refused_without_leak() {
    let device = device("size=1M");
    let (file, at) = mapped(&[1; 16384]);
    file.set_len(8192).unwrap();
    for _ in 0..200 {
        // SAFETY: the mapping is never unmapped; pages past the end are what is tested.
        let refused = unsafe { device.pin(at, 16384) };
        assert_eq!(refused.unwrap_err().kind, ErrorKind::PinRefused);
    }
    // SAFETY: as above.
    let pin = unsafe { device.pin(at, 8192) }.unwrap();
    device.unpin(pin);
    // SAFETY: as above.
    let long = unsafe { device.pin(at, MAX_PIN + 1) };
    assert_eq!(long.unwrap_err().kind, ErrorKind::PinRefused);
    assert_eq!(device.resources_in_use().pins, 0);
}

#[test]
fn pins_are_bounded_and_released() {
    let device = device("size=1M");
    let (_file, at) = mapped(&[1; 4096]);
    // SAFETY: the mapping is never unmapped.
    let pins: Vec<Pin> = std::iter::from_fn(|| unsafe { device.pin(at, 4096) }.ok()).take(10_000).collect();
    assert!(!pins.is_empty() && pins.len() < 10_000);
    let used_pipes = pins.len();
    assert_eq!(device.resources_in_use().pipes, used_pipes + 1);
    pins.into_iter().for_each(|p| device.unpin(p));
    assert_eq!(device.resources_in_use().pipes, 0);
    // SAFETY: as above.
    let again: Vec<Pin> = (0..used_pipes).map(|_| unsafe { device.pin(at, 4096) }.unwrap()).collect();
    again.into_iter().for_each(|p| device.unpin(p));
}
