//! The pool with an emulated device: waiting, slices of small reads, what stalled copies leave to others.

#![expect(unsafe_code, reason = "kernels of the emulated device")]

use spinio_testkit::buffer::emulated;
use spinio_testkit::deadline::eventually;
use spinio_testkit::{FaultyDevice, Operation};

use super::*;

#[test]
fn acquire_sleeps_until_release() {
    let device = emulated("size=64M");
    let staging = BouncePool::new(device, 2 * BUFFER_SIZE as u64);
    let buffers = [staging.acquire().unwrap(), staging.acquire().unwrap()];
    let tid = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            tid.store(linux::gettid(), SeqCst);
            let buffer = staging.acquire().unwrap();
            let at = buffer.ptr() as usize;
            staging.release(buffer);
            at
        });
        eventually("the waiting thread sleeps", || {
            let stat = format!("/proc/self/task/{}/stat", tid.load(SeqCst));
            staging.waiting.load(SeqCst) > 0
                && (0..100).all(|_| std::fs::read_to_string(&stat).is_ok_and(|s| s.contains(") S ")))
        });
        let [one, other] = buffers;
        let at = one.ptr() as usize;
        staging.release(one);
        assert_eq!(waiter.join().unwrap(), at);
        staging.release(other);
    });
}

#[test]
fn acquire_gets_buffer_of_completed_small_read() {
    let device = emulated("size=64M");
    let staging = BouncePool::new(device, 2 * BUFFER_SIZE as u64);
    let slot = staging.acquire_slice(4096, StreamId(0)).unwrap();
    let other = staging.acquire().unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| staging.acquire().unwrap());
        eventually("a thread waits", || staging.waiting.load(SeqCst) > 0);
        staging.release_slice(slot);
        staging.release(waiter.join().unwrap());
    });
    staging.release(other);
}

#[test]
fn the_buffer_that_was_in_use_last_is_taken_first() {
    let device = emulated("size=64M");
    let staging = BouncePool::new(device, 16 << 20);
    let buffers: Vec<BounceBuffer> = (0..4).map(|_| staging.acquire().unwrap()).collect();
    let total = staging.total_bytes();
    let [older, newer, idle, held] = <[BounceBuffer; 4]>::try_from(buffers).unwrap();
    let expected = [newer.ptr(), older.ptr(), idle.ptr()];
    let stream = device.acquire_stream().unwrap();
    staging.release(idle);
    staging.release_after(older, stream);
    staging.release_after(newer, stream);
    eventually("the copies are done", || lock(&staging.state).retired.iter().all(|(_, fence)| fence.is_done()));
    let taken = [(); 3].map(|()| staging.try_acquire(Policy::WithinLimit).unwrap().expect("a buffer"));
    assert_eq!(taken.each_ref().map(BounceBuffer::ptr), expected);
    assert_eq!(staging.total_bytes(), total, "nothing had to grow");
    for buffer in taken.into_iter().chain([held]) {
        staging.release(buffer);
    }
    device.release_stream(stream);
}

