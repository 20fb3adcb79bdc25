//! Device memory: of the p2pmem device, mapped by hand or allocated by SPIN, and of the emulated device.
//!
//! The contents of p2pmem memory are always read by CPU loads, not by SPIN's own copies, so that SPIN does not check
//! itself. The emulated device's memory is accessible through its copies alone, like a GPU's.
//! Only this file has unsafe code: mappings, and system calls into them.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::OnceLock;

use linux_raw_sys::general as k;
use spinio_device::emulated::Emulated;
use spinio_device::{Device, DeviceAddr, DeviceKind, StreamId, WaitMode, registry};
use spinio_gaia::{Access, Map};
use spinio_io::Target;
use spinio_sys::Errno;
use spinio_sys::linux;
use spinio_testkit::Buffer;

use crate::case::CaseError;

/// The destination and source of SPIN's requests.
pub(crate) trait Memory {
    /// The address of byte `at` for a request.
    fn target(&self, at: usize) -> Result<Target, CaseError>;

    /// A copy of `len` bytes from `at`.
    fn bytes(&self, at: usize, len: usize) -> Vec<u8>;

    /// Stores bytes.
    fn put(&mut self, at: usize, bytes: &[u8]);

    /// Fills a part of it.
    fn fill_range(&mut self, at: usize, len: usize, byte: u8) {
        self.put(at, &vec![byte; len]);
    }
}

/// Memory of the emulated device: neither the CPU nor a system call can access it, and no storage can DMA into it.
pub(crate) struct EmulatedMemory(&'static Emulated, Buffer);

impl EmulatedMemory {
    /// `len` bytes.
    pub(crate) fn allocate(len: usize) -> EmulatedMemory {
        static DEVICE: OnceLock<&'static Emulated> = OnceLock::new();
        let device = *DEVICE.get_or_init(|| spinio_testkit::buffer::emulated("size=128M"));
        EmulatedMemory(device, Buffer::new(device, len))
    }
}

impl Memory for EmulatedMemory {
    fn target(&self, at: usize) -> Result<Target, CaseError> {
        Ok(self.1.target(at))
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.1.range_bytes(at..at + len)
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.1.len());
        let queue = self.0.app_stream().id();
        let to = self.1.addr().offset(at as u64);
        // SAFETY: `bytes` lives until the drain returns.
        unsafe { self.0.copy_in(queue, to, bytes.as_ptr(), bytes.len()) }.expect("copy in");
        self.0.synchronize(queue, WaitMode::Block).expect("drain");
    }
}

/// Memory of a GAIA map on the emulated device.
pub(crate) struct MapMemory {
    device: &'static Emulated,
    pub(crate) map: Map,
}

impl MapMemory {
    /// The first `len` bytes of a file below a GAIA mount.
    pub(crate) fn of(file: &fs::File, len: usize) -> Result<MapMemory, spinio_gaia::Error> {
        static DEVICE: OnceLock<&'static Emulated> = OnceLock::new();
        let device = *DEVICE.get_or_init(|| spinio_testkit::buffer::emulated("size=16M"));
        let map = Map::new(file.as_raw_fd(), 0, len as u64, Access::Write, device)?;
        Ok(MapMemory { device, map })
    }

    /// A copy of `len` bytes from the start, as a kernel would load them.
    pub(crate) fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = DeviceAddr(self.map.address());
        // SAFETY: `bytes` lives until the device was synchronized.
        unsafe { self.device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, len) }.expect("copy out");
        self.device.synchronize(StreamId(0), WaitMode::Block).expect("drain");
        bytes
    }

    /// Stores bytes, as a kernel would.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        let to = DeviceAddr(self.map.address() + at as u64);
        // SAFETY: as above.
        unsafe { self.device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.expect("copy in");
        self.device.synchronize(StreamId(0), WaitMode::Block).expect("drain");
    }
}

/// Host-mapped device memory.
pub(crate) struct P2pMemory {
    start: *mut u8,
    len: usize,
    owner: Owner,
}

/// The origin of the memory, for freeing it.
#[derive(PartialEq, Eq)]
enum Owner {
    Case,
    Registry,
}

