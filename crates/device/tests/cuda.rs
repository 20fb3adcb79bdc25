//! The CUDA back end against a fake driver: the owner of an address, and its behaviour after free, reset, capture and
//! fork.
//!
//! The real driver is tested on a GPU: `tests/gpu/` at the top of the tree.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use fake::Fake;
use spinio_device::{
    Allocation, AppStream, DeviceAddr, DeviceKind, ErrorKind, Fingerprint, GatherEntry, KernelStore, PageableAccess,
    StreamId, WaitMode, registry, set_thread_stream,
};
use spinio_sys::cuda::{Context, Driver};
use spinio_sys::linux;

const MIB: u64 = 1 << 20;

struct Gpu {
    fake: Fake,
    driver: &'static Driver,
}

// SAFETY: the fake driver has its own locks.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// One test at a time, on a thread where device 0's primary context is current.
fn gpu() -> Option<(MutexGuard<'static, ()>, &'static Gpu)> {
    static ONE: OnceLock<Option<Gpu>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = ONE.get_or_init(start).as_ref()?;
    let context = gpu.driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { gpu.driver.set_current(context) }.unwrap();
    Some((turn, gpu))
}

/// From a process without a driver to one that uses it.
fn start() -> Option<Gpu> {
    let host = [0u8; 64];
    registry::hint_open(b"/dev/nvidiactl");
    assert!(!registry::any_device(), "a device file alone is no driver");
    assert!(registry::find_after_fault(host.as_ptr(), 64).is_none());
    let fake = fake::open()?;
    registry::hint_open(b"/etc/passwd");
    assert!(!registry::any_device(), "no other file triggers a search for a driver");
    registry::hint_open(b"/dev/nvidiactl");
    assert!(registry::any_device());
    assert!(registry::find(host.as_ptr(), 64).is_none(), "a driver that is not initialised owns nothing");
    let driver = Driver::cached().unwrap();
    driver.init().unwrap();
    Some(Gpu { fake, driver })
}

/// A context that is current until the closure returns, and dead afterwards.
fn in_own_context(gpu: &Gpu, device: i32, body: impl FnOnce()) {
    let context = gpu.fake.context(device);
    // SAFETY: the fake driver frees no context.
    unsafe { gpu.driver.push(Context(context)) }.unwrap();
    body();
    gpu.driver.pop().unwrap();
    gpu.fake.destroy(context);
}

fn find(addr: u64, want: u64) -> Option<Allocation> {
    registry::find(addr as *const u8, want as usize)
}

fn find_after_fault(addr: u64) -> Option<Allocation> {
    registry::find_after_fault(addr as *const u8, 1)
}

fn range(found: Option<Allocation>) -> (u64, u64) {
    let found = found.expect("device memory");
    (found.start.0, found.len)
}

fn peek(gpu: &Gpu, addr: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    gpu.fake.peek(addr, bytes.as_mut_ptr(), len as u64);
    bytes
}

#[test]
fn finds_each_kind_of_memory_to_its_end() {
    let Some((_turn, gpu)) = gpu() else { return };
    for kind in [0, 1] {
        let at = gpu.fake.alloc(kind, 10_000, 0);
        let neighbour = gpu.fake.alloc(kind, 4096, at + 10_000);
        let found = find(at + 100, 1 << 30).unwrap();
        assert_eq!((found.start.0, found.len), (at, 10_000), "a neighbour is another allocation");
        assert_eq!(found.bytes_left(DeviceAddr(at + 9_999)), 1);
        assert_eq!((found.host_mapped, found.device.id().kind), (false, DeviceKind::Cuda));
        assert_eq!(range(find(neighbour, 1)), (neighbour, 4096));
        assert!(found.device.allocation(DeviceAddr(at + 1), 5).is_some());
        gpu.fake.free(at);
        gpu.fake.free(neighbour);
        assert!(found.device.allocation(DeviceAddr(at + 1), 5).is_none());
    }
    let managed = gpu.fake.alloc(2, 8192, 0);
    assert!(find(managed + 1, 1).unwrap().host_mapped);
    gpu.fake.free(managed);
}

