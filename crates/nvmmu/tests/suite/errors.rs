//! Storage that fails in the middle of an upload, and files whose size `stat` does not tell.

#![expect(unsafe_code, reason = "system calls, and a file that is mapped past its end")]

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use spinio_device::{Device, DeviceAddr, WaitMode, registry};
use spinio_io::Settings;
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_nvmmu::Direction::Upload;
use spinio_nvmmu::{ErrorKind, PipelineSpec, Session, Slot};
use spinio_plan::Route;
use spinio_sys::Errno;

use crate::common::{Buffer, PausedDevice, bytes, leak_runtime, new_stream, runtime};

const MIB: u64 = 1 << 20;

/// Storage with a bad block: reads end before it, and one that begins there or later fails.
struct BadBlock {
    at: AtomicU64,
}

impl BadBlock {
    fn new(at: u64) -> &'static BadBlock {
        Box::leak(Box::new(BadBlock { at: AtomicU64::new(at) }))
    }
}

impl Syscalls for BadBlock {
    unsafe fn pread(
        &self,
        route: Route,
        fd: i32,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        let left = self.at.load(SeqCst).saturating_sub(offset);
        if left == 0 {
            return Err(Errno::IO);
        }
        // SAFETY: passed on to the caller; not more than it asked for.
        unsafe { LinuxSyscalls.pread(route, fd, buf, len.min(left as usize), offset, flags) }
    }
}

/// Two buffers for stream-ordered uploads, of which one may use half.
fn few_buffers() -> Settings {
    Settings { bounce_limit: 4 << 20, ..Settings::default() }
}

/// A private mapping, of which only the first pages have a file: reads of the others, by `/proc/self/mem`, fail.
struct ShortMapping {
    address: u64,
    len: usize,
}

impl ShortMapping {
    fn new(folder: &Path, backed: u64, len: u64) -> ShortMapping {
        let path = folder.join("mapped");
        fs::write(&path, bytes(backed as usize, 6)).unwrap();
        let file = File::open(&path).unwrap();
        let (address, len) = (std::ptr::null_mut(), len as usize);
        // SAFETY: a new mapping, which no Rust code accesses.
        let at = unsafe { libc::mmap(address, len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED);
        ShortMapping { address: at as u64, len }
    }
}

impl Drop for ShortMapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        assert_eq!(unsafe { libc::munmap(self.address as *mut libc::c_void, self.len) }, 0);
    }
}

#[test]
fn upload_reports_error_after_moved_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let mapped = ShortMapping::new(folder.path(), 3 * MIB, 8 * MIB);
    let memory = Path::new("/proc/self/mem");
    let device = Buffer::new(8 << 20);
    let mut session = Session::begin(runtime(), None).unwrap();
    assert_eq!(session.move_range(memory, device.at(0), mapped.address, 3 * MIB, Upload).unwrap(), 3 * MIB);
    assert!(device.bytes()[..3 << 20] == bytes(3 << 20, 6));
    for len in [3 * MIB + 5000, 8 * MIB] {
        let error = session.move_range(memory, device.at(0), mapped.address, len, Upload).unwrap_err();
        assert_eq!(error.kind.errno(), Errno::IO, "{error}");
        // It has no size, so it is read at once.
        let error = session.move_async(memory, device.at(0), mapped.address, len, Upload, new_stream()).unwrap_err();
        assert_eq!(error.kind.errno(), Errno::IO, "{error}");
    }
    assert_eq!(session.end().unwrap().uploaded, 3 * MIB);
}

#[test]
fn async_upload_reports_error_after_moved_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    fs::write(&from, bytes(8 << 20, 3)).unwrap();
    let device = Buffer::new(8 << 20);
    let mut session = Session::begin(leak_runtime(few_buffers(), BadBlock::new(5 * MIB + 4096)), None).unwrap();
    let queue = new_stream();
    let upload =
        |session: &mut Session, at| session.move_async(&from, device.at(0), at, 3 * MIB, Upload, queue).unwrap();
    let good = upload(&mut session, 0);
    assert_eq!(good.wait().unwrap(), 3 * MIB);
    let bad = upload(&mut session, 4 * MIB);
    assert_eq!(bad.wait().unwrap_err().kind.errno(), Errno::IO);
    let later = upload(&mut session, MIB);
    assert_eq!(later.wait().unwrap(), 3 * MIB);
    let report = session.report();
    assert_eq!(report.uploaded, 6 * MIB, "what failed is not counted");
    // In case the ticket was dropped.
    assert_eq!(session.end().unwrap_err().kind.errno(), Errno::IO);
}

#[test]
fn short_uploads_are_counted_as_they_ended() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    fs::write(&from, bytes(8 << 20, 3)).unwrap();
    let buffer = Buffer::new(8 << 20);
    let mut session = Session::begin(leak_runtime(few_buffers(), &LinuxSyscalls), None).unwrap();
    let paused = PausedDevice::new();
    let upload = session.move_async(&from, buffer.at(0), 0, 8 * MIB, Upload, new_stream()).unwrap();
    File::options().write(true).open(&from).unwrap().set_len(5 * MIB).unwrap();
    assert_eq!(session.report().uploaded, 0, "it has not begun");
    drop(paused);
    assert_eq!(upload.wait().unwrap(), 5 * MIB);
    assert_eq!(session.end().unwrap().uploaded, 5 * MIB);
}