impl P2pMemory {
    /// `len` bytes from the first device that publishes its memory.
    pub(crate) fn allocate(len: usize) -> Result<P2pMemory, CaseError> {
        let path = allocator()?;
        let file = fs::OpenOptions::new().read(true).write(true).open(&path)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            linux::mmap(std::ptr::null_mut(), len, k::PROT_READ | k::PROT_WRITE, k::MAP_SHARED, file.as_raw_fd(), 0)
        }?;
        Ok(P2pMemory { start, len, owner: Owner::Case })
    }

    /// `len` bytes from SPIN's registry: a device buffer.
    pub(crate) fn of_spin(len: usize) -> Result<P2pMemory, CaseError> {
        let addr = registry::alloc(DeviceKind::P2pmem, 0, len, true).map_err(|e| CaseError::Failed(e.to_string()))?;
        Ok(P2pMemory { start: addr.0 as *mut u8, len, owner: Owner::Registry })
    }

    /// Fills all of it by CPU stores.
    pub(crate) fn fill(&mut self, byte: u8) {
        self.fill_range(0, self.len, byte);
    }

    /// `pread` into it, from the page cache or from storage.
    pub(crate) fn pread(&mut self, fd: RawFd, at: usize, len: usize, offset: u64) -> Result<usize, Errno> {
        assert!(at + len <= self.len);
        // SAFETY: the range is ours to write.
        unsafe { linux::pread(fd, self.start.add(at), len, offset) }
    }

    /// `pwrite` from it.
    pub(crate) fn pwrite(&self, fd: RawFd, at: usize, len: usize, offset: u64) -> Result<usize, Errno> {
        assert!(at + len <= self.len);
        // SAFETY: the range is readable.
        unsafe { linux::pwrite(fd, self.start.add(at), len, offset) }
    }
}

impl Memory for P2pMemory {
    fn target(&self, at: usize) -> Result<Target, CaseError> {
        let addr = DeviceAddr(self.start as u64 + at as u64);
        let allocation = registry::find(addr.0 as *const u8, self.len - at)
            .ok_or_else(|| CaseError::Failed("the registry does not find its own memory".to_owned()))?;
        Ok(Target { allocation, addr })
    }

    fn fill_range(&mut self, at: usize, len: usize, byte: u8) {
        assert!(at + len <= self.len);
        // SAFETY: within the mapping, and `self` is borrowed exclusively.
        unsafe { std::ptr::write_bytes(self.start.add(at), byte, len) };
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        // SAFETY: within the mapping, as just checked; no writer is active.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }.to_vec()
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: within the mapping, and `bytes` does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }
}

impl Drop for P2pMemory {
    fn drop(&mut self) {
        if self.owner == Owner::Registry {
            let _ = registry::free(DeviceAddr(self.start as u64));
            return;
        }
        // SAFETY: the mapping is ours and no reference into it lives.
        let _ = unsafe { linux::munmap(self.start, self.len) };
    }
}

/// Whether this machine publishes device memory.
pub(crate) fn has_p2p() -> bool {
    allocator().is_ok()
}

/// The file whose mappings are device memory.
pub(crate) fn allocator() -> Result<PathBuf, CaseError> {
    for device in fs::read_dir("/sys/bus/pci/devices")? {
        let path = device?.path().join("p2pmem/allocate");
        if path.exists() {
            return Ok(path);
        }
    }
    Err(CaseError::Failed("no device publishes peer-to-peer memory".to_owned()))
}

/// A page of a file, stored to through a shared mapping and left dirty.
pub(crate) fn store_through_mapping(file: &fs::File, page: u64, bytes: &[u8]) -> Result<(), CaseError> {
    assert!(bytes.len() <= linux::PAGE);
    // SAFETY: a new mapping replaces nothing; the store stays within it and it is removed again.
    unsafe {
        let at = linux::mmap(
            std::ptr::null_mut(),
            linux::PAGE,
            k::PROT_READ | k::PROT_WRITE,
            k::MAP_SHARED,
            file.as_raw_fd(),
            page * linux::PAGE as u64,
        )?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
        linux::munmap(at, linux::PAGE)?;
    }
    Ok(())
}