#[test]
fn pageable_access_is_what_the_driver_says() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    let device = find(at, 1).unwrap().device;
    assert_eq!(device.pageable_access(), PageableAccess::None);
    for (how, expected) in [(1, PageableAccess::Faults), (2, PageableAccess::HostPageTables), (0, PageableAccess::None)]
    {
        gpu.fake.pageable(how);
        assert_eq!((device.pageable_access(), expected.is_possible()), (expected, how != 0));
    }
    gpu.fake.free(at);
}

#[test]
fn joins_mappings_of_reservation_up_to_hole() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.vmm(16, 0b0010_0111);
    assert_eq!(range(find(at + 5, 1)), (at, 2 * MIB), "no further than requested");
    assert_eq!(range(find(at + 5, 2 * MIB)), (at, 4 * MIB));
    assert_eq!(range(find(at + 5, 1 << 30)), (at, 6 * MIB));
    assert_eq!(range(find(at + 2 * MIB + 1, 1 << 30)), (at + 2 * MIB, 4 * MIB));
    assert!(find(at + 6 * MIB, 1).is_none());
    assert_eq!(range(find(at + 10 * MIB, 1 << 30)), (at + 10 * MIB, 2 * MIB));
}

#[test]
fn standalone_programs_can_allocate() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = registry::alloc(DeviceKind::Cuda, 1, 5000, false).unwrap();
    let found = find_after_fault(at.0).unwrap();
    assert_eq!((found.start, found.len, found.device.id().ordinal), (at, 5000, 1));
    registry::free(at).unwrap();
    assert!(find(at.0, 1).is_none());
    assert_eq!(registry::free(at).unwrap_err().kind, ErrorKind::BadAddress);
    assert_eq!(registry::alloc(DeviceKind::Cuda, 2, 5000, false).unwrap_err().kind, ErrorKind::Unsupported);
    let host = gpu.driver.current().unwrap();
    assert_ne!(host, Context(0), "and leave the thread's context as it was");
}

#[test]
fn host_reads_query_driver_once() {
    let Some((_turn, gpu)) = gpu() else { return };
    let host = Box::new([0u8; 100]);
    let addr = host.as_ptr() as u64;
    assert!(find(addr, 100).is_none());
    let queries = gpu.fake.queries();
    for _ in 0..1000 {
        assert!(find(addr, 100).is_none());
    }
    assert_eq!(gpu.fake.queries(), queries);
}

#[test]
fn stale_host_entry_is_corrected_after_fault() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    gpu.fake.free(at);
    assert!(find(at, 1).is_none());
    // The same address is allocated again; the entry is stale now.
    gpu.fake.alloc(0, 8192, at);
    assert!(find(at, 1).is_none());
    assert_eq!(range(find_after_fault(at)), (at, 8192));
    assert_eq!(range(find(at, 1)), (at, 8192), "the fault has corrected it");
    // Free and allocate again: no positive result is cached.
    gpu.fake.free(at);
    gpu.fake.alloc(0, 512, at);
    assert_eq!(range(find(at, 1)), (at, 512));
    gpu.fake.free(at);
}

