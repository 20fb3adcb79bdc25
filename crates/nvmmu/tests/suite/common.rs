//! Device memory and bytes for the tests of this directory.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::c_void;
use std::sync::OnceLock;

use spinio_device::{DeviceAddr, DeviceKind, registry};
use spinio_io::{Runtime, Settings, Target};

/// One runtime for the tests of a process.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new(Settings::default()))
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

/// Limits the length of files while it lives; for the whole process, whose other tests write no such files.
pub(crate) struct FileSizeLimit {
    previous: libc::rlimit,
}

impl FileSizeLimit {
    pub(crate) fn set(bytes: u64) -> FileSizeLimit {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `before` lives across the call.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) }, 0);
        let limit = libc::rlimit { rlim_cur: bytes, ..before };
        // SAFETY: `limit` lives across the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        FileSizeLimit { previous: before }
    }
}

impl Drop for FileSizeLimit {
    fn drop(&mut self) {
        // SAFETY: `before` lives across the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const self.previous) }, 0);
    }
}
