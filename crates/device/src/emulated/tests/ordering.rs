//! Enqueued work: its order, its time, and that it is read when it runs.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::*;

#[test]
fn early_source_reuse_copies_wrong_bytes() {
    let device = device("size=1M");
    let addr = device.alloc(4096, false).unwrap();
    let mut slot = vec![1u8; 4096];
    device.pause();
    // SAFETY: the slot outlives the copy; the test is that it changes meanwhile.
    unsafe { device.copy_in(DEFAULT_STREAM, addr, slot.as_ptr(), slot.len()) }.unwrap();
    let fence = device.fence(DEFAULT_STREAM).unwrap();
    assert_eq!(device.query(&fence), Ok(false));
    slot.fill(2);
    device.resume();
    device.wait(&fence, WaitMode::Block).unwrap();
    assert_eq!(device.query(&fence), Ok(true));
    device.release_fence(fence);
    assert_eq!(read_device(device, addr, 4096), vec![2; 4096]);
}

#[test]
fn streams_keep_documented_order() {
    let device = device("size=1M");
    let addr = device.alloc(1, false).unwrap();
    let app = device.new_stream().unwrap();
    let internal = device.acquire_stream().unwrap();
    let send = |queue, byte: &'static [u8; 1]| {
        // SAFETY: the byte is static.
        unsafe { device.copy_in(queue, addr, byte.as_ptr(), 1) }.unwrap();
    };
    device.pause();
    // The internal stream follows the program's, which was enqueued after nothing.
    send(app, &[1]);
    let fence = device.fence(app).unwrap();
    device.wait_event(internal, &fence).unwrap();
    device.release_fence(fence);
    send(internal, &[2]);
    let after = device.fence(internal).unwrap();
    device.wait_event(DEFAULT_STREAM, &after).unwrap();
    send(DEFAULT_STREAM, &[3]);
    send(app, &[4]);
    device.resume();
    device.synchronize(app, WaitMode::Block).unwrap();
    assert_eq!(device.query(&after), Ok(true), "stream 0 followed the internal stream and the program's waits for it");
    device.release_fence(after);
    assert_eq!(read_device(device, addr, 1), [4]);
    device.release_stream(internal);
    assert_eq!(device.resources_in_use(), ResourceCounts { allocations: 1, ..Default::default() });
}

#[test]
fn internal_stream_waits_for_no_other() {
    let device = device("size=1M,latency_us=200000");
    let addr = device.alloc(2, false).unwrap();
    let leased = device.acquire_stream().unwrap();
    let byte = [7u8];
    // SAFETY: the byte outlives both drains.
    unsafe { device.copy_in(DEFAULT_STREAM, addr, byte.as_ptr(), 1) }.unwrap();
    let queued = device.fence(DEFAULT_STREAM).unwrap();
    device.synchronize(leased, WaitMode::Block).unwrap();
    assert_eq!(device.query(&queued), Ok(false), "an empty internal stream must not wait for stream 0");
    device.wait(&queued, WaitMode::Block).unwrap();
    device.release_fence(queued);
}

