//! A file server that does not answer occupies a bounded share of workers and bounce buffers: reads of other file
//! systems are not delayed.

use std::fs::File;
use std::os::fd::AsRawFd;

use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::hang::HungServer;
use spinio_testkit::{Buffer, file, mount_fixture, with_deadline};

const MIB: usize = 1 << 20;
const SIZE: usize = 16 * MIB;

fn read(runtime: &Runtime, source: &File, buffer: &Buffer) {
    buffer.fill(0);
    assert_eq!(runtime.read(source.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(buffer.bytes() == file::bytes(0, SIZE, 0), "wrong bytes");
}

/// Reads files of another file system while `readers` threads wait for a server that does not answer.
fn read_next_to_hung_server(readers: usize, staging: u64) {
    let server = match HungServer::start(readers, SIZE as u64) {
        Ok(server) => server,
        Err(why) => return println!("skipped: {why}"),
    };
    let healthy = mount_fixture::create("tree").unwrap();
    let cached = file::create_filled(&healthy.file("cached"), SIZE as u64);
    let device = emulated("size=512M");
    let runtime = Runtime::new(Settings { bounce_limit: staging, ..Settings::default() });
    with_deadline("reads next to a hung server", || {
        std::thread::scope(|scope| {
            let hung_reads: Vec<_> = server
                .files
                .iter()
                .map(|hung| {
                    let runtime = &runtime;
                    scope.spawn(move || {
                        let buffer = Buffer::new(device, SIZE);
                        runtime.read(hung.as_raw_fd(), Some(0), buffer.target(0), SIZE)
                    })
                })
                .collect();
            server.wait_for_readers(readers.min(8));
            let buffer = Buffer::new(device, SIZE);
            for turn in 0..3 {
                read(&runtime, &cached, &buffer);
                // A file that is opened for the first time, and uncached.
                let absent = file::create_filled(&healthy.file(&format!("absent{turn}")), SIZE as u64);
                file::evict(&absent);
                read(&runtime, &absent, &buffer);
                file::evict(&cached);
                read(&runtime, &cached, &buffer);
            }
            let host = server.end();
            for hung in hung_reads {
                let error = hung.join().unwrap().expect_err("the server has answered");
                assert_eq!(Some(error.kind.errno().raw_os_error()), host, "{error}");
            }
        });
    });
}

#[test]
fn one_hung_read_leaves_workers_to_other_file_systems() {
    read_next_to_hung_server(1, 128 << 20);
}

#[test]
fn eight_hung_reads_leave_workers_and_buffers_to_other_file_systems() {
    read_next_to_hung_server(8, 128 << 20);
}

#[test]
fn hung_reads_leave_buffers_of_small_pool_to_other_file_systems() {
    read_next_to_hung_server(3, 16 << 20);
}