#[test]
fn copies_fences_and_waits_move_bytes() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 8192, 0);
    let device = find(at, 1).unwrap().device;
    let staging = device.alloc_pinned(1 << 20).unwrap();
    // SAFETY: bounce buffers are ours and have the given length.
    unsafe { staging.ptr.write_bytes(0x5a, 4096) };
    let queue = device.acquire_stream().unwrap();
    assert_ne!(queue, StreamId(0));
    // SAFETY: the memory lives until the drain below.
    unsafe { device.copy_in(queue, DeviceAddr(at + 1), staging.ptr, 4096) }.unwrap();
    let fence = device.fence(queue).unwrap();
    device.wait_event(StreamId(0), &fence).unwrap();
    assert!(device.query(&fence).unwrap());
    device.wait(&fence, WaitMode::Context).unwrap();
    device.wait(&fence, WaitMode::Block).unwrap();
    device.release_fence(fence);
    device.synchronize(queue, WaitMode::Block).unwrap();
    device.synchronize(StreamId(0), WaitMode::Context).unwrap();
    device.release_stream(queue);
    assert_eq!(device.acquire_stream().unwrap(), queue, "streams are reused");
    device.release_stream(queue);
    assert_eq!(peek(gpu, at, 4098), [&[0][..], &[0x5a; 4096], &[0]].concat());
    // SAFETY: as above; the copy is refused.
    let past = unsafe { device.copy_in(queue, DeviceAddr(at + 8000), staging.ptr, 4096) };
    assert_eq!(past.unwrap_err().kind, ErrorKind::BadAddress);
    let pins = gpu.fake.live_pins();
    device.free_pinned(staging);
    assert_eq!(gpu.fake.live_pins(), pins - 1);
    gpu.fake.free(at);
}

/// The address of the futex that a thread of this process waits for, if it does.
fn futex_of(tid: u32) -> Option<String> {
    let call = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).ok()?;
    let mut words = call.split(' ');
    (words.next()? == libc::SYS_futex.to_string()).then(|| words.next().map(str::to_owned))?
}