/// Bytes of a step.
const STEP: u64 = 8 * MIB;

/// Runs a pipeline over a file, with two slots; `kernel` gets the number of the step.
fn pipeline(
    session: &mut Session,
    from: &Path,
    len: u64,
    mut kernel: impl FnMut(u64),
) -> Result<u64, spinio_nvmmu::Error> {
    let to = from.with_file_name("out");
    let buffers = [Buffer::new(STEP as usize), Buffer::new(STEP as usize)];
    let slots = buffers.each_ref().map(|b| Slot { queue: new_stream(), input: b.at(0), output: b.at(0) });
    let spec =
        PipelineSpec { input: from, input_offset: 0, input_len: len, chunk: STEP, output: &to, output_offset: 0 };
    session.pipeline(&spec, &slots, |step| {
        kernel(step.number);
        // Longer downloads than the bounce buffers would wait for the stream.
        Ok(4096)
    })
}

#[test]
fn pipeline_fails_if_input_ends_early() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    for steps in [1, 2] {
        fs::write(&from, bytes((steps * STEP) as usize, 3)).unwrap();
        let mut session = Session::begin(leak_runtime(few_buffers(), &LinuxSyscalls), None).unwrap();
        let end = (steps - 1) * STEP + 3 * MIB;
        let mut paused = Some(PausedDevice::new());
        let done = pipeline(&mut session, &from, steps * STEP, |step| {
            if step == steps - 1 {
                // The upload of the last step is queued, and has read some chunks at most.
                File::options().write(true).open(&from).unwrap().set_len(end).unwrap();
                paused = None;
            }
        });
        let error = done.unwrap_err();
        assert_eq!(error.kind, ErrorKind::BadRange, "{error}");
        assert!(error.to_string().ends_with(&format!("it ends after {end} bytes")), "{error}");
        session.end().unwrap();
    }
}

#[test]
fn pipeline_fails_if_input_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    fs::write(&from, bytes(4 * STEP as usize, 3)).unwrap();
    // In the first step, whose slot is used again; and in the last one.
    for bad in [3 * MIB, 3 * STEP + 3 * MIB] {
        let mut session = Session::begin(leak_runtime(few_buffers(), BadBlock::new(bad)), None).unwrap();
        let error = pipeline(&mut session, &from, 4 * STEP, |_| ()).unwrap_err();
        assert_eq!(error.kind.errno(), Errno::IO, "{error}");
        session.end().unwrap();
    }
}

/// A loop device over a file, removed at the end.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path) -> Result<LoopDevice, String> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().map_err(|e| e.to_string())?;
        match made.status.success() {
            true => Ok(LoopDevice(String::from_utf8(made.stdout).unwrap().trim().to_owned())),
            false => Err(String::from_utf8_lossy(&made.stderr).trim().to_owned()),
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn async_upload_reads_block_device() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    fs::write(&image, bytes(3 << 20, 4)).unwrap();
    let disk = match LoopDevice::new(&image) {
        Ok(disk) => disk,
        Err(why) => return eprintln!("skipped: no loop device: {why}"),
    };
    let buffer = Buffer::new(4 << 20);
    let mut session = Session::begin(runtime(), None).unwrap();
    let upload = session.move_async(Path::new(&disk.0), buffer.at(0), MIB, 4 * MIB - 1, Upload, new_stream());
    assert_eq!(upload.unwrap().wait().unwrap(), 2 * MIB);
    assert!(buffer.bytes()[..2 << 20] == bytes(3 << 20, 4)[1 << 20..]);
    assert_eq!(session.end().unwrap().uploaded, 2 * MIB);
}

#[test]
fn async_upload_reads_file_without_size() {
    let device = registry::emulated().unwrap();
    let buffer = Buffer::with_bytes(&[7; 1 << 20]);
    let mut session = Session::begin(runtime(), None).unwrap();
    let queue = new_stream();
    let upload = session.move_async(Path::new("/dev/zero"), buffer.at(0), 0, MIB, Upload, queue).unwrap();
    assert_eq!(upload.wait().unwrap(), MIB);
    assert!(buffer.bytes() == [0; 1 << 20]);
    let version = fs::read("/proc/version").unwrap();
    let upload = session.move_async(Path::new("/proc/version"), buffer.at(0), 0, MIB, Upload, queue).unwrap();
    assert_eq!(upload.wait().unwrap(), version.len() as u64);
    assert!(buffer.bytes()[..version.len()] == version);
    // After the work that is queued on its stream.
    let paused = PausedDevice::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(paused);
        });
        let earlier = bytes(1 << 20, 1);
        // SAFETY: `earlier` lives until the stream is done.
        unsafe {
            device.copy_in(queue, DeviceAddr(buffer.at(0) as u64), earlier.as_ptr(), earlier.len()).unwrap();
            session.move_async(Path::new("/dev/zero"), buffer.at(0), 0, MIB, Upload, queue).unwrap();
            device.synchronize(queue, WaitMode::Block).unwrap();
        }
    });
    assert!(buffer.bytes() == [0; 1 << 20], "the upload did not wait for its stream");
    assert_eq!(session.end().unwrap().uploaded, 2 * MIB + version.len() as u64);
}
