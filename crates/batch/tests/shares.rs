//! A file server that does not answer takes no more than its share: cold batches of other file systems continue.

use std::fs::File;
use std::os::fd::AsRawFd;

use spinio_batch::{Batches, ReadOp};
use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::hang::HungServer;
use spinio_testkit::{Buffer, file, mount_fixture, with_deadline};

const SIZE: usize = 16 << 20;

fn read_batch(runtime: &Runtime, source: &File, buffer: &Buffer) {
    const PIECE: usize = 16 << 10;
    buffer.fill(0);
    let mut ops: Vec<_> = (0..SIZE / PIECE)
        .map(|i| ReadOp {
            fd: source.as_raw_fd(),
            offset: (i * PIECE) as u64,
            len: PIECE as u64,
            address: buffer.addr().0 + (i * PIECE) as u64,
            ..ReadOp::default()
        })
        .collect();
    let result = runtime.batch(&mut ops).unwrap();
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
