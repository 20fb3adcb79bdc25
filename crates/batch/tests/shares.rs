//! A file server that does not answer takes no more than its share: cold batches of other file systems continue.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

use spinio_batch::{Batches, ReadOp};
use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::hang::HungServer;
use spinio_testkit::{Buffer, file, mount_fixture, with_deadline};

const SIZE: usize = 16 << 20;

/// All of a file, in order.
fn pieces(source: &File, buffer: &Buffer, size: usize, piece: usize) -> Vec<ReadOp> {
    let op = |i| ReadOp {
        fd: source.as_raw_fd(),
        offset: (i * piece) as u64,
        len: piece as u64,
        address: buffer.addr().0 + (i * piece) as u64,
        ..ReadOp::default()
    };
    (0..size / piece).map(op).collect()
}

fn read_batch(runtime: &Runtime, source: &File, buffer: &Buffer) {
    buffer.fill(0);
    let result = runtime.batch(&mut pieces(source, buffer, SIZE, 16 << 10)).unwrap();
    assert_eq!((result.bytes, result.failed), (SIZE as u64, 0));
    assert!(buffer.bytes() == file::bytes(0, SIZE, 0), "other bytes than the file's");
}

#[test]
fn hung_reads_leave_cold_batches_of_other_file_systems() {
    for readers in [1, 3, 8] {
        let server = match HungServer::start(readers, SIZE as u64) {
            Ok(server) => server,
            Err(why) => return println!("skipped: {why}"),
        };
        let healthy = mount_fixture::create("tree").unwrap();
        let source = file::create_filled(&healthy.file("source"), SIZE as u64);
        let device = emulated("size=512M");
        let runtime = Runtime::new(Settings::default());
        with_deadline("a cold batch next to a server that hangs", || {
            std::thread::scope(|scope| {
                for hung in &server.files {
                    let runtime = &runtime;
                    scope.spawn(move || {
                        let buffer = Buffer::new(device, SIZE);
                        assert!(runtime.read(hung.as_raw_fd(), Some(0), buffer.target(0), SIZE).is_err());
                    });
                }
                server.wait_for_readers(readers);
                let buffer = Buffer::new(device, SIZE);
                for _ in 0..3 {
                    file::evict(&source);
                    read_batch(&runtime, &source, &buffer);
                }
                server.end();
            });
        });
    }
}

/// Each has as many buffers in flight as one batch may have, together all of the pool.
#[test]
fn hung_batches_leave_buffers_to_other_file_systems() {
    const LONG: usize = 2 * SIZE;
    let server = match HungServer::start(4, LONG as u64) {
        Ok(server) => server,
        Err(why) => return println!("skipped: {why}"),
    };
    let healthy = mount_fixture::create("tree").unwrap();
    let source = file::create_filled(&healthy.file("source"), SIZE as u64);
    let device = emulated("size=512M");
    let runtime = Runtime::new(Settings::default());
    with_deadline("reads next to batches of a server that hangs", || {
        std::thread::scope(|scope| {
            for hung in &server.files {
                let runtime = &runtime;
                scope.spawn(move || {
                    let buffer = Buffer::new(device, LONG);
                    let result = runtime.batch(&mut pieces(hung, &buffer, LONG, 256 << 10)).unwrap();
                    assert_eq!((result.bytes, result.failed), (0, LONG / (256 << 10)));
                });
            }
            // Long enough for them to take what they can get; if it is not, less is tested.
            std::thread::sleep(Duration::from_millis(500));
            let buffer = Buffer::new(device, SIZE);
            for _ in 0..3 {
                file::evict(&source);
                read_batch(&runtime, &source, &buffer);
                file::evict(&source);
                assert_eq!(runtime.read(source.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
                assert_eq!(runtime.read(source.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
            }
            server.end();
        });
    });
}
