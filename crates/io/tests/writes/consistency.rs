//! Every kind of reader sees a write that has returned. A write takes the bytes that the device had when the write
//! began.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use spinio_device::Device;
use spinio_io::{Runtime, Settings};
use spinio_sys::linux;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Rng, file, mount_fixture, with_deadline};

const SIZE: usize = 4 << 20;

/// A mapping of the whole file.
struct Mapped(*mut u8);

impl Mapped {
    fn new(file: &File) -> Mapped {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let ptr = unsafe {
            linux::mmap(std::ptr::null_mut(), SIZE, linux::PROT_READ, linux::MAP_SHARED, file.as_raw_fd(), 0)
        };
        Mapped(ptr.unwrap())
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: mapped above; no thread writes while it is copied.
        unsafe { std::slice::from_raw_parts(self.0, SIZE) }.to_vec()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`.
        let _ = unsafe { linux::munmap(self.0, SIZE) };
    }
}

fn read_direct(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; SIZE + 4096];
    let skip = bytes.as_ptr().align_offset(4096);
    file.read_exact_at(&mut bytes[skip..skip + SIZE], 0).unwrap();
    bytes[skip..skip + SIZE].to_vec()
}

#[test]
fn every_reader_sees_written_bytes() {
    let device = emulated("size=64M,bar=16M,p2p=1,latency_us=200");
    mount_fixture::for_each_kind(|place| {
        let path = place.file("file");
        let runtimes = [
            Runtime::new(Settings::default()),
            Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() }),
        ];
        let mut rng = Rng::from_env(3);
        let subject = file::create_filled(&path, SIZE as u64);
        let (reader, mapped) = (File::open(&path).unwrap(), Mapped::new(&subject));
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).ok();
        let mut model = file::bytes(0, SIZE, 0);
        for round in 0..12u8 {
            if rng.chance(50) {
                file::randomize_residency(&path, &subject, &mut rng);
            }
            let flags = *rng.choose(&[0, libc::O_DSYNC, libc::O_DIRECT, libc::O_DIRECT | libc::O_DSYNC]);
            let Ok(writer) = OpenOptions::new().write(true).custom_flags(flags).open(&path) else { continue };
            let unit = if flags == 0 { 1 } else { 4096 };
            let from = rng.below(SIZE as u64 / 2) as usize / unit * unit;
            let len = (1 + rng.below((SIZE - from) as u64 - 1) as usize).next_multiple_of(unit).min(SIZE - from);
            let buffer = if rng.chance(50) { Buffer::new(device, len) } else { Buffer::host_mapped(device, len) };
            let bytes = file::bytes(from as u64, len, round + 1);
            buffer.write_at(0, &bytes);
            let runtime = rng.choose(&runtimes);
            let what = format!("{} round {round}, {len} bytes at {from}, flags {flags:o}", place.kind);
            let wrote =
                with_deadline(&what, || runtime.write(writer.as_raw_fd(), Some(from as u64), buffer.target(0), len));
            assert_eq!(wrote.unwrap(), len, "{what}");
            model[from..from + len].copy_from_slice(&bytes);
            let mut seen = vec![0; SIZE];
            reader.read_exact_at(&mut seen, 0).unwrap();
            assert!(seen == model, "{what}: a buffered reader sees other bytes");
            assert!(mapped.bytes() == model, "{what}: a mapping shows other bytes");
            if let Some(direct) = &direct {
                assert!(read_direct(direct) == model, "{what}: a direct reader sees other bytes");
            }
            let back = Buffer::new(device, SIZE);
            assert_eq!(runtime.read(reader.as_raw_fd(), Some(0), back.target(0), SIZE).unwrap(), SIZE);
            assert!(back.bytes() == model, "{what}: a device reader sees other bytes");
        }
    });
}

#[test]
fn write_takes_earlier_queued_data_only() {
    let device = emulated("size=64M,bar=8M,p2p=1,latency_us=500");
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    for (len, mapped, flags) in [
        (1000, false, 0),
        (100_000, true, 0),
        (3 << 20, false, 0),
        // In chunks.
        (6 << 20, false, 0),
        (1 << 20, true, libc::O_DIRECT),
        (3 << 20, false, libc::O_DSYNC),
    ] {
        let buffer = if mapped { Buffer::host_mapped(device, len) } else { Buffer::new(device, len) };
        let writer = OpenOptions::new().create(true).write(true).custom_flags(flags).open(&path).unwrap();
        let (before, after) = (file::bytes(0, len, 1), file::bytes(0, len, 2));
        let stream = device.app_stream().id();
        buffer.fill(0);
        // SAFETY: `before` lives to the end of the block; the write below waits for the copy.
        unsafe { device.copy_in(stream, buffer.addr(), before.as_ptr(), len) }.unwrap();
        assert_eq!(runtime.write(writer.as_raw_fd(), Some(0), buffer.target(0), len).unwrap(), len);
        // Work that is queued after the call has returned does not reach the file.
        buffer.write_at(0, &after);
        assert!(std::fs::read(&path).unwrap()[..len] == before, "{len} bytes, mapped: {mapped}, flags {flags:o}");
    }
}

#[test]
fn write_after_queued_read_copies_the_file() {
    let device = emulated("size=64M,latency_us=500");
    let runtime = Runtime::new(Settings::default());
    let place = mount_fixture::create("tree").unwrap();
    let (from, to) = (file::create_filled(&place.file("from"), 300_000), file::create(&place.file("to")));
    let buffer = Buffer::new(device, 50_000);
    let mut done = 0;
    loop {
        let got = runtime.read(from.as_raw_fd(), None, buffer.target(0), 50_000).unwrap();
        if got == 0 {
            break;
        }
        done += runtime.write(to.as_raw_fd(), None, buffer.target(0), got).unwrap();
    }
    assert_eq!(done, 300_000);
    assert!(std::fs::read(place.file("to")).unwrap() == file::bytes(0, 300_000, 0));
}