unsafe extern "C" fn wait_for_flag(flag: *mut std::ffi::c_void) {
    // SAFETY: the test keeps the flag until the kernel is done.
    let flag = unsafe { &*flag.cast::<std::sync::atomic::AtomicBool>() };
    while !flag.load(SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn unused_buffers_are_found_behind_stalled_copies() {
    let device = emulated("size=64M");
    let staging = BouncePool::new(device, 6 * BUFFER_SIZE as u64);
    let mut buffers: Vec<BounceBuffer> = (0..6).map(|_| staging.acquire().unwrap()).collect();
    let (stalled, other) = (device.new_stream().unwrap(), device.acquire_stream().unwrap());
    let go = std::sync::atomic::AtomicBool::new(false);
    // SAFETY: the stream is waited for before the flag ends.
    unsafe { device.launch(stalled, wait_for_flag, (&raw const go).cast_mut().cast()) }.unwrap();
    for buffer in buffers.drain(..5) {
        staging.release_after(buffer, stalled);
    }
    staging.release_after(buffers.remove(0), other);
    let done = || lock(&staging.state).retired.iter().any(|(_, fence)| fence.is_done());
    eventually("one copy is done", done);
    assert!(staging.try_acquire(Policy::WithinLimit).unwrap().is_none(), "only the oldest are checked");
    staging.reclaim_unused();
    let found = staging.try_acquire(Policy::WithinLimit).unwrap().expect("a buffer");
    go.store(true, SeqCst);
    device.wait_stream(stalled).unwrap();
    staging.release(found);
    device.release_stream(other);
}

#[test]
fn slice_without_fence_is_waited_for_or_never_used_again() {
    for (synchronize_fails, lost) in [(false, 0), (true, BUFFER_SIZE as u64)] {
        let inner = emulated("size=64M");
        let device = FaultyDevice::wrap(inner);
        let staging = BouncePool::new(device, 2 * BUFFER_SIZE as u64);
        let stream = inner.new_stream().unwrap();
        let slices = [(); 2].map(|()| staging.acquire_slice(4096, stream).unwrap());
        let total = staging.total_bytes();
        device.inject(Operation::Fence, 2, 1, ErrorKind::NoMemory);
        if synchronize_fails {
            device.inject(Operation::Synchronize, 1, 1, ErrorKind::Driver);
        }
        slices.into_iter().for_each(|slice| staging.release_slice(slice));
        staging.retire_idle_slots();
        assert_eq!(staging.total_bytes(), total - lost);
    }
}

/// Moves what the pool remembers of refusals back, as if the time had passed.
fn let_the_driver_be_asked_again(staging: &BouncePool) {
    let mut state = lock(&staging.state);
    let PoolState { pinning_refused, growth_failed, .. } = &mut *state;
    for refused in [pinning_refused, growth_failed].into_iter().flatten() {
        *refused = refused.checked_sub(ASK_AGAIN).unwrap();
    }
}

#[test]
fn pool_grows_again_after_the_driver_had_no_memory() {
    let device = FaultyDevice::wrap(emulated("size=64M"));
    let staging = BouncePool::new(device, 8 * BUFFER_SIZE as u64);
    let size = BUFFER_SIZE as u64;
    let mut buffers = vec![staging.acquire().unwrap()];
    let mut take = || staging.try_acquire(Policy::WithinLimit).unwrap().map(|buffer| buffers.push(buffer)).is_some();
    // A slab of two is refused, one buffer is not.
    device.inject(Operation::Staging, 1, 1, ErrorKind::NoMemory);
    assert!(take() && staging.total_bytes() == 2 * size);
    // Nothing is: the pool does not ask at each call.
    device.inject(Operation::Staging, 1, 2, ErrorKind::NoMemory);
    assert!(!take() && !take());
    assert_eq!((staging.available(), staging.total_bytes()), (0, 2 * size));
    let_the_driver_be_asked_again(&staging);
    assert_eq!(staging.available(), 6);
    assert!(take() && staging.total_bytes() == 4 * size);
    buffers.into_iter().for_each(|buffer| staging.release(buffer));
}

#[test]
fn pool_of_ordinary_memory_gets_pinned_memory_later() {
    let device = FaultyDevice::wrap(emulated("size=64M"));
    let staging = BouncePool::new(device, 8 * BUFFER_SIZE as u64);
    device.inject(Operation::Staging, 1, 3, ErrorKind::NoMemory);
    let first = staging.acquire().unwrap();
    let second = staging.acquire().unwrap();
    assert!(!first.pinned && !second.pinned);
    let_the_driver_be_asked_again(&staging);
    // Refused again, a slab and then a buffer.
    let third = staging.acquire().unwrap();
    assert!(!third.pinned);
    let_the_driver_be_asked_again(&staging);
    let fourth = staging.acquire().unwrap();
    assert!(fourth.pinned, "the driver has memory again");
    [first, second, third, fourth].into_iter().for_each(|buffer| staging.release(buffer));
}
