//! Reads and writes that wait for a stream which waits for the program: no other thread waits for them.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::{CString, c_void};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use spinio_batch::{Batches, ReadOp};
use spinio_device::emulated::Emulated;
use spinio_device::{Device, StreamId, WaitMode, set_thread_stream};
use spinio_io::{AsyncResult, Runtime, Settings, ShadowFile};
use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, FaultyDevice, file, with_deadline};

const LEN: usize = (5 << 20) + 777;

/// A GPU kernel of the program that ends when the program sets its flag.
struct BlockingKernel(&'static AtomicBool);

unsafe extern "C" fn wait(flag: *mut c_void) {
    // SAFETY: `BlockingKernel::launch` passes the address of a flag that lives forever.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    while !flag.load(SeqCst) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

impl BlockingKernel {
    fn launch(device: &Emulated, queue: StreamId) -> BlockingKernel {
        let flag: &'static AtomicBool = Box::leak(Box::default());
        // SAFETY: `wait` takes the address of such a flag.
        unsafe { device.launch(queue, wait, std::ptr::from_ref(flag).cast_mut().cast()) }.unwrap();
        BlockingKernel(flag)
    }

    fn finish(&self) {
        self.0.store(true, SeqCst);
    }
}

impl Drop for BlockingKernel {
    fn drop(&mut self) {
        self.finish();
    }
}

fn open_shadow_file(runtime: &Runtime, path: &Path, flags: u32) -> Arc<ShadowFile> {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    Arc::new(runtime.open(&path, flags, 0o600).unwrap())
}

/// A file of 1 MiB, and what its uploads to one device need: two streams and four buffers.
struct Uploads {
    inner: &'static Emulated,
    device: &'static FaultyDevice,
    runtime: Runtime,
    file: Arc<ShadowFile>,
    streams: [StreamId; 2],
    buffers: Vec<Buffer>,
    _folder: tempfile::TempDir,
}

impl Uploads {
    fn new() -> Uploads {
        let inner = emulated("size=64M");
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in");
        drop(file::create_filled(&input, 1 << 20));
        let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
        Uploads {
            inner,
            device: FaultyDevice::wrap(inner),
            file: open_shadow_file(&runtime, &input, linux::O_RDONLY),
            runtime,
            streams: [inner.new_stream().unwrap(), inner.new_stream().unwrap()],
            buffers: (0..4).map(|_| Buffer::new(inner, 1 << 20)).collect(),
            _folder: folder,
        }
    }

    fn start(&self, n: usize, stream: StreamId) -> AsyncResult {
        let to = self.buffers[n].target_via(self.device, 0);
        self.runtime.read_on_stream(&self.file, 0, to, 1 << 20, stream).unwrap()
    }
}

#[test]
fn waiting_stream_does_not_block_other_requests() {
    let device = emulated("size=256M");
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    drop(file::create_filled(&input, LEN as u64));
    let expected = file::bytes(0, LEN, 0);
    // Eight buffers: not half of what is queued below. No pages are registered: unpinning them would wait for the
    // kernel.
    let routes = vec![Route::Copy, Route::Store, Route::Direct];
    let runtime = Runtime::new(Settings { bounce_limit: 16 << 20, routes, ..Settings::default() });
    let (from, to) = (
        open_shadow_file(&runtime, &input, linux::O_RDONLY),
        open_shadow_file(&runtime, &output, linux::O_RDWR | linux::O_CREAT),
    );
    let program = File::open(&input).unwrap();
    let writable = File::create(folder.path().join("plain")).unwrap();
    let (busy, other, mine) =
        (device.new_stream().unwrap(), device.new_stream().unwrap(), device.new_stream().unwrap());
    let source = Buffer::new(device, LEN);
    source.write_at(0, &expected);
    let buffers: Vec<Buffer> = (0..16).map(|_| Buffer::new(device, LEN)).collect();
    set_thread_stream(mine);
    let kernel = BlockingKernel::launch(device, busy);
    let moves = with_deadline("queueing moves on a stream that waits for the program", || {
        let up = |n: usize, queue| runtime.read_on_stream(&from, 0, buffers[n].target(0), LEN, queue).unwrap();
        let down = |n: usize| runtime.write_on_stream(&to, (n * LEN) as u64, source.target(0), LEN, busy).unwrap();
        assert_eq!(runtime.read_async(program.as_raw_fd(), 0, buffers[13].target(0), LEN, busy).unwrap(), LEN);
        let mut moves: Vec<_> = (0..8).map(|n| up(n, busy)).collect();
        moves.extend((0..4).map(down));
        moves.extend((8..11).map(|n| up(n, busy)));
        moves.extend((11..13).map(|n| up(n, other)));
        moves
    });
    with_deadline("concurrent requests", || {
        let fd = program.as_raw_fd();
        for len in [4096, LEN] {
            assert_eq!(runtime.read(fd, Some(0), buffers[14].target(0), len).unwrap(), len);
        }
        assert_eq!(runtime.write(writable.as_raw_fd(), Some(0), source.target(0), LEN).unwrap(), LEN);
        let piece = |i: u64| {
            let address = buffers[15].addr().0 + i * 4096;
            ReadOp { fd, offset: i * 4096, len: 4096, address, ..ReadOp::default() }
        };
        let mut batch: Vec<ReadOp> = (0..500).map(piece).collect();
        assert_eq!(runtime.batch(&mut batch).unwrap().bytes, 500 * 4096);
    });
    // The last two are on a stream that does not wait.
    assert!(moves[..15].iter().all(|m| m.result().is_none()), "moved before its turn");
    kernel.finish();
    with_deadline("the queue", || {
        assert!(moves.iter().all(|m| m.wait() == Ok(LEN)));
        device.synchronize(busy, WaitMode::Block).unwrap();
    });
    set_thread_stream(StreamId(0));
    for (n, buffer) in buffers[..15].iter().enumerate() {
        assert!(buffer.bytes() == expected, "buffer {n}");
    }
    assert!(buffers[15].bytes()[..500 * 4096] == expected[..500 * 4096]);
    assert!(fs::read(&output).unwrap() == [&expected[..]; 4].concat());
    assert!(fs::read(folder.path().join("plain")).unwrap() == expected);
    // Again the size of the pool, at most twice, and a buffer for the first upload of a stream.
    let bytes = runtime.bounce_bytes(&source.allocation());
    assert!(bytes <= (16 + 32 + 4) << 20, "{} MiB", bytes >> 20);
}

#[test]
fn many_uploads_on_one_stream_share_buffers() {
    let device = emulated("size=64M");
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    drop(file::create_filled(&input, 200 * 4096));
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
    let from = open_shadow_file(&runtime, &input, linux::O_RDONLY);
    let queue = device.new_stream().unwrap();
    let buffer = Buffer::new(device, 200 * 4096);
    let kernel = BlockingKernel::launch(device, queue);
    let moves: Vec<_> = with_deadline("200 uploads", || {
        let up =
            |n: usize| runtime.read_on_stream(&from, n as u64 * 4096, buffer.target(n * 4096), 4096, queue).unwrap();
        (0..200).map(up).collect()
    });
    let bytes = runtime.bounce_bytes(&buffer.allocation());
    kernel.finish();
    with_deadline("the queue", || assert!(moves.iter().all(|m| m.wait() == Ok(4096))));
    assert!(buffer.bytes() == file::bytes(0, 200 * 4096, 0));
    assert!(bytes <= 4 << 20, "{} MiB", bytes >> 20);
}

#[test]
fn writes_beyond_stream_pool_use_ordinary_memory() {
    let device = emulated("size=64M");
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
    let to = open_shadow_file(&runtime, &output, linux::O_RDWR | linux::O_CREAT);
    let queue = device.new_stream().unwrap();
    let source = Buffer::new(device, 3 << 20);
    source.write_at(0, &file::bytes(0, 3 << 20, 0));
    let kernel = BlockingKernel::launch(device, queue);
    let down = |n: u64| runtime.write_on_stream(&to, n * (3 << 20), source.target(0), 3 << 20, queue).unwrap();
    let moves: Vec<_> = with_deadline("downloads", || (0..5).map(down).collect());
    kernel.finish();
    with_deadline("the queue", || assert!(moves.iter().all(|m| m.wait() == Ok(3 << 20))));
    assert!(fs::read(&output).unwrap() == vec![file::bytes(0, 3 << 20, 0); 5].concat());
    let lines = runtime.stats().rows;
    assert!(lines.iter().any(|l| l.reason == Reason::NoPinnedMemory), "{lines:?}");
    assert!(runtime.bounce_bytes(&source.allocation()) <= 8 << 20);
}

/// A stream that is destroyed runs to its end, and a new one may have its number.
#[test]
fn reused_stream_id_is_harmless() {
    let uploads = Uploads::new();
    let (device, [old, new]) = (uploads.device, uploads.streams);
    let up = |n, stream| uploads.start(n, stream);
    let kernel = BlockingKernel::launch(uploads.inner, old);
    let others = [up(0, old), up(1, new), up(2, old)];
    device.redirect(old, new);
    let late = up(3, old);
    kernel.finish();
    // The late one takes over the buffers of the upload before it in the old stream. The new stream may be first: then
    // they are in use, and the upload fails; or the old one, and it succeeds.
    let late = with_deadline("the streams", || {
        assert!(others.iter().all(|m| m.wait() == Ok(1 << 20)));
        late.wait()
    });
    assert!(matches!(late, Err(Errno::IO) | Ok(0x10_0000)), "{late:?}");
    if late.is_ok() {
        assert!(uploads.buffers[3].bytes() == file::bytes(0, 1 << 20, 0));
    }
    for buffer in &uploads.buffers[..3] {
        assert!(buffer.bytes() == file::bytes(0, 1 << 20, 0));
    }
}

/// The moves of threads that share a stream need no order among themselves.
#[test]
fn threads_enqueue_uploads_concurrently() {
    const UPLOADS: usize = 400;
    let device = emulated("size=64M");
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    drop(file::create_filled(&input, 4096));
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
    let from = open_shadow_file(&runtime, &input, linux::O_RDONLY);
    let queue = device.new_stream().unwrap();
    let buffers: Vec<Buffer> = (0..4).map(|_| Buffer::new(device, UPLOADS * 4096)).collect();
    let kernel = BlockingKernel::launch(device, queue);
    let moves: Vec<_> = with_deadline("uploads of four threads", || {
        let up =
            |buffer: &Buffer, n: usize| runtime.read_on_stream(&from, 0, buffer.target(n * 4096), 4096, queue).unwrap();
        let all = |buffer| (0..UPLOADS).map(|n| up(buffer, n)).collect::<Vec<_>>();
        std::thread::scope(|scope| {
            let threads: Vec<_> = buffers.iter().map(|buffer| scope.spawn(|| all(buffer))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        })
    });
    kernel.finish();
    with_deadline("the queue", || moves.iter().for_each(|m| assert_eq!(m.wait(), Ok(4096))));
    let expected = vec![file::bytes(0, 4096, 0); UPLOADS].concat();
    assert!(buffers.iter().all(|buffer| buffer.bytes() == expected));
}

/// `cudaStreamPerThread` is another stream on each thread.
#[test]
fn per_thread_streams_share_one_id() {
    let uploads = Uploads::new();
    let [one, other] = uploads.streams;
    let up = |n, stream| {
        uploads.device.redirect(StreamId::PER_THREAD, stream);
        uploads.start(n, StreamId::PER_THREAD)
    };
    let kernel = BlockingKernel::launch(uploads.inner, one);
    let slow = [up(0, one), up(1, one), up(2, one)];
    let quick = std::thread::scope(|scope| scope.spawn(|| up(3, other)).join().unwrap());
    kernel.finish();
    with_deadline("both streams", || {
        assert_eq!(quick.wait(), Ok(1 << 20));
        assert!(slow.iter().all(|m| m.wait() == Ok(1 << 20)));
    });
    for buffer in &uploads.buffers {
        assert!(buffer.bytes() == file::bytes(0, 1 << 20, 0));
    }
}
