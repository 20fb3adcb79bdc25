//! Chunks of large direct writes end at the stripe boundaries of an array, which depend on the file's physical offsets.
//! A fake kernel reports the array and the offsets.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Buffer as Explained, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{FileExtent, Stat};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, file, mount_fixture};

type Result<T> = core::result::Result<T, Errno>;

/// RAID-5 of four members, chunks of 64 KiB.
const WIDTH: u64 = 192 << 10;
const PAGE: u64 = 4096;
const SIZE: usize = 20 << 20;

/// A machine whose files are all stored on one array.
struct FakeArray {
    /// The md level.
    level: &'static str,
    /// The extents of each file, as far as it is written: (offset in the file, offset on the array), in order.
    runs: Vec<(u64, u64)>,
    refuse_extents: bool,
    extent_queries: Mutex<usize>,
    written: Mutex<Vec<(u64, u64)>>,
    /// Reads of storage.
    read: Mutex<Vec<(u64, u64)>>,
}

impl FakeArray {
    fn new(level: &'static str, runs: &[(u64, u64)]) -> &'static FakeArray {
        Box::leak(Box::new(FakeArray::build(level, runs)))
    }

    fn build(level: &'static str, runs: &[(u64, u64)]) -> FakeArray {
        let runs = runs.to_vec();
        let (extent_queries, written, read) = Default::default();
        FakeArray { level, runs, refuse_extents: false, extent_queries, written, read }
    }

    fn array_offset(&self, at: u64) -> u64 {
        let run = self.runs.iter().rfind(|r| r.0 <= at).expect("the first one begins at 0");
        run.1 + at - run.0
    }

    /// The number of extent queries, and the ranges of the writes, since the last call.
    fn take(&self) -> (usize, Vec<(u64, u64)>) {
        (std::mem::take(&mut self.extent_queries.lock().unwrap()), std::mem::take(&mut self.written.lock().unwrap()))
    }

    /// Whether a cut at this offset splits no stripe.
    fn is_stripe_boundary(&self, at: u64) -> bool {
        let (last, next) = (self.array_offset(at - 1), self.array_offset(at));
        next.is_multiple_of(WIDTH) || next != last + 1
    }
}

impl Syscalls for FakeArray {
    fn fstat(&self, fd: i32) -> Result<Stat> {
        // The device number of md0, whatever storage the tests use.
        Ok(Stat { dev: 9 << 8, ..LinuxSyscalls.fstat(fd)? })
    }

    fn file_system(&self, _: i32) -> Result<u64> {
        Ok(0xef53)
    }

    fn read_link(&self, _: &CStr) -> Result<Vec<u8>> {
        Ok(b"../../devices/virtual/block/md0".to_vec())
    }

    fn list_dir(&self, _: &CStr) -> Result<Vec<std::ffi::CString>> {
        Ok(Vec::new())
    }

    fn read_sysfs(&self, path: &CStr, _: usize) -> Result<Vec<u8>> {
        let is = |name: &str| path.to_str().is_ok_and(|path| path.ends_with(name));
        let value = match () {
            () if is("md/level") => self.level,
            () if is("md/chunk_size") => "65536",
            () if is("md/layout") => "2",
            () if is("md/raid_disks") => "4",
            () => return Err(Errno::NOENT),
        };
        Ok(format!("{value}\n").into_bytes())
    }

    fn extents(&self, fd: i32, offset: u64, len: u64, _: usize) -> Result<Vec<FileExtent>> {
        *self.extent_queries.lock().unwrap() += 1;
        if self.refuse_extents {
            return Err(Errno::OPNOTSUPP);
        }
        let size = LinuxSyscalls.fstat(fd)?.size;
        let ends = self.runs.iter().skip(1).map(|r| r.0).chain([u64::MAX]);
        let all = self.runs.iter().zip(ends).map(|(&(logical, physical), end)| {
            let len = end.min(size).saturating_sub(logical);
            FileExtent { logical, physical, len, flags: 0 }
        });
        let wanted = |e: &FileExtent| e.len > 0 && e.logical < offset.saturating_add(len) && e.logical + e.len > offset;
        Ok(all.filter(wanted).collect())
    }

    unsafe fn pread(&self, route: Route, fd: i32, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
        if route == Route::Direct {
            self.read.lock().unwrap().push((offset, offset + len as u64));
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) }
    }

    unsafe fn pwritev(
        &self,
        route: Route,
        fd: i32,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize> {
        // SAFETY: passed on to the caller.
        let wrote = unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) }?;
        if let Some(at) = at {
            self.written.lock().unwrap().push((at, at + wrote as u64));
        }
        Ok(wrote)
    }
}

/// Chunks of 4 MiB at most.
fn runtime(kernel: &'static FakeArray) -> Runtime {
    Runtime::with_kernel(Settings { bounce_limit: 8 << 20, ..Settings::default() }, kernel)
}

