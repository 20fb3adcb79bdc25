//! PCI memory that the Linux kernel publishes for peer-to-peer DMA: an NVMe controller's memory buffer, or the BAR of
//! any device whose driver publishes it.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:03:00.0/p2pmem/{size,available,published,allocate}
//!                                                                    └ mmap: the memory itself
//! ```
//!
//! It has no engine: the CPU stores into it, and a storage device can DMA into it. So copies are done when the call
//! returns, every fence is reached, and there is nothing to pin.
//!
//! **Only published memory.** The Linux kernel lets `allocate` be mapped whatever `published` is. On a machine set up
//! for GPUDirect by P2PDMA the NVIDIA driver lists its GPU as a provider that is not published, whose pool is all of
//! video memory, in use: a mapping of it belongs to running programs. So nothing is allocated from a provider that is
//! not published, and a mapping of one is never treated as a device buffer.
//!
//! A program may map `allocate` itself; the `mmap` hook reports it, and the mapping is a device buffer like any other.
//!
//! Known flaws: a copy into memory that the program unmaps meanwhile faults, as its own store would; a mapping made
//! without the hooks is treated as host memory, which is correct but slower.

#![expect(unsafe_code, reason = "driver calls and device memory")]

mod nontemporal;
mod providers;

use std::ffi::{CString, c_void};
use std::sync::{Mutex, PoisonError, mpsc};

use spinio_sys::Errno;
use spinio_sys::linux::{self, FdTableRoot, PAGE};

use self::nontemporal::nontemporal_copy;
pub use self::providers::Provider;
use self::providers::{provider_at, providers_under};
use crate::host_memory::{HostMemoryPool, READ_WRITE, system_error};
use crate::{
    Allocation, AppStream, Capabilities, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence, Pin,
    PinnedBuffer, StreamId, WaitMode, registry,
};

type Result<T> = core::result::Result<T, DeviceError>;

const ROOT: &str = "/sys/bus/pci/devices";
const O_RDWR: i32 = 2;

/// One provider as a device.
#[derive(Debug)]
struct P2pmem {
    address: String,
    ordinal: u32,
    owner: u32,
    pinned: HostMemoryPool,
}

/// The devices created so far, by PCI address.
static DEVICES: Mutex<Vec<&'static P2pmem>> = Mutex::new(Vec::new());

/// The providers of this machine, in the order of their PCI addresses; a device's ordinal is the index.
pub fn providers() -> Vec<Provider> {
    run_in_shadow_table(|| providers_under(ROOT)).unwrap_or_default()
}

/// Allocates memory of a provider.
pub(crate) fn alloc(ordinal: u32, len: usize) -> Result<DeviceAddr> {
    alloc_under(ROOT, ordinal, len)
}

fn alloc_under(root: &'static str, ordinal: u32, len: usize) -> Result<DeviceAddr> {
    let none = DeviceError::new(ErrorKind::Unsupported, "allocation: no such p2pmem provider");
    if len == 0 {
        return Err(DeviceError::new(ErrorKind::Unsupported, "allocation of 0 bytes"));
    }
    let (provider, start) = run_in_shadow_table(move || {
        let provider = providers_under(root).into_iter().nth(ordinal as usize).ok_or(none)?;
        if !provider.published {
            return Err(DeviceError::new(ErrorKind::Unsupported, "allocation: this p2pmem provider is not published"));
        }
        let path = format!("{root}/{}/p2pmem/allocate", provider.address);
        Ok((provider, map(&path, len)?))
    })??;
    let known = device(&provider.address, ordinal).and_then(|d| registry::add_range(d.owner, start, len as u64));
    if let Err(e) = known {
        unmap(start, len as u64);
        return Err(e);
    }
    Ok(start)
}

/// Unmaps memory of [`alloc`].
pub(crate) fn free(addr: DeviceAddr) -> Result<()> {
    let unknown = DeviceError::new(ErrorKind::BadAddress, "free of p2pmem");
    let owners: Vec<u32> = devices().iter().map(|d| d.owner).collect();
    let range = owners.into_iter().find_map(|owner| registry::range_of(owner, addr));
    let (start, len) = range.filter(|&(start, _)| start == addr).ok_or(unknown)?;
    registry::remove_range(start, len, |_| true);
    unmap(start, len);
    Ok(())
}

/// The program mapped a range: if it is p2pmem, it is a device buffer from now on.
pub(crate) fn register_mapping(addr: u64, len: u64) {
    note_under(ROOT, addr, len);
}

fn note_under(root: &'static str, addr: u64, len: u64) {
    let Ok(Some(address)) = run_in_shadow_table(move || provider_at(addr)) else { return };
    let Ok(all) = run_in_shadow_table(|| providers_under(root)) else { return };
    // One that is not published is its driver's own memory, whichever process maps it: never a device buffer.
    let Some(ordinal) = all.iter().position(|p| p.address == address && p.published) else { return };
    let Ok(device) = device(&address, ordinal as u32) else { return };
    let _ = registry::add_range(device.owner, DeviceAddr(addr), len.next_multiple_of(PAGE as u64));
}

/// A range of addresses has another meaning now.
pub(crate) fn unregister_mapping(addr: u64, len: u64) {
    let owners: Vec<u32> = devices().iter().map(|d| d.owner).collect();
    registry::remove_range(DeviceAddr(addr), len.next_multiple_of(PAGE as u64), |owner| owners.contains(&owner));
}

