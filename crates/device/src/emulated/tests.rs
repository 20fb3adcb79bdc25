use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use spinio_sys::{Errno, linux};

use super::*;

fn device(text: &str) -> &'static Emulated {
    Emulated::start(Config::parse(text).unwrap()).unwrap()
}

const Q0: QueueId = QueueId(0);

/// Copies in and waits.
fn put(device: &Emulated, dst: DeviceAddr, bytes: &[u8]) {
    // SAFETY: the bytes stay until the drain returns.
    unsafe { device.copy_in(Q0, dst, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.drain(Q0, Wait::Sleep).unwrap();
}

/// Copies out and waits.
fn get(device: &Emulated, src: DeviceAddr, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the bytes stay until the drain returns.
    unsafe { device.copy_out(Q0, bytes.as_mut_ptr(), src, len) }.unwrap();
    device.drain(Q0, Wait::Sleep).unwrap();
    bytes
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|n| ((n + seed) * 7 % 251) as u8).collect()
}

fn kernel_reads_into(addr: DeviceAddr) -> core::result::Result<usize, Errno> {
    let zeros = File::open("/dev/zero").unwrap();
    // SAFETY: device memory, or an address the kernel refuses.
    unsafe { linux::pread(zeros.as_raw_fd(), addr.0 as *mut u8, 16, 0) }
}

#[test]
fn the_kernel_refuses_device_memory_and_serves_the_bar() {
    let device = device("size=1M,bar=64K");
    let plain = device.alloc(5000, false).unwrap();
    let bar = device.alloc(5000, true).unwrap();
    assert_eq!(kernel_reads_into(plain), Err(Errno::FAULT));
    assert_eq!(kernel_reads_into(bar), Ok(16));
    assert_eq!(get(device, bar, 20), [[0; 16].as_slice(), &[POISON; 4]].concat());
    let found = registry::find(bar.0 as *const u8, 1).unwrap();
    assert!(found.host_mapped && !found.p2p_mapped);
    device.free(bar).unwrap();
    assert_eq!(kernel_reads_into(bar), Err(Errno::FAULT));
    device.free(plain).unwrap();
    assert_eq!(device.outstanding(), Outstanding::default());
}

#[test]
fn fresh_memory_is_poison_also_when_it_is_used_again() {
    let device = device("size=1M");
    let first = device.alloc(10_000, false).unwrap();
    assert_eq!(get(device, first, 10_000), vec![POISON; 10_000]);
    put(device, first, &[1; 10_000]);
    device.free(first).unwrap();
    let second = device.alloc(10_000, false).unwrap();
    assert_eq!(second, first);
    assert_eq!(get(device, second, 10_000), vec![POISON; 10_000]);
}

#[test]
fn nothing_is_found_past_an_allocation_or_after_free() {
    let device = device("size=1M");
    let addr = device.alloc(5000, false).unwrap();
    let find = |n: u64| registry::find(addr.offset(n).0 as *const u8, 1);
    let found = find(4999).unwrap();
    assert_eq!((found.start, found.len, found.device.id()), (addr, 5000, device.id()));
    assert!(find(5000).is_none());
    assert!(find(1 << 20).is_none());
    assert!(registry::find(&raw const found as *const u8, 1).is_none());
    // SAFETY: refused, so nothing is copied.
    let past = unsafe { device.copy_in(Q0, addr.offset(4999), [0u8; 2].as_ptr(), 2) };
    assert_eq!(past.unwrap_err().kind, ErrorKind::BadAddress);
    device.free(addr).unwrap();
    assert!(find(0).is_none());
    assert_eq!(device.free(addr).unwrap_err().kind, ErrorKind::BadAddress);
    assert_eq!(device.alloc(2 << 20, false).unwrap_err().kind, ErrorKind::NoMemory);
    assert_eq!(device.alloc(1, true).unwrap_err().kind, ErrorKind::NoMemory);
}

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
fn staging_is_aligned_and_lent_again() {
    let device = device("size=1M");
    let block = device.staging(70_000).unwrap();
    assert!(block.len >= 70_000 && (block.ptr as usize).is_multiple_of(linux::PAGE));
    device.free_staging(block);
    assert_eq!(device.staging(block.len).unwrap(), block);
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

/// A file and a read-only mapping of all of it.
fn mapped(bytes: &[u8]) -> (File, *const u8) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    File::create(&path).unwrap().write_all(bytes).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // SAFETY: a fresh mapping replaces nothing.
    let at = unsafe { linux::mmap(core::ptr::null_mut(), bytes.len(), 1, 1, file.as_raw_fd(), 0) }.unwrap();
    (file, at)
}

/// Copies from a pin and waits.
fn fetch(device: &Emulated, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize) -> Vec<u8> {
    // SAFETY: the pin lives until the drain returns.
    unsafe { device.copy_pinned(Q0, dst, pin, offset, len) }.unwrap();
    device.drain(Q0, Wait::Sleep).unwrap();
    get(device, dst, len)
}

#[test]
fn a_pin_gives_the_bytes_of_the_file_in_any_order() {
    let device = device("size=4M");
    let addr = device.alloc(MAX_PIN, false).unwrap();
    let bytes = pattern(MAX_PIN, 3);
    let (_file, at) = mapped(&bytes);
    // SAFETY: the mapping is never unmapped.
    let pin = unsafe { device.pin(at, MAX_PIN) }.unwrap();
    for (offset, len) in [(0, MAX_PIN), (MAX_PIN - 5, 5), (0, 1), (70_001, 100_003), (4096, 4096), (5, 4096)] {
        assert_eq!(fetch(device, addr, &pin, offset, len), bytes[offset..offset + len], "{offset} {len}");
    }
    // SAFETY: refused, so nothing is copied.
    let past = unsafe { device.copy_pinned(Q0, addr, &pin, 1, MAX_PIN) };
    assert_eq!(past.unwrap_err().kind, ErrorKind::BadAddress);
    device.unpin(pin);
    // SAFETY: an unaligned range inside the mapping.
    let odd = unsafe { device.pin(at.add(5000), 9000) }.unwrap();
    assert_eq!(fetch(device, addr, &odd, 17, 8000), bytes[5017..13017]);
    device.unpin(odd);
    assert_eq!(device.outstanding().pins, 0);
}

#[test]
fn a_pin_shows_later_writes_and_what_a_truncated_file_was() {
    let device = device("size=1M");
    let addr = device.alloc(8192, false).unwrap();
    let (file, at) = mapped(&[1; 8192]);
    // SAFETY: the mapping is never unmapped.
    let pin = unsafe { device.pin(at, 8192) }.unwrap();
    file.write_all_at(&[2; 4096], 0).unwrap();
    assert_eq!(fetch(device, addr, &pin, 0, 8192), [[2; 4096], [1; 4096]].concat());
    file.set_len(0).unwrap();
    file.write_all_at(&[3; 8192], 0).unwrap();
    assert_eq!(fetch(device, addr, &pin, 0, 8192), [[2; 4096], [1; 4096]].concat(), "orphans show the past");
    device.unpin(pin);
}

#[test]
fn a_range_past_the_end_of_the_file_is_refused_and_nothing_leaks() {
    let device = device("size=1M");
    let (file, at) = mapped(&[1; 16384]);
    file.set_len(8192).unwrap();
    for _ in 0..200 {
        // SAFETY: the mapping is never unmapped; pages past the end are what is asked about.
        let refused = unsafe { device.pin(at, 16384) };
        assert_eq!(refused.unwrap_err().kind, ErrorKind::PinRefused);
    }
    // SAFETY: as above.
    let pin = unsafe { device.pin(at, 8192) }.unwrap();
    device.unpin(pin);
    // SAFETY: as above.
    let long = unsafe { device.pin(at, MAX_PIN + 1) };
    assert_eq!(long.unwrap_err().kind, ErrorKind::PinRefused);
    assert_eq!(device.outstanding().pins, 0);
}

#[test]
fn pins_are_bounded_and_come_back() {
    let device = device("size=1M");
    let (_file, at) = mapped(&[1; 4096]);
    // SAFETY: the mapping is never unmapped.
    let pins: Vec<Pin> = std::iter::from_fn(|| unsafe { device.pin(at, 4096) }.ok()).take(10_000).collect();
    assert!(!pins.is_empty() && pins.len() < 10_000);
    let lent = pins.len();
    pins.into_iter().for_each(|p| device.unpin(p));
    // SAFETY: as above.
    let again: Vec<Pin> = (0..lent).map(|_| unsafe { device.pin(at, 4096) }.unwrap()).collect();
    again.into_iter().for_each(|p| device.unpin(p));
}

#[test]
fn no_descriptor_is_left_in_the_programs_table() {
    let ours = || {
        let fds = std::fs::read_dir("/proc/thread-self/fd").unwrap();
        let names = fds.filter_map(|e| std::fs::read_link(e.unwrap().path()).ok());
        let names = names.map(|t| t.to_string_lossy().into_owned());
        names.filter(|n| n.contains("spinio-emulated") || n.starts_with("pipe:")).collect::<Vec<_>>()
    };
    // Pipes that the test was started with.
    let before = ours();
    let device = device("size=1M,bar=64K");
    let (_file, at) = mapped(&[1; 4096]);
    // SAFETY: the mapping is never unmapped.
    let pin = unsafe { device.pin(at, 4096) }.unwrap();
    assert_eq!(ours(), before);
    device.unpin(pin);
}

#[test]
fn a_forked_child_has_no_device() {
    let device = device("size=1M");
    let addr = device.alloc(4096, false).unwrap();
    // SAFETY: the child only loads, makes system calls and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let none = registry::find(addr.0 as *const u8, 1).is_none();
        let refused = device.alloc(1, false) == Err(DeviceError::new(ErrorKind::Gone, "use after fork"));
        let drained = device.drain(Q0, Wait::Sleep).is_err();
        // SAFETY: ends the child at once, without the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!(none && refused && drained))) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    put(device, addr, &[9; 4096]);
    assert_eq!(get(device, addr, 4096), [9; 4096]);
}

#[test]
fn finding_is_right_beside_allocation_and_free() {
    let device = device("size=1M");
    let fixed = device.alloc(8192, false).unwrap();
    let rounds = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
    std::thread::scope(|scope| {
        let churn = scope.spawn(move || {
            for n in 0..rounds {
                let addr = device.alloc(1 + n % 9000, false).unwrap();
                assert_eq!(registry::find(addr.0 as *const u8, 1).unwrap().len, 1 + n as u64 % 9000);
                device.free(addr).unwrap();
                assert!(registry::find(addr.0 as *const u8, 1).is_none());
            }
        });
        while !churn.is_finished() {
            let found = registry::find(fixed.offset(8191).0 as *const u8, 1).unwrap();
            assert_eq!((found.start, found.len), (fixed, 8192));
            assert!(registry::find(&raw const fixed as *const u8, 1).is_none());
        }
    });
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
