//! Batches of enough operations that threads share them before any is read, with odd operations among them.

use std::os::fd::AsRawFd;

use spinio_batch::{Batches, ReadOp};
use spinio_device::emulated::POISON;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Rng, file, with_deadline};

use crate::subject::{SIZE, TestFile, assert_all_released, check, settings};

/// More than a few chunks, and not a multiple of a chunk.
const COUNT: u64 = 150_001;

/// Bytes from one operation's destination to the next one's.
const STEP: u64 = 96;

fn uniform_ops(rng: &mut Rng, fd: i32, buffer: &Buffer) -> Vec<ReadOp> {
    let piece = |i| {
        let (offset, address) = (rng.below(SIZE as u64 - 64), buffer.addr().0 + i * STEP);
        // Not across the border of a piece that a thread reads at once.
        let offset = if offset % (256 << 10) > (256 << 10) - 64 { offset - 64 } else { offset };
        ReadOp { fd, offset, len: 1 + i % 64, address, ..ReadOp::default() }
    };
    (0..COUNT).map(piece).collect()
}

#[test]
fn uniform_ops_with_odd_ones_are_read() {
    let (subject, other) = (TestFile::new(), TestFile::new());
    file::load_pages(&subject.path, 0..SIZE as u64 / 4096 + 1);
    let inner = emulated("size=64M");
    let every = |n: usize| (0..COUNT as usize).step_by(n).collect::<Vec<_>>();
    let odd: [Vec<usize>; 7] =
        [vec![], vec![0], vec![70_000], vec![COUNT as usize - 1], vec![5, 65_541, 65_542], every(30_000), every(997)];
    let copied = Settings { batch_threads: 6, routes: vec![Route::Copy, Route::Store, Route::Direct], ..settings() };
    let alone = Settings { batch_threads: 1, ..copied.clone() };
    let registered = Settings { batch_threads: 6, ..settings() };
    // The emulated device is slow with each entry of a registered page.
    for (settings, odd) in [(copied, &odd[..]), (alone, &odd[4..5]), (registered, &odd[4..5])] {
        let runtime = Runtime::new(settings);
        let mut rng = Rng::from_env(51);
        let buffer = Buffer::new(inner, (COUNT * STEP) as usize);
        for odd in odd {
            buffer.fill(POISON);
            let mut batch = uniform_ops(&mut rng, subject.fd(), &buffer);
            for (n, &at) in odd.iter().enumerate() {
                let p = &mut batch[at];
                match (n + odd.len()) % 5 {
                    0 => p.offset = SIZE as u64 - 1,
                    1 => p.len = 0,
                    2 => (p.offset, p.len) = ((256 << 10) - 7, STEP),
                    3 => p.fd = other.file.as_raw_fd(),
                    _ => p.offset = SIZE as u64 + 5,
                }
            }
            let done = with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
            assert_eq!((done.failed, done.bytes), (0, batch.iter().map(|p| p.result as u64).sum()));
            check(&batch, &buffer);
        }
        drop(runtime);
    }
    assert_all_released(inner, 0);
}

#[test]
fn failing_op_does_not_affect_uniform_ops() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    let routes = vec![Route::Copy, Route::Store, Route::Direct];
    let runtime = Runtime::new(Settings { batch_threads: 6, routes, ..settings() });
    let buffer = Buffer::new(inner, (COUNT * STEP) as usize);
    let mut batch = uniform_ops(&mut Rng::from_env(52), subject.fd(), &buffer);
    batch[80_000].fd = -1;
    let done = with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
    assert_eq!((done.failed, batch[80_000].result), (1, -i64::from(Errno::BADF.raw_os_error())));
    assert!(batch.iter().enumerate().all(|(n, p)| n == 80_000 || p.result == p.len as i64));
}