/// Waits until it holds; the deadline only turns a hang into a failure.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn pinned_memory_of_threads_that_allocate_at_once_is_registered_in_groups() {
    const THREADS: usize = 8;
    const LEN: usize = 4 << 20;
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    let device = find(at, 1).unwrap().device;
    let before = gpu.fake.live_pins();
    // While the first one is being registered the others make their pages, and wait for it.
    let together = || {
        std::thread::scope(|scope| {
            let (sender, tids) = std::sync::mpsc::channel();
            let allocate = move || {
                sender.send(linux::gettid()).unwrap();
                let memory = device.alloc_pinned(LEN).unwrap();
                // SAFETY: ours, of this length.
                unsafe { memory.ptr.write_bytes(1, LEN) };
                assert!(device.device_ptr(memory.ptr.wrapping_add(LEN - 1)).is_ok(), "registered to its end");
                (memory.ptr as usize, memory.len)
            };
            gpu.fake.hold_register(1);
            let first = scope.spawn(allocate.clone());
            eventually("it is being registered", || gpu.fake.in_register() == 1);
            let others: Vec<_> = (1..THREADS).map(|_| scope.spawn(allocate.clone())).collect();
            let tids: Vec<u32> = tids.iter().take(THREADS).skip(1).collect();
            // All for one lock: the owner of any other one would not wait.
            eventually("the others wait", || {
                let lock = futex_of(tids[0]);
                lock.is_some() && tids.iter().all(|tid| futex_of(*tid) == lock)
            });
            gpu.fake.hold_register(0);
            std::iter::once(first).chain(others).map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let free = |all: Vec<(usize, usize)>| {
        for (at, len) in all {
            device.free_pinned(spinio_device::PinnedBuffer { ptr: at as *mut u8, len });
        }
        assert_eq!(gpu.fake.live_pins(), before);
    };
    let all = together();
    let groups = gpu.fake.live_pins() - before;
    // Two for the others, where they have parts of two regions.
    assert!((2..=3).contains(&groups), "{groups} registrations of {THREADS} allocations");
    free(all);
    // Where the driver does not register a group, each part is registered.
    gpu.fake.limit_register(LEN as u64);
    let all = together();
    assert_eq!(gpu.fake.live_pins() - before, THREADS as i32);
    free(all);
    gpu.fake.limit_register(LEN as u64 - 1);
    assert_eq!(device.alloc_pinned(LEN).unwrap_err().kind, ErrorKind::NoMemory);
    gpu.fake.limit_register(0);
    free(vec![]);
    gpu.fake.free(at);
}

struct NullStore;

impl KernelStore for NullStore {
    fn load(&self, _name: &str) -> Option<Vec<u8>> {
        None
    }
    fn store(&self, _name: &str, _code: &[u8]) {}
}

#[test]
fn gather_is_one_launch_in_memorys_context() {
    let Some((_turn, gpu)) = gpu() else { return };
    gpu.fake.fail_module(218);
    in_own_context(gpu, 0, || {
        let at = gpu.fake.alloc(0, 8192, 0);
        let device = find(at, 1).unwrap().device;
        assert!(device.capabilities().can_gather, "no load was tried yet");
        assert!(device.load_gather_kernel(&NullStore).is_err() && !device.capabilities().can_gather);
    });
    gpu.fake.fail_module(0);
    in_own_context(gpu, 0, || {
        let at = gpu.fake.alloc(0, 8192, 0);
        let device = find(at, 1).unwrap().device;
        let staging = device.alloc_pinned(1 << 16).unwrap();
        let list = staging.ptr.cast::<GatherEntry>();
        let bytes = staging.ptr.wrapping_add(4096);
        let queue = device.acquire_stream().unwrap();
        // SAFETY: bounce buffers are ours and have the given length; the fake driver copies at once.
        unsafe {
            bytes.write_bytes(0x5a, 4096);
            for i in 0..3u64 {
                let from = device.device_ptr(bytes).unwrap() + i;
                list.add(i as usize).write(GatherEntry { src: from, dst: at + i * 2000 + 1, len: 1000 });
            }
            assert!(device.gather(queue, list, 3).is_err(), "not prepared");
            gpu.fake.capture(1);
            device.load_gather_kernel(&NullStore).unwrap();
            device.gather(queue, list, 3).unwrap();
            gpu.fake.capture(0);
        }
        assert_eq!(gpu.fake.invalidated(), 0);
        device.synchronize(queue, WaitMode::Context).unwrap();
        device.release_stream(queue);
        let (piece, gap) = ([0x5a; 1000], [0; 1000]);
        assert_eq!(peek(gpu, at, 6001), [&[0][..], &piece, &gap, &piece, &gap, &piece, &gap].concat());
        device.free_pinned(staging);
    });
}

#[test]
fn fingerprints_of_replica_are_those_of_its_pages() {
    let Some((_turn, _gpu)) = gpu() else { return };
    let device = registry::current_device().unwrap();
    let memory = device.replica_memory().unwrap();
    assert!(memory.alloc_replica(4097).is_err() && memory.alloc_replica(0).is_err());
    let at = memory.alloc_replica(5 * 4096).unwrap();
    let (stream, slots) = (device.acquire_stream().unwrap(), memory.alloc_replica(4096).unwrap());
    let pages: Vec<[u8; 4096]> = (0..5usize).map(|n| core::array::from_fn(|i| (i * 31 + n) as u8)).collect();
    let mut got = vec![Fingerprint::default(); 3];
    // SAFETY: the fake driver does everything at once.
    unsafe {
        device.copy_in(stream, at, pages.as_ptr().cast(), 5 * 4096).unwrap();
        let inside = DeviceAddr(at.0 + 4096);
        memory.fingerprint_pages(stream, inside, 3, slots, got.as_mut_ptr()).unwrap();
        device.synchronize(stream, WaitMode::Context).unwrap();
    }
    assert_eq!(got, pages[1..4].iter().map(Fingerprint::of).collect::<Vec<_>>());
    device.release_stream(stream);
    memory.free_replica(at).unwrap();
    memory.free_replica(slots).unwrap();
    assert!(find(at.0, 1).is_none());
}

#[test]
fn private_chunks_are_one_range_and_go_one_by_one() {
    const LEN: u64 = 2 * MIB;
    let Some((_turn, gpu)) = gpu() else { return };
    let device = registry::current_device().unwrap();
    let memory = device.shared_memory().unwrap();
    let at = memory.reserve(4 * LEN).unwrap();
    assert_eq!(memory.map_private_chunks(at, &[LEN, 2 * LEN]), Ok(2));
    assert_eq!(range(find(at.0, 3 * LEN)), (at.0, 3 * LEN));
    let stream = device.acquire_stream().unwrap();
    let bytes = [5u8; 4096];
    // SAFETY: refused.
    assert!(unsafe { device.copy_in(stream, at, bytes.as_ptr(), 4096) }.is_err(), "not accessible yet");
    memory.protect_chunks(at, 3 * LEN, true).unwrap();
    // SAFETY: the fake driver does everything at once.
    unsafe {
        device.copy_in(stream, DeviceAddr(at.0 + LEN - 4096), bytes.as_ptr(), 4096).unwrap();
        device.copy_in(stream, DeviceAddr(at.0 + LEN), bytes.as_ptr(), 4096).unwrap();
    }
    assert_eq!(peek(gpu, at.0 + LEN, 4096), bytes);
    // The second is occupied: neither is mapped.
    assert!(memory.map_private_chunks(DeviceAddr(at.0 + 3 * LEN), &[LEN, LEN]).is_err());
    memory.unmap_chunk(DeviceAddr(at.0 + LEN), 2 * LEN).unwrap();
    assert_eq!(range(find(at.0, 4 * LEN)), (at.0, LEN));
    assert!(find(at.0 + LEN, 1).is_none());
    assert_eq!(memory.map_private_chunks(DeviceAddr(at.0 + LEN), &[LEN]), Ok(1));
    memory.unmap_chunk(DeviceAddr(at.0 + LEN), LEN).unwrap();
    memory.unmap_chunk(at, LEN).unwrap();
    device.release_stream(stream);
    memory.free_reservation(at, 4 * LEN).unwrap();
    assert!(find(at.0, 1).is_none());
}

#[test]
fn chunk_is_shared_by_its_descriptor() {
    const LEN: u64 = 2 * MIB;
    let Some((_turn, _gpu)) = gpu() else { return };
    let device = registry::current_device().unwrap();
    let memory = device.shared_memory().unwrap();
    assert_eq!((memory.chunk_granularity().unwrap(), &memory.uuid().unwrap()), (LEN, b"fake GPU number0"));
    let at = memory.reserve(2 * LEN).unwrap();
    let (chunk, fd) = memory.create_chunk(LEN).unwrap();
    let imported = memory.import_chunk(fd.as_fd(), LEN).unwrap();
    drop(fd);
    let second = DeviceAddr(at.0 + LEN);
    memory.map_chunk(at, LEN, chunk, true).unwrap();
    memory.map_chunk(second, LEN, imported, false).unwrap();
    // Both are one range for a request of SPIN.
    assert_eq!(range(find(at.0, 2 * LEN)), (at.0, 2 * LEN));
    let stream = device.acquire_stream().unwrap();
    let (bytes, mut back) = ([5u8; 4096], [0u8; 4096]);
    // SAFETY: the fake driver does everything at once.
    unsafe {
        device.copy_in(stream, at, bytes.as_ptr(), 4096).unwrap();
        device.copy_out(stream, back.as_mut_ptr(), second, 4096).unwrap();
        assert_eq!(back, bytes);
        assert!(device.copy_in(stream, second, bytes.as_ptr(), 4096).is_err(), "read-only");
        memory.protect_chunks(at, LEN, false).unwrap();
        assert!(device.copy_in(stream, at, bytes.as_ptr(), 4096).is_err(), "read-only now");
    }
    device.release_stream(stream);
    for (addr, handle) in [(at, chunk), (second, imported)] {
        memory.release_chunk(handle).unwrap();
        memory.unmap_chunk(addr, LEN).unwrap();
    }
    memory.free_reservation(at, 2 * LEN).unwrap();
    assert!(find(at.0, 1).is_none());
}

#[test]
fn thread_without_context_uses_memorys_context() {
    let Some((_turn, gpu)) = gpu() else { return };
    in_own_context(gpu, 1, || {
        let at = gpu.fake.alloc(0, 4096, 0);
        std::thread::scope(|s| {
            s.spawn(|| {
                let found = find(at, 1).unwrap();
                assert_eq!(found.device.id().to_string(), "cuda:1");
                let bytes = [3u8; 100];
                // SAFETY: the fake driver copies at once.
                unsafe { found.device.copy_in(StreamId(0), DeviceAddr(at), bytes.as_ptr(), 100) }.unwrap();
                found.device.synchronize(StreamId(0), WaitMode::Context).unwrap();
                assert_eq!(gpu.driver.current(), Ok(Context(0)), "the thread is left as it was");
            });
        });
        assert_eq!(peek(gpu, at, 100), [3; 100]);
    });
}

#[test]
fn capture_is_never_invalidated() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    let device = find(at, 1).unwrap().device;
    assert_eq!(device.app_stream(), AppStream::Named(StreamId(0)));
    gpu.fake.capture(1);
    let handles_before = gpu.fake.invalidated();
    let AppStream::Capturing(queue) = device.app_stream() else { panic!("the capture is reported") };
    assert_ne!(queue, StreamId(0));
    assert_eq!(device.app_stream().id(), queue);
    let bytes = [9u8; 10];
    // SAFETY: the fake driver copies at once.
    unsafe { device.copy_in(queue, DeviceAddr(at), bytes.as_ptr(), 10) }.unwrap();
    device.synchronize(queue, WaitMode::Context).unwrap();
    device.synchronize(queue, WaitMode::Block).unwrap();
    let fence = device.fence(queue).unwrap();
    assert!(device.query(&fence).unwrap());
    device.wait(&fence, WaitMode::Context).unwrap();
    device.release_fence(fence);
    let staging = device.alloc_pinned(1 << 16).unwrap();
    // SAFETY: bounce buffers stay mapped; the range is registered already, which refuses the pin.
    assert_eq!(unsafe { device.pin(staging.ptr, 4096) }.unwrap_err().kind, ErrorKind::PinRefused);
    device.free_pinned(staging);
    assert!(device.fence(StreamId(0)).is_err() && device.synchronize(StreamId(0), WaitMode::Block).is_err());
    let pages = vec![0u8; 3 * 4096];
    // SAFETY: the pages live until they are unpinned.
    let pin = unsafe { device.pin(pages.as_ptr().wrapping_add(4000), 200) }.unwrap();
    device.unpin(pin);
    assert!(find(at, 1).is_some());
    assert_eq!(gpu.fake.invalidated(), handles_before);
    gpu.fake.capture(0);
    device.release_stream(queue);
    let acquired = device.acquire_stream().unwrap();
    assert_ne!(acquired, queue, "the stream of captures is never acquired");
    device.release_stream(acquired);
    assert_eq!(device.app_stream(), AppStream::Named(StreamId(0)));
    assert_eq!(peek(gpu, at, 10), [9; 10]);
    gpu.fake.free(at);
}

#[test]
fn thread_can_choose_its_stream() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    let device = find(at, 1).unwrap().device;
    let chosen_stream = device.acquire_stream().unwrap();
    set_thread_stream(chosen_stream);
    assert_eq!(device.app_stream(), AppStream::Named(chosen_stream));
    set_thread_stream(StreamId(0));
    assert_eq!(device.app_stream(), AppStream::Named(StreamId(0)));
    device.release_stream(chosen_stream);
    gpu.fake.free(at);
}