fn direct(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

/// Writes `SIZE` bytes at `at` and checks the file; the number of extent queries, and the ranges of the writes.
fn write(kernel: &FakeArray, runtime: &Runtime, path: &Path, at: u64, version: u64) -> (usize, Vec<(u64, u64)>) {
    let buffer = Buffer::new(emulated("size=64M"), SIZE);
    let bytes = file::bytes(at, SIZE, version as u8);
    buffer.write_at(0, &bytes);
    kernel.take();
    let subject = direct(path);
    assert_eq!(runtime.write(subject.as_raw_fd(), Some(at), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(std::fs::read(path).unwrap()[at as usize..][..SIZE] == bytes);
    let (queries, written) = kernel.take();
    let mut end = at;
    for &(from, to) in &written {
        assert_eq!(from, end, "{written:?}");
        end = to;
    }
    assert_eq!(end, at + SIZE as u64, "{written:?}");
    (queries, written)
}

/// A command that ends inside a chunk costs the member disk another command for the rest.
#[test]
fn direct_reads_end_at_chunks() {
    // Commands of 1 MiB from this offset on would end inside chunks.
    const FROM: u64 = 5 * PAGE;
    const LEN: usize = 4 << 20;
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let subject = file::create_filled(&path, 24 << 20);
    for level in ["raid0", "raid5", "raid6"] {
        file::evict(&subject);
        let kernel = FakeArray::new(level, &[(0, 0)]);
        let buffer = Buffer::new(emulated("size=64M"), LEN);
        let got = runtime(kernel).read(subject.as_raw_fd(), Some(FROM), buffer.target(0), LEN).unwrap();
        assert!(got == LEN && buffer.bytes() == file::bytes(FROM, LEN, 0), "{level}");
        let mut read = std::mem::take(&mut *kernel.read.lock().unwrap());
        read.sort_unstable();
        assert!(read.len() > 3, "{level}: {read:?}");
        let last = FROM + LEN as u64;
        assert!(read.iter().all(|&(_, end)| end % (64 << 10) == 0 || end >= last), "{level}: {read:?}");
    }
}

/// Linux completes a write although one leg of a mirror could not fetch the bytes from the device.
#[test]
fn redundant_arrays_do_not_use_p2p_writes() {
    const LEN: usize = 1 << 20;
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    drop(file::create_filled(&path, LEN as u64));
    let buffer = Buffer::host_mapped(emulated("size=64M,bar=16M,p2p=1"), LEN);
    for level in ["raid1", "raid10", "raid5", "raid6"] {
        let runtime = runtime(FakeArray::new(level, &[(0, 0)]));
        let subject = direct(&path);
        assert_eq!(runtime.write(subject.as_raw_fd(), Some(0), buffer.target(0), LEN).unwrap(), LEN);
        let stats = runtime.stats();
        assert!(stats.rows.iter().all(|l| l.route != Route::P2p), "{level}: {:?}", stats.rows);
        let mirror = stats.refusals.iter().find(|r| r.reason == Reason::P2pMirror).map(|r| (r.count, r.bytes));
        assert_eq!(mirror, Some((1, LEN as u64)), "{level}");
    }
}

#[test]
fn chunks_end_at_physical_stripes() {
    let place = mount_fixture::create("tree").unwrap();
    for runs in [&[(0, 7 * PAGE)][..], &[(0, 5 * WIDTH)], &[(0, PAGE), (9 << 20, 100 << 20), ((9 << 20) + 5 * PAGE, 0)]]
    {
        let path = place.file("subject");
        drop(file::create_filled(&path, 24 << 20));
        let kernel = FakeArray::new("raid5", runs);
        let runtime = runtime(kernel);
        for (number, at) in [0, 3 * PAGE, 3 * PAGE].into_iter().enumerate() {
            let (queries, written) = write(kernel, &runtime, &path, at, number as u64);
            assert!(written.len() >= 5, "{written:?}");
            for &(_, end) in &written[..written.len() - 1] {
                assert!(kernel.is_stripe_boundary(end), "{runs:?}, at {at}: {written:?}");
            }
            // The extents of an unchanged file are queried once for all writes.
            assert_eq!(queries, [1, 0, 0][number], "{runs:?}, write {number}");
        }
    }
}

#[test]
fn growing_file_is_assumed_contiguous() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let kernel = FakeArray::new("raid5", &[(0, 7 * PAGE)]);
    let runtime = runtime(kernel);
    let (_, written) = write(kernel, &runtime, &path, 0, 1);
    let good = written[..written.len() - 1].iter().filter(|w| kernel.is_stripe_boundary(w.1)).count();
    assert!(good + 2 >= written.len() - 1, "more than two chunks end inside a stripe: {written:?}");
    // After existing bytes, all of them end at a stripe.
    let (_, written) = write(kernel, &runtime, &path, SIZE as u64, 2);
    assert!(written[..written.len() - 1].iter().all(|w| kernel.is_stripe_boundary(w.1)), "{written:?}");
}

#[test]
fn chunks_have_full_size_when_layout_is_unknown() {
    let place = mount_fixture::create("tree").unwrap();
    let refusing = FakeArray { refuse_extents: true, ..FakeArray::build("raid5", &[(0, 0)]) };
    let cases: [(&str, &'static FakeArray, usize); 3] = [
        ("no parity", FakeArray::new("raid0", &[(0, 7 * PAGE)]), 0),
        ("FIEMAP is refused", Box::leak(Box::new(refusing)), 1),
        ("no array", FakeArray::new("linear", &[(0, 7 * PAGE)]), 0),
    ];
    for (what, kernel, max) in cases {
        let path = place.file("subject");
        drop(file::create_filled(&path, 24 << 20));
        let runtime = runtime(kernel);
        let (mut total, buffer) = (0, Buffer::new(emulated("size=64M"), PAGE as usize));
        for at in [0, PAGE] {
            let (queries, written) = write(kernel, &runtime, &path, at, 5);
            assert!(written.iter().all(|w| w.1 - w.0 == 4 << 20), "{what}: {written:?}");
            total += queries;
        }
        assert_eq!(total, max, "{what}: the extents were queried repeatedly");
        let subject = direct(&path);
        let explained = runtime.explain_write(subject.as_raw_fd(), 0, SIZE as u64, Explained::of(&buffer.allocation()));
        let advice = explained.unwrap().advice.join("\n");
        assert_eq!(advice.contains("does not report the file's extents"), kernel.refuse_extents, "{what}: {advice}");
    }
}
