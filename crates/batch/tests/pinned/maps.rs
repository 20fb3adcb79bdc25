//! A pinned file as memory of the program's own GPU kernels.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::OpenOptions;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use spinio_device::StreamId;
use spinio_io::{PinError, Runtime};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{eventually, file, with_deadline};

use crate::{SIZE, Subject, pin_or_skip, settings, wait_no_pins, wait_no_writer};

#[test]
fn mapping_belongs_to_its_process() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    let other = runtime.map(subject.fd(), 0, 4096, device).unwrap();
    let mut mapped = Some(runtime.map(subject.fd(), 5000, 3 << 19, device).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Holds the locks of the pinned file most of the time: a child would wait for them.
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                std::hint::black_box(other.revoke_requested());
            }
        });
        for _ in 0..100 {
            // SAFETY: the child reads the map, drops it and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let inherited = mapped.take().unwrap();
                let odd = inherited.is_own_process() || inherited.revoke_requested();
                drop(inherited);
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(odd)) };
            }
            let mut status = 0;
            with_deadline("a child that drops a map", || {
                // SAFETY: waits for the child of this test.
                unsafe { libc::waitpid(child, &mut status, 0) };
            });
            assert_eq!(status, 0);
        }
        stop.store(true, SeqCst);
    });
    let mapped = mapped.unwrap();
    assert!(mapped.is_own_process() && !mapped.revoke_requested());
    assert!(device.resources_in_use().pins > 0, "a child unpinned pages that its parent reads");
    drop((mapped, other));
}

#[test]
fn mapping_is_readable_and_delays_writers() {
    struct Sum {
        from: *const u8,
        len: usize,
        sum: u64,
    }
    unsafe extern "C" fn sum(argument: *mut core::ffi::c_void) {
        // SAFETY: the test passes a `Sum` and keeps it until the launch is done.
        let all = unsafe { &mut *argument.cast::<Sum>() };
        // SAFETY: the mapped range, as long as the map is there.
        let bytes = unsafe { core::slice::from_raw_parts(all.from, all.len) };
        all.sum = bytes.iter().map(|&b| u64::from(b)).sum();
    }
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    assert_eq!(runtime.map(subject.fd(), 10, SIZE as u64, device).unwrap_err(), PinError::OutOfRange);
    let other = Runtime::new(settings());
    assert_eq!(other.map(subject.fd(), u64::MAX, 2, device).unwrap_err(), PinError::OutOfRange);
    assert!(!other.is_pinned(subject.fd()), "pinned in vain");
    let mapped = runtime.map(subject.fd(), 5000, 3 << 19, device).unwrap();
    assert!(!mapped.revoke_requested());
    let mut all = Sum { from: mapped.address() as *const u8, len: mapped.len() as usize, sum: 0 };
    // SAFETY: `all` stays until `finish` returns.
    unsafe { device.launch(StreamId(0), sum, (&raw mut all).cast()) }.unwrap();
    device.wait_stream(StreamId(0)).unwrap();
    assert_eq!(all.sum, file::bytes(5000, 3 << 19, 0).iter().map(|&b| u64::from(b)).sum::<u64>());
    let writer_done = AtomicBool::new(false);
    with_deadline("a map and a writer", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(OpenOptions::new().write(true).open(&subject.path).unwrap());
                writer_done.store(true, SeqCst);
            });
            eventually("the map is revoked", || mapped.revoke_requested());
            assert!(!writer_done.load(SeqCst));
            drop(mapped);
        });
    });
    assert!(writer_done.load(SeqCst));
    wait_no_pins(device);
    wait_no_writer(&subject.file);
    let address = runtime.map_until_unmap(subject.fd(), 0, 100, device).unwrap();
    assert_eq!(runtime.revoke_requested(address), Some(false));
    assert!(runtime.unmap(address) && !runtime.unmap(address));
    assert_eq!(runtime.revoke_requested(address), None);
}

#[test]
fn mapping_of_one_file_delays_no_other() {
    let (mapped_file, other) = (Subject::new(), Subject::new());
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &mapped_file, device) || !pin_or_skip(&runtime, &other, device) {
        return;
    }
    let mapped = runtime.map(mapped_file.fd(), 0, 4096, device).unwrap();
    runtime.unpin_file(mapped_file.fd()).unwrap();
    with_deadline("unpinning a file while another one is mapped", || runtime.unpin_file(other.fd()).unwrap());
    assert!(runtime.pinned_bytes() > 0, "pages that are mapped were unpinned");
    drop(mapped);
    wait_no_pins(device);
}

#[test]
fn unpinning_returns_though_another_thread_maps_meanwhile() {
    let subject = &Subject::new();
    // Registering takes long: the mapping begins before the file is unpinned, and exists after that.
    let device = emulated("size=64M,pin_us=300000");
    let runtime = &Runtime::new(settings());
    wait_no_writer(&subject.file);
    match runtime.pin_file(subject.fd(), None) {
        Err(PinError::NoLeases) => return eprintln!("skipped: no leases here"),
        pinned => drop(pinned.unwrap()),
    }
    with_deadline("unpinning while a thread maps", || {
        let (unpinned, wait_unpinned) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mapped = runtime.map(subject.fd(), 0, 4096, device);
                wait_unpinned.recv().unwrap();
                drop(mapped);
            });
            std::thread::sleep(std::time::Duration::from_millis(100));
            runtime.unpin_file(subject.fd()).unwrap();
            unpinned.send(()).unwrap();
        });
    });
}
