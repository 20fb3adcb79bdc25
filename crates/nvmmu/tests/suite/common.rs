//! Device memory and bytes for the tests of this directory.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use spinio_device::{DeviceAddr, DeviceKind, StreamId, registry};
use spinio_io::kernel::Syscalls;
use spinio_io::{Runtime, Settings, Target};

/// One runtime for the tests of a process.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new(Settings::default()))
}

/// A runtime over another kernel. It is never freed, as a session needs it.
pub(crate) fn leak_runtime(settings: Settings, kernel: &'static dyn Syscalls) -> &'static Runtime {
    Box::leak(Box::new(Runtime::with_kernel(settings, kernel)))
}

/// A new stream of the emulated device.
pub(crate) fn new_stream() -> StreamId {
    registry::emulated().unwrap().new_stream().unwrap()
}

/// The emulated device, stopped until this is dropped, also by a failed assertion: other tests use it too.
pub(crate) struct PausedDevice;

impl PausedDevice {
    pub(crate) fn new() -> PausedDevice {
        registry::emulated().unwrap().pause();
        PausedDevice
    }
}

impl Drop for PausedDevice {
    fn drop(&mut self) {
        registry::emulated().unwrap().resume();
    }
}

/// Memory of the emulated device, freed at the end.
pub(crate) struct Buffer {
    target: Target,
    len: usize,
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Buffer {
        let addr = registry::alloc(DeviceKind::Emulated, 0, len, false).unwrap();
        Buffer { target: Target { allocation: registry::find(addr.0 as *const u8, len).unwrap(), addr }, len }
    }

    pub(crate) fn with_bytes(bytes: &[u8]) -> Buffer {
        let buffer = Buffer::new(bytes.len());
        runtime().put(buffer.target, bytes).unwrap();
        buffer
    }

    pub(crate) fn at(&self, offset: u64) -> *mut c_void {
        (self.target.addr.0 + offset) as *mut c_void
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        runtime().fetch(self.target, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        registry::free(DeviceAddr(self.target.addr.0)).unwrap();
    }
}

/// Bytes that depend on the offset and on the seed.
pub(crate) fn bytes(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i * 2654435761 + seed * 40503) >> 7) as u8 ^ i as u8).collect()
}

/// Limits the length of files while it lives; for the whole process, so one test at a time has a limit, and other tests
/// write no such files.
pub(crate) struct FileSizeLimit {
    previous: libc::rlimit,
    _only_one: MutexGuard<'static, ()>,
}

impl FileSizeLimit {
    pub(crate) fn set(bytes: u64) -> FileSizeLimit {
        static ONLY_ONE: Mutex<()> = Mutex::new(());
        let only_one = ONLY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `before` lives across the call.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) }, 0);
        let limit = libc::rlimit { rlim_cur: bytes, ..before };
        // SAFETY: `limit` lives across the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        FileSizeLimit { previous: before, _only_one: only_one }
    }
}

impl Drop for FileSizeLimit {
    fn drop(&mut self) {
        // SAFETY: `before` lives across the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const self.previous) }, 0);
    }
}
