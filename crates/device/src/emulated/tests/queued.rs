//! What is queued: its order, its time, and that it is read when its turn has come.

use std::time::{Duration, Instant};

use super::*;

#[test]
fn a_source_reused_too_early_sends_the_wrong_bytes() {
    let device = device("size=1M");
    let addr = device.alloc(4096, false).unwrap();
    let mut slot = vec![1u8; 4096];
    device.hold();
    // SAFETY: the slot outlives the copy; that it changes meanwhile is the test.
    unsafe { device.copy_in(Q0, addr, slot.as_ptr(), slot.len()) }.unwrap();
    let fence = device.fence(Q0).unwrap();
    assert_eq!(device.is_done(&fence), Ok(false));
    slot.fill(2);
    device.resume();
    device.wait(&fence, Wait::Sleep).unwrap();
    assert_eq!(device.is_done(&fence), Ok(true));
    device.release_fence(fence);
    assert_eq!(get(device, addr, 4096), vec![2; 4096]);
}

#[test]
fn queues_keep_the_order_they_promise() {
    let device = device("size=1M");
    let addr = device.alloc(1, false).unwrap();
    let program = device.new_queue().unwrap();
    let leased = device.lease_queue().unwrap();
    let send = |queue, byte: &'static [u8; 1]| {
        // SAFETY: the byte is static.
        unsafe { device.copy_in(queue, addr, byte.as_ptr(), 1) }.unwrap();
    };
    device.hold();
    // The leased queue follows the program's, which was queued later than nothing.
    send(program, &[1]);
    let fence = device.fence(program).unwrap();
    device.follow(leased, &fence).unwrap();
    device.release_fence(fence);
    send(leased, &[2]);
    let after = device.fence(leased).unwrap();
    device.follow(Q0, &after).unwrap();
    send(Q0, &[3]);
    send(program, &[4]);
    device.resume();
    device.drain(program, Wait::Sleep).unwrap();
    assert_eq!(device.is_done(&after), Ok(true), "queue 0 followed the leased queue and the program's waits for it");
    device.release_fence(after);
    assert_eq!(get(device, addr, 1), [4]);
    device.return_queue(leased);
    assert_eq!(device.outstanding(), Outstanding { allocations: 1, ..Default::default() });
}

#[test]
fn a_leased_queue_waits_for_nobody() {
    let device = device("size=1M,latency_us=200000");
    let addr = device.alloc(2, false).unwrap();
    let leased = device.lease_queue().unwrap();
    let byte = [7u8];
    // SAFETY: the byte outlives both drains.
    unsafe { device.copy_in(Q0, addr, byte.as_ptr(), 1) }.unwrap();
    let queued = device.fence(Q0).unwrap();
    device.drain(leased, Wait::Sleep).unwrap();
    assert_eq!(device.is_done(&queued), Ok(false), "an empty leased queue must not wait for queue 0");
    device.wait(&queued, Wait::Sleep).unwrap();
    device.release_fence(queued);
}

#[test]
fn pools_are_bounded_and_what_is_given_back_is_lent_again() {
    let device = device("size=1M");
    let queues: Vec<QueueId> = std::iter::from_fn(|| device.lease_queue().ok()).take(10_000).collect();
    assert!(queues.len() >= 8 && queues.len() < 10_000);
    assert_eq!(device.lease_queue().unwrap_err().kind, ErrorKind::NoMemory);
    queues.iter().for_each(|&q| device.return_queue(q));
    let again = device.lease_queue().unwrap();
    assert!(queues.contains(&again));
    device.return_queue(again);

    let fences: Vec<Fence> = std::iter::from_fn(|| device.fence(Q0).ok()).take(100_000).collect();
    assert!(fences.len() >= 1000 && fences.len() < 100_000);
    assert_eq!(device.fence(Q0).unwrap_err().kind, ErrorKind::NoMemory);
    fences.into_iter().for_each(|f| device.release_fence(f));
    assert_eq!(device.outstanding(), Outstanding::default());
}

#[test]
fn a_copy_takes_its_time() {
    let device = device("size=8M,gbps=0.1,latency_us=1000");
    let addr = device.alloc(4 << 20, false).unwrap();
    let bytes = pattern(4 << 20, 0);
    let begun = Instant::now();
    put(device, addr, &bytes);
    assert!(begun.elapsed() >= Duration::from_micros(41_900), "{:?}", begun.elapsed());
    assert_eq!(get(device, addr, bytes.len()), bytes);
}

#[test]
fn threads_copy_side_by_side() {
    let device = device("size=16M");
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            scope.spawn(move || {
                let addr = device.alloc(200_000, false).unwrap();
                for round in 0..20 {
                    let bytes = pattern(150_000 + round, thread * 1000 + round);
                    let queue = device.lease_queue().unwrap();
                    // SAFETY: the bytes stay until the wait returns.
                    unsafe { device.copy_in(queue, addr, bytes.as_ptr(), bytes.len()) }.unwrap();
                    let fence = device.fence(queue).unwrap();
                    device.return_queue(queue);
                    device.wait(&fence, Wait::Sleep).unwrap();
                    device.release_fence(fence);
                    assert_eq!(get(device, addr, bytes.len()), bytes);
                }
                device.free(addr).unwrap();
            });
        }
    });
    assert_eq!(device.outstanding(), Outstanding::default());
}