/// The fake driver aborts where the real one crashes: at any handle of a destroyed context.
#[test]
fn no_dead_handle_is_used_after_reset() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    let old = find(at, 1).unwrap().device;
    let queue = old.acquire_stream().unwrap();
    let fence = old.fence(queue).unwrap();
    let staging = old.alloc_pinned(1 << 16).unwrap();
    let pages = vec![0u8; 8192];
    // SAFETY: the pages live until they are unpinned.
    let pin = unsafe { old.pin(pages.as_ptr(), 4096) }.unwrap();
    gpu.fake.reset(0);
    assert!(find(at, 1).is_none(), "its memory died with the context");
    let again = gpu.driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { gpu.driver.set_current(again) }.unwrap();
    let gone = |e: spinio_device::DeviceError| assert_eq!(e.kind, ErrorKind::ContextLost);
    gone(old.query(&fence).unwrap_err());
    gone(old.wait(&fence, WaitMode::Block).unwrap_err());
    gone(old.synchronize(queue, WaitMode::Context).unwrap_err());
    gone(old.acquire_stream().unwrap_err());
    gone(old.alloc_pinned(4096).unwrap_err());
    // SAFETY: refused before anything is touched.
    gone(unsafe { old.copy_in(queue, DeviceAddr(at), pages.as_ptr(), 1) }.unwrap_err());
    old.release_fence(fence);
    old.release_stream(queue);
    old.unpin(pin);
    old.free_pinned(staging);
    let new = gpu.fake.alloc(0, 4096, at);
    let found = find_after_fault(new).unwrap();
    assert!(!std::ptr::addr_eq(found.device, old), "another context, another device");
    let queue = found.device.acquire_stream().unwrap();
    found.device.synchronize(queue, WaitMode::Context).unwrap();
    found.device.release_stream(queue);
    gpu.fake.free(new);
}