fn devices() -> std::sync::MutexGuard<'static, Vec<&'static P2pmem>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device(address: &str, ordinal: u32) -> Result<&'static P2pmem> {
    let mut devices = devices();
    if let Some(device) = devices.iter().find(|d| d.address == address) {
        return Ok(device);
    }
    let device = registry::add_owner(|owner| {
        let device: &'static P2pmem = Box::leak(Box::new(P2pmem {
            address: address.to_owned(),
            ordinal,
            owner,
            pinned: HostMemoryPool::default(),
        }));
        device
    })?;
    devices.push(device);
    Ok(device)
}

/// Runs code that opens descriptors on a thread with an unshared fd table.
fn run_in_shadow_table<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let failed = DeviceError::new(ErrorKind::Driver, "shadow thread for p2pmem");
    let root = FdTableRoot::new().map_err(|_| failed)?;
    let (answer, result) = mpsc::channel();
    root.spawn("spinio-p2pmem", move || drop(answer.send(body())));
    result.recv().map_err(|_| failed)
}

fn map(path: &str, len: usize) -> Result<DeviceAddr> {
    let path = CString::new(path).map_err(|_| system_error("open of p2pmem/allocate", Errno::INVAL))?;
    let fd = linux::open(&path, O_RDWR, 0).map_err(|e| system_error("open of p2pmem/allocate", e))?;
    let len = len.next_multiple_of(PAGE);
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let mapped = unsafe { linux::mmap(core::ptr::null_mut(), len, READ_WRITE, linux::MAP_SHARED, fd, 0) };
    let _ = linux::close(fd);
    mapped.map(|at| DeviceAddr(at as u64)).map_err(|e| system_error("mmap of p2pmem/allocate", e))
}

fn unmap(start: DeviceAddr, len: u64) {
    // SAFETY: the mapping was p2pmem of SPIN or of the program, and it is being freed.
    let _ = unsafe { linux::munmap(start.0 as *mut u8, (len as usize).next_multiple_of(PAGE)) };
}

impl P2pmem {
    fn check(&self, addr: DeviceAddr, len: usize, operation: &'static str) -> Result<()> {
        let inside =
            registry::range_of(self.owner, addr).is_some_and(|(start, range)| start.0 + range - addr.0 >= len as u64);
        if inside { Ok(()) } else { Err(DeviceError::new(ErrorKind::BadAddress, operation)) }
    }
}

impl Device for P2pmem {
    fn id(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::P2pmem, ordinal: self.ordinal }
    }

    fn describe(&self) -> String {
        format!("PCI memory of {}, published for peer-to-peer", self.address)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { can_pin: false, has_dma_engine: false, max_pin: 0, can_gather: false }
    }

    fn allocation(&'static self, addr: DeviceAddr, _wanted: u64) -> Option<Allocation> {
        let (start, len) = registry::range_of(self.owner, addr)?;
        let page = addr.0 & !(PAGE as u64 - 1);
        let mut resident = [0u8];
        // SAFETY: queries whether the page is mapped.
        if unsafe { linux::mincore(page as *const u8, &mut resident) } == Err(Errno::NOMEM) {
            // Unmapped without the hooks.
            unregister_mapping(start.0, len);
            return None;
        }
        Some(Allocation { device: self, start, len, host_mapped: true, p2p_mapped: true })
    }

    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer> {
        self.pinned.acquire(len)
    }

    fn free_pinned(&self, memory: PinnedBuffer) {
        self.pinned.release(memory);
    }

    fn app_stream(&self) -> AppStream {
        AppStream::Named(StreamId(0))
    }

    fn acquire_stream(&self) -> Result<StreamId> {
        Ok(StreamId(0))
    }

    fn release_stream(&self, _stream: StreamId) {}

    unsafe fn copy_in(&self, _stream: StreamId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        self.check(dst, len, "copy to p2pmem")?;
        // SAFETY: the caller guarantees `src`; `dst` is in a live mapping.
        unsafe { nontemporal_copy(dst.0 as *mut u8, src, len) };
        Ok(())
    }

    unsafe fn copy_out(&self, _stream: StreamId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        self.check(src, len, "copy from p2pmem")?;
        // SAFETY: as for copy_in, the other way round.
        unsafe { nontemporal_copy(dst, src.0 as *const u8, len) };
        Ok(())
    }

    fn fence(&self, _stream: StreamId) -> Result<Fence> {
        Ok(Fence(0))
    }

    fn wait_event(&self, _stream: StreamId, _fence: &Fence) -> Result<()> {
        Ok(())
    }

    fn query(&self, _fence: &Fence) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _fence: &Fence, _how: WaitMode) -> Result<()> {
        Ok(())
    }

    fn release_fence(&self, _fence: Fence) {}

    fn synchronize(&self, _stream: StreamId, _how: WaitMode) -> Result<()> {
        Ok(())
    }

    unsafe fn launch_host_func(
        &self,
        _stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        // All enqueued work is done.
        // SAFETY: guaranteed by the caller.
        unsafe { function(argument) };
        Ok(())
    }

    unsafe fn pin(&self, _ptr: *const u8, _len: usize) -> Result<Pin> {
        Err(DeviceError::new(ErrorKind::Unsupported, "pin for p2pmem"))
    }

    unsafe fn copy_pinned(&self, _: StreamId, _: DeviceAddr, _: &Pin, _: usize, _: usize) -> Result<()> {
        Err(DeviceError::new(ErrorKind::Unsupported, "pin for p2pmem"))
    }

    fn unpin(&self, _pin: Pin) {}
}

#[cfg(test)]
mod tests;