#[test]
fn kernels_run_in_order_and_have_the_memory_for_that_time_only() {
    struct Add {
        at: DeviceAddr,
        len: usize,
        seen: core::result::Result<usize, Errno>,
    }
    unsafe extern "C" fn add(argument: *mut c_void) {
        // SAFETY: the test passes an `Add` and keeps it until the launch is done.
        let add = unsafe { &mut *argument.cast::<Add>() };
        // SAFETY: device memory is open while a kernel runs, and nobody else uses this range.
        let bytes = unsafe { core::slice::from_raw_parts_mut(add.at.0 as *mut u8, add.len) };
        add.seen = Ok(bytes.len());
        bytes.iter_mut().for_each(|b| *b = b.wrapping_add(1));
    }
    let device = device("size=1M,bar=64K");
    let at = device.alloc(5000, false).unwrap();
    let mut adds: Vec<Add> = (0..3).map(|_| Add { at, len: 5000, seen: Err(Errno::FAULT) }).collect();
    let bytes = pattern(5000, 3);
    let mut back = vec![0; 5000];
    let other = device.new_queue().unwrap();
    // A copy, kernels on two queues that are ordered with each other, a copy: nothing starts before all is queued.
    device.hold();
    // SAFETY: everything stays until `finish` returns.
    unsafe {
        device.copy_in(Q0, at, bytes.as_ptr(), bytes.len()).unwrap();
        for (one, queue) in adds.iter_mut().zip([Q0, other, Q0]) {
            device.launch(queue, add, (&raw mut *one).cast()).unwrap();
        }
        device.copy_out(Q0, back.as_mut_ptr(), at, back.len()).unwrap();
    }
    device.resume();
    device.finish(Q0).unwrap();
    assert!(adds.iter().all(|a| a.seen == Ok(5000)));
    assert!(back.iter().zip(&bytes).all(|(b, a)| *b == a.wrapping_add(3)));
    assert_eq!(kernel_reads_into(at), Err(Errno::FAULT), "the memory is closed again");
    device.free(at).unwrap();
    assert_eq!(device.outstanding(), Outstanding::default());
}

#[test]
fn a_gather_takes_pieces_of_staging_memory_and_of_pins_to_their_places() {
    let device = device("size=1M");
    let at = device.alloc(10_000, false).unwrap();
    let (file, mapping) = mapped(&pattern(3 * linux::PAGE, 5));
    // SAFETY: the mapping stays until the end of the test.
    let pin = unsafe { device.pin(mapping, 3 * linux::PAGE) }.unwrap();
    let staging = device.staging(linux::PAGE).unwrap();
    let (list, bytes) = (staging.ptr.cast::<Gathered>(), staging.ptr.wrapping_add(2048));
    let (view, pinned) = (device.view(bytes).unwrap(), device.view_pin(&pin).unwrap());
    device.hold();
    // SAFETY: the staging memory is this test's, and everything stays until the drain.
    unsafe {
        list.write(Gathered { from: view + 1, to: at.0 + 9_000, len: 600 });
        list.add(1).write(Gathered { from: pinned + linux::PAGE as u64 - 3, to: at.0 + 1, len: 5_000 });
        list.add(2).write(Gathered { from: 0, to: 0, len: 0 });
        device.gather(Q0, list, 3).unwrap();
        // Neither the list nor the bytes are read before their turn.
        core::ptr::copy_nonoverlapping(pattern(601, 9).as_ptr(), bytes, 601);
    }
    device.resume();
    device.drain(Q0, Wait::Sleep).unwrap();
    let mut back = vec![0; 10_000];
    // SAFETY: `back` stays until the drain.
    unsafe { device.copy_out(Q0, back.as_mut_ptr(), at, back.len()) }.unwrap();
    device.drain(Q0, Wait::Sleep).unwrap();
    assert_eq!(back[9_000..9_600], pattern(601, 9)[1..]);
    assert_eq!(back[1..5_001], pattern(3 * linux::PAGE, 5)[linux::PAGE - 3..][..5_000]);
    assert!(back[0] == POISON && back[5_001..9_000].iter().all(|&b| b == POISON));
    // A piece that leaves its allocation is told by the next wait.
    // SAFETY: as above.
    unsafe {
        list.write(Gathered { from: view, to: at.0 + 9_999, len: 2 });
        device.gather(Q0, list, 1).unwrap();
    }
    assert_eq!(device.drain(Q0, Wait::Sleep).unwrap_err().kind, ErrorKind::BadAddress);
    device.unpin(pin);
    device.free_staging(staging);
    device.free(at).unwrap();
    drop(file);
    assert_eq!(device.outstanding(), Outstanding::default());
}