#[test]
fn pools_are_bounded_and_reuse_released_entries() {
    let device = device("size=1M");
    let queues: Vec<StreamId> = std::iter::from_fn(|| device.acquire_stream().ok()).take(10_000).collect();
    assert!(queues.len() >= 8 && queues.len() < 10_000);
    assert_eq!(device.acquire_stream().unwrap_err().kind, ErrorKind::NoMemory);
    queues.iter().for_each(|&q| device.release_stream(q));
    let again = device.acquire_stream().unwrap();
    assert!(queues.contains(&again));
    device.release_stream(again);

    let fences: Vec<Fence> = std::iter::from_fn(|| device.fence(DEFAULT_STREAM).ok()).take(100_000).collect();
    assert!(fences.len() >= 1000 && fences.len() < 100_000);
    assert_eq!(device.fence(DEFAULT_STREAM).unwrap_err().kind, ErrorKind::NoMemory);
    fences.into_iter().for_each(|f| device.release_fence(f));
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn copy_takes_modelled_time() {
    let device = device("size=8M,gbps=0.1,latency_us=1000");
    let addr = device.alloc(4 << 20, false).unwrap();
    let bytes = pattern(4 << 20, 0);
    let started = Instant::now();
    write_device(device, addr, &bytes);
    assert!(started.elapsed() >= Duration::from_micros(41_900), "{:?}", started.elapsed());
    assert_eq!(read_device(device, addr, bytes.len()), bytes);
}

#[test]
fn threads_copy_concurrently() {
    let device = device("size=16M");
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            scope.spawn(move || {
                let addr = device.alloc(200_000, false).unwrap();
                for round in 0..20 {
                    let bytes = pattern(150_000 + round, thread * 1000 + round);
                    let queue = device.acquire_stream().unwrap();
                    // SAFETY: the bytes stay until the wait returns.
                    unsafe { device.copy_in(queue, addr, bytes.as_ptr(), bytes.len()) }.unwrap();
                    let fence = device.fence(queue).unwrap();
                    device.release_stream(queue);
                    device.wait(&fence, WaitMode::Block).unwrap();
                    device.release_fence(fence);
                    assert_eq!(read_device(device, addr, bytes.len()), bytes);
                }
                device.free(addr).unwrap();
            });
        }
    });
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn kernels_run_in_order_with_temporary_memory_access() {
    struct Add {
        at: DeviceAddr,
        len: usize,
        seen: core::result::Result<usize, Errno>,
    }
    unsafe extern "C" fn add(argument: *mut c_void) {
        // SAFETY: the test passes an `Add` and keeps it until the launch is done.
        let add = unsafe { &mut *argument.cast::<Add>() };
        // SAFETY: device memory is accessible while a kernel runs, and no other thread uses this range.
        let bytes = unsafe { core::slice::from_raw_parts_mut(add.at.0 as *mut u8, add.len) };
        add.seen = Ok(bytes.len());
        bytes.iter_mut().for_each(|b| *b = b.wrapping_add(1));
    }
    let device = device("size=1M,bar=64K");
    let at = device.alloc(5000, false).unwrap();
    let mut adds: Vec<Add> = (0..3).map(|_| Add { at, len: 5000, seen: Err(Errno::FAULT) }).collect();
    let bytes = pattern(5000, 3);
    let mut back = vec![0; 5000];
    let other = device.new_stream().unwrap();
    // A copy, kernels on two streams that are ordered with each other, a copy: nothing starts before all is enqueued.
    device.pause();
    // SAFETY: everything stays until `finish` returns.
    unsafe {
        device.copy_in(DEFAULT_STREAM, at, bytes.as_ptr(), bytes.len()).unwrap();
        for (one, queue) in adds.iter_mut().zip([DEFAULT_STREAM, other, DEFAULT_STREAM]) {
            device.launch(queue, add, (&raw mut *one).cast()).unwrap();
        }
        device.copy_out(DEFAULT_STREAM, back.as_mut_ptr(), at, back.len()).unwrap();
    }
    device.resume();
    device.wait_stream(DEFAULT_STREAM).unwrap();
    assert!(adds.iter().all(|a| a.seen == Ok(5000)));
    assert!(back.iter().zip(&bytes).all(|(b, a)| *b == a.wrapping_add(3)));
    assert_eq!(pread_into(at), Err(Errno::FAULT), "the memory is closed again");
    device.free(at).unwrap();
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn gather_copies_from_pinned_blocks_and_pins() {
    let device = device("size=1M");
    let at = device.alloc(10_000, false).unwrap();
    let (file, mapping) = mapped(&pattern(3 * linux::PAGE, 5));
    // SAFETY: the mapping stays until the end of the test.
    let pin = unsafe { device.pin(mapping, 3 * linux::PAGE) }.unwrap();
    let staging = device.alloc_pinned(linux::PAGE).unwrap();
    let (list, bytes) = (staging.ptr.cast::<GatherEntry>(), staging.ptr.wrapping_add(2048));
    let (view, pinned) = (device.device_ptr(bytes).unwrap(), device.pin_device_ptr(&pin).unwrap());
    device.pause();
    // SAFETY: the pinned memory is this test's, and everything stays until the drain.
    unsafe {
        list.write(GatherEntry { src: view + 1, dst: at.0 + 9_000, len: 600 });
        list.add(1).write(GatherEntry { src: pinned + linux::PAGE as u64 - 3, dst: at.0 + 1, len: 5_000 });
        list.add(2).write(GatherEntry { src: 0, dst: 0, len: 0 });
        device.gather(DEFAULT_STREAM, list, 3).unwrap();
        // Neither the list nor the bytes are read before the gather runs.
        core::ptr::copy_nonoverlapping(pattern(601, 9).as_ptr(), bytes, 601);
    }
    device.resume();
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    let mut back = vec![0; 10_000];
    // SAFETY: `back` stays until the drain.
    unsafe { device.copy_out(DEFAULT_STREAM, back.as_mut_ptr(), at, back.len()) }.unwrap();
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    assert_eq!(back[9_000..9_600], pattern(601, 9)[1..]);
    assert_eq!(back[1..5_001], pattern(3 * linux::PAGE, 5)[linux::PAGE - 3..][..5_000]);
    assert!(back[0] == POISON && back[5_001..9_000].iter().all(|&b| b == POISON));
    // An entry outside its allocation is reported by the next wait.
    // SAFETY: as above.
    unsafe {
        list.write(GatherEntry { src: view, dst: at.0 + 9_999, len: 2 });
        device.gather(DEFAULT_STREAM, list, 1).unwrap();
    }
    assert_eq!(device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap_err().kind, ErrorKind::BadAddress);
    device.unpin(pin);
    device.free_pinned(staging);
    device.free(at).unwrap();
    drop(file);
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn stop_holds_its_stream_and_no_other() {
    let device = device("size=1M");
    let at = device.alloc(4096, false).unwrap();
    let (stream, other) = (device.new_stream().unwrap(), device.acquire_stream().unwrap());
    let (sender, stops) = std::sync::mpsc::channel();
    let byte = |n: u8| vec![n].leak().as_ptr();
    // SAFETY: the bytes are never freed.
    let copy = |stream, n| unsafe { device.copy_in(stream, at, byte(n), 1) }.unwrap();
    device.pause();
    copy(stream, 1);
    for _ in 0..2 {
        let sender = sender.clone();
        device.stop_stream(stream, Box::new(move |stop| sender.send(stop).unwrap())).unwrap();
    }
    copy(stream, 2);
    copy(DEFAULT_STREAM, 3);
    let after = device.fence(DEFAULT_STREAM).unwrap();
    assert!(stops.try_recv().is_err(), "earlier work has not run");
    device.resume();
    let first = stops.recv().unwrap();
    let load = |stream| {
        let mut byte = 0;
        // SAFETY: waited for in the next line.
        unsafe { device.copy_out(stream, &mut byte, at, 1) }.unwrap();
        device.synchronize(stream, WaitMode::Block).unwrap();
        byte
    };
    assert_eq!((load(other), device.query(&after)), (1, Ok(false)));
    // A stopped stream does not keep the engine from being paused; and the second stop comes after the first.
    device.pause();
    drop(first);
    device.resume();
    let second = stops.recv().unwrap();
    assert_eq!((load(other), device.query(&after)), (1, Ok(false)));
    drop(second);
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    assert_eq!(load(other), 3, "the default stream waits for the program's streams");
    device.release_fence(after);
    device.release_stream(other);
    assert!(device.stop_stream(StreamId(99), Box::new(drop)).is_err());
    assert_eq!(device.resources_in_use(), ResourceCounts { allocations: 1, ..Default::default() });
}

/// Two words in device memory, by which two kernels talk.
struct Talk {
    first: AtomicU64,
    second: AtomicU64,
}

/// Waits for the second word, after it has set the first.
unsafe extern "C" fn asks(talk: *mut c_void) {
    // SAFETY: device memory, accessible while a kernel runs.
    let talk = unsafe { &*talk.cast::<Talk>() };
    talk.first.store(1, Release);
    while talk.second.load(Acquire) != 2 {
        std::thread::yield_now();
    }
    talk.first.store(3, Release);
}

unsafe extern "C" fn answers(talk: *mut c_void) {
    // SAFETY: as above.
    let talk = unsafe { &*talk.cast::<Talk>() };
    while talk.first.load(Acquire) != 1 {
        std::thread::yield_now();
    }
    talk.second.store(2, Release);
}

#[test]
fn kernels_of_two_streams_run_side_by_side() {
    let device = device("size=1M");
    let addr = device.alloc(4096, false).unwrap();
    write_device(device, addr, &[0; 4096]);
    let streams = [device.new_stream().unwrap(), device.new_unordered_stream().unwrap()];
    for round in 0..8 {
        let talk = addr.offset(64 * round).0 as *mut c_void;
        // SAFETY: the functions end, and the memory stays.
        unsafe {
            device.launch(streams[0], asks, talk).unwrap();
            device.launch(streams[1], answers, talk).unwrap();
        }
    }
    for stream in streams {
        device.wait_stream(stream).unwrap();
    }
    for round in 0..8 {
        // One kernel was the last each time, and closed the memory only then.
        assert_eq!(read_device(device, addr.offset(64 * round), 16)[..9], [3, 0, 0, 0, 0, 0, 0, 0, 2]);
    }
    // An unordered stream waits for nothing on stream 0.
    write_device(device, addr, &[0; 16]);
    // SAFETY: as above.
    unsafe {
        device.launch(DEFAULT_STREAM, asks, addr.0 as *mut c_void).unwrap();
        device.launch(streams[1], answers, addr.0 as *mut c_void).unwrap();
    }
    device.wait_stream(DEFAULT_STREAM).unwrap();
    assert_eq!(read_device(device, addr, 1), [3]);
}
