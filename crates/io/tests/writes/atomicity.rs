//! A write is atomic with respect to other writers, and so is an append.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Barrier;

use spinio_device::emulated::Emulated;
use spinio_io::{Part, Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, mount_fixture, with_deadline};

const SIZE: usize = 8 << 20;

fn open(path: &Path, append: bool) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).append(append).open(path).unwrap()
}

fn filled_buffer(device: &'static Emulated, len: usize, byte: u8) -> Buffer {
    let buffer = Buffer::new(device, len);
    buffer.fill(byte);
    buffer
}

/// Two threads write the same 8 MiB: the file holds the bytes of one of them.
fn check_overlapping(settings: Settings, flags: i32, own_offset: bool) {
    let device = emulated("size=64M,gbps=3");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let opened = || {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(&path).unwrap()
    };
    let (files, runtime) = ([opened(), opened()], Runtime::new(settings));
    let buffers = [filled_buffer(device, SIZE, 1), filled_buffer(device, SIZE, 2)];
    let mut winners = [0; 3];
    for round in 0..25 {
        let start = Barrier::new(2);
        std::thread::scope(|threads| {
            for (file, buffer) in files.iter().zip(&buffers) {
                let (start, runtime) = (&start, &runtime);
                threads.spawn(move || {
                    let fd = file.as_raw_fd();
                    spinio_sys::linux::lseek(fd, 77, libc::SEEK_SET).unwrap();
                    start.wait();
                    let at = (!own_offset).then_some(77);
                    assert_eq!(runtime.write(fd, at, buffer.target(0), SIZE).unwrap(), SIZE);
                });
            }
        });
        let bytes = std::fs::read(&path).unwrap();
        let winner = bytes[77];
        assert_eq!(bytes[77..].iter().position(|&b| b != winner), None, "round {round}: two writes were mixed");
        winners[winner as usize] += 1;
    }
    println!("first, second writer last: {:?}", &winners[1..]);
}

#[test]
fn overlapping_writes_never_mix() {
    with_deadline("two writers", || check_overlapping(Settings::default(), 0, false));
    // No page is cached, and the writes are synchronous: each would bypass the page cache if it were the only writer.
    with_deadline("two synchronous writers", || check_overlapping(Settings::default(), libc::O_DSYNC, false));
    with_deadline("two writers at their own offsets", || check_overlapping(Settings::default(), 0, true));
    // Each write needs all bounce buffers, so the two have to share them.
    with_deadline("two writers and one bounce buffer pool", || {
        check_overlapping(Settings { bounce_limit: SIZE as u64, ..Settings::default() }, 0, false)
    });
}

/// Four writers append records: each record is contiguous, and none is lost.
fn check_appended(settings: Settings, sizes: &[usize]) {
    let device = emulated("size=64M,gbps=3");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let runtime = Runtime::new(settings);
    const EACH: usize = 20;
    let host = [9u8; 1000];
    std::thread::scope(|threads| {
        for writer in 0..4u8 {
            let (runtime, path, host) = (&runtime, &path, &host);
            threads.spawn(move || {
                let file = open(path, true);
                for n in 0..EACH {
                    let len = sizes[(n + writer as usize) % sizes.len()];
                    let buffer = filled_buffer(device, len, writer + 1);
                    let header = [[0; 8], (len as u64).to_le_bytes()].concat();
                    // Device memory between a header and a trailer in host memory.
                    let parts = [
                        Part::Host(header.as_ptr(), header.len()),
                        Part::Device(buffer.target(0), len),
                        Part::Host(host.as_ptr(), host.len()),
                    ];
                    let wrote = runtime.write_parts(file.as_raw_fd(), None, 0, &parts).unwrap();
                    assert_eq!(wrote, 16 + len + host.len());
                }
            });
        }
    });
    let bytes = std::fs::read(&path).unwrap();
    let (mut at, mut seen) = (0, [0; 4]);
    while at < bytes.len() {
        assert_eq!(bytes[at..at + 8], [0; 8], "no record begins at {at}");
        let len = u64::from_le_bytes(bytes[at + 8..at + 16].try_into().unwrap()) as usize;
        let body = &bytes[at + 16..at + 16 + len];
        assert_eq!(body.iter().position(|&b| b != body[0]), None, "the record at {at} is torn");
        assert_eq!(bytes[at + 16 + len..at + 16 + len + 1000], [9; 1000], "the record at {at} lost its trailer");
        seen[body[0] as usize - 1] += 1;
        at += 16 + len + 1000;
    }
    assert_eq!(seen, [EACH; 4]);
}

#[test]
fn appended_records_are_contiguous() {
    with_deadline("80 records", || check_appended(Settings::default(), &[100_000, 3 << 20, 65_536, 5]));
    with_deadline("80 records and a small bounce buffer pool", || {
        check_appended(Settings { bounce_limit: 4 << 20, ..Settings::default() }, &[4 << 20, 3 << 20, 70_000]);
    });
}