#[test]
fn unnoticed_reset_is_detected_by_next_lookup() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    let old = find(at, 1).unwrap().device;
    old.release_stream(old.acquire_stream().unwrap());
    gpu.fake.reset(0);
    let again = gpu.driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { gpu.driver.set_current(again) }.unwrap();
    let new = find_after_fault(gpu.fake.alloc(0, 4096, 0)).unwrap().device;
    let queue = new.acquire_stream().unwrap();
    new.synchronize(queue, WaitMode::Context).unwrap();
    new.release_stream(queue);
}

#[test]
fn hundreds_of_contexts_are_handled() {
    let Some((_turn, gpu)) = gpu() else { return };
    for _ in 0..200 {
        in_own_context(gpu, 0, || {
            let at = gpu.fake.alloc(0, 100, 0);
            find_after_fault(at).expect("each context's memory is found");
        });
    }
}

#[test]
fn pinning_stops_after_repeated_refusals() {
    let Some((_turn, gpu)) = gpu() else { return };
    in_own_context(gpu, 0, || {
        let device = find_after_fault(gpu.fake.alloc(0, 4096, 0)).unwrap().device;
        let pages = vec![0u8; 8192];
        for (code, tries) in [(712, 50), (801, 4)] {
            assert!(device.capabilities().can_pin);
            gpu.fake.fail_register(code);
            for _ in 0..tries {
                // SAFETY: refused.
                assert_eq!(unsafe { device.pin(pages.as_ptr(), 100) }.unwrap_err().kind, ErrorKind::PinRefused);
            }
            gpu.fake.fail_register(0);
        }
        assert!(!device.capabilities().can_pin);
    });
}

#[test]
fn blocking_context_gets_blocking_events() {
    let Some((_turn, gpu)) = gpu() else { return };
    gpu.fake.schedule(4);
    in_own_context(gpu, 0, || {
        let device = find_after_fault(gpu.fake.alloc(0, 4096, 0)).unwrap().device;
        assert!(device.describe().contains("blocking"), "{}", device.describe());
        let fence = device.fence(StreamId(0)).unwrap();
        device.wait(&fence, WaitMode::Context).unwrap();
        device.release_fence(fence);
    });
    gpu.fake.schedule(0);
}

#[test]
fn forked_child_makes_no_driver_calls() {
    let Some((_turn, gpu)) = gpu() else { return };
    let at = gpu.fake.alloc(0, 4096, 0);
    assert!(find(at, 1).is_some());
    let queries = gpu.fake.queries();
    // SAFETY: the child only looks up addresses and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let silent = find(at, 1).is_none() && find_after_fault(at).is_none() && gpu.fake.queries() == queries;
        // SAFETY: ends the child at once, without the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!silent)) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    assert!(find(at, 1).is_some());
    gpu.fake.free(at);
}
