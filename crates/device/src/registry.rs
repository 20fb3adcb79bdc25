//! The registry: which device owns an address.
//!
//! ```text
//!   hook ── any()? ── no ──> the next function        one load: all that a host program pays
//!             │ yes
//!          find(addr) ── in the range table (emulated, p2pmem) ──> its device: still the same allocation?
//!             │ no
//!          cuda ── known host granule ──> host, no driver call
//!             └ any other: query the driver; only "host" is cached
//!
//!   the next function returned EFAULT ──> find_after_fault(addr): never trusts "known host"
//! ```
//!
//! So a wrong "host" costs no more than a wasted call: the Linux kernel refuses device memory.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use spinio_sys::linux::{self, SignalGuard};

use crate::emulated::{self, Emulated};
use crate::range_table::{DeviceRange, RangeTable};
use crate::{Allocation, Device, DeviceAddr, DeviceError, DeviceKind, ErrorKind, cuda, p2pmem};

/// Whether any device could own any address. It is never cleared.
static ANY_DEVICE: AtomicBool = AtomicBool::new(false);

/// The ranges of devices other than CUDA.
static RANGES: RangeTable = RangeTable::new();

/// Devices in a process, with those that have ended. A test program starts one for each of its tests.
const MAX_OWNERS: usize = 256;

/// The owners, by number.
static OWNERS: [OnceLock<&'static dyn Device>; MAX_OWNERS] = [const { OnceLock::new() }; MAX_OWNERS];
static OWNERS_USED: AtomicU32 = AtomicU32::new(0);

/// Whether any device could own any address now. One relaxed load.
#[inline]
pub fn any_device() -> bool {
    ANY_DEVICE.load(Relaxed)
}

/// Enables [`find`].
pub(crate) fn set_present() {
    ANY_DEVICE.store(true, Relaxed);
}

/// The allocation that contains `addr`, if a device owns it. No lock and no driver call for memory that is known to be
/// the host's. `want`: the number of bytes from `addr` that the caller needs.
pub fn find(addr: *const u8, wanted: usize) -> Option<Allocation> {
    if !any_device() {
        return None;
    }
    match RANGES.find(addr as u64) {
        Some(arena) => query_owner(arena, addr, wanted),
        None => cuda::find(addr, wanted),
    }
}

/// Like [`find`], but never queries the driver: GPU memory is not found, and the Linux kernel will refuse it.
pub fn find_without_driver(addr: *const u8, wanted: usize) -> Option<Allocation> {
    query_owner(RANGES.find(addr as u64)?, addr, wanted)
}

/// Like [`find`], after the Linux kernel refused the address: queries the devices, and checks whether the
/// program has loaded a driver meanwhile.
pub fn find_after_fault(addr: *const u8, wanted: usize) -> Option<Allocation> {
    if let Some(arena) = RANGES.find(addr as u64) {
        return query_owner(arena, addr, wanted);
    }
    let found = cuda::find_after_fault(addr, wanted);
    if found.is_some() {
        set_present();
    }
    found
}

/// [`find`], and if it finds none, the devices themselves are queried before the address counts as the host's: for
/// calls that say that it is device memory.
pub fn find_or_query(addr: *const u8, wanted: usize) -> Option<Allocation> {
    find(addr, wanted).or_else(|| find_after_fault(addr, wanted))
}

/// From here on a query holds the program's signals: a handler that left it by `longjmp` would leave a lock of the driver locked.
/// Handlers of large reads run at their end (host/src/held_signals.rs); in short ones two more system calls are too many.
const HOLDS_SIGNALS_FROM: u64 = 64 << 10;

/// Held while a query lives.
pub(crate) fn hold_signals(wanted: u64) -> Option<SignalGuard> {
    (wanted > HOLDS_SIGNALS_FROM && !linux::holds_signals()).then(SignalGuard::block_asynchronous)
}

fn query_owner(arena: DeviceRange, addr: *const u8, wanted: usize) -> Option<Allocation> {
    let _held = hold_signals(wanted as u64);
    OWNERS.get(arena.owner as usize)?.get()?.allocation(DeviceAddr(addr as u64), wanted as u64)
}

/// The program opened a path: an early hint that a driver is in use (`/dev/nvidia...`).
pub fn hint_open(path: &[u8]) {
    cuda::hint_open(path);
    if !any_device() && cuda::is_possible() {
        set_present();
    }
}

/// The first emulated device of this process; created now if necessary.
pub fn emulated() -> Result<&'static Emulated, DeviceError> {
    emulated::device(0)
}

/// The default device of a program: that of the CUDA context that is current on this thread, else the
/// emulated one that this thread uses, if it is in use.
pub fn current_device() -> Option<&'static dyn Device> {
    if let Some(device) = cuda::current_device() {
        return Some(device);
    }
    emulated::current_in_use().map(|d| d as &'static dyn Device)
}

/// Allocates device memory, for programs without an allocator, and for SPIN's own programs: on CUDA it loads the
/// driver. `host_mapped` requests memory that the CPU can store to.
pub fn alloc(kind: DeviceKind, ordinal: u32, len: usize, host_mapped: bool) -> Result<DeviceAddr, DeviceError> {
    match kind {
        DeviceKind::Emulated => emulated::device(ordinal)?.alloc(len, host_mapped),
        DeviceKind::P2pmem => p2pmem::alloc(ordinal, len),
        DeviceKind::Cuda => cuda::standalone::alloc(ordinal, len),
    }
}

/// The device of an identity ([`crate::SharedMemory::uuid`]), for SPIN's own programs: on CUDA it loads the driver and
/// makes a context.
pub fn with_uuid(uuid: [u8; 16]) -> Result<&'static dyn Device, DeviceError> {
    match emulated::ordinal_of(uuid) {
        Some(ordinal) => emulated::device(ordinal).map(|device| device as &'static dyn Device),
        None => cuda::standalone::open_uuid(uuid),
    }
}

/// Frees memory of [`alloc`], after everything enqueued on it is done.
pub fn free(addr: DeviceAddr) -> Result<(), DeviceError> {
    let unknown = DeviceError::new(ErrorKind::BadAddress, "free");
    let Some(arena) = RANGES.find(addr.0) else { return cuda::standalone::free(addr) };
    let owner = OWNERS.get(arena.owner as usize).and_then(OnceLock::get).ok_or(unknown)?;
    match owner.id().kind {
        DeviceKind::Emulated => emulated::with_id(owner.id()).ok_or(unknown)?.free(addr),
        DeviceKind::P2pmem => p2pmem::free(addr),
        DeviceKind::Cuda => Err(unknown),
    }
}

/// The program mapped memory itself. If it is memory of a [`p2pmem`] provider, it is a device buffer from now on.
/// Slow: only for mappings that look like one (the opened path ends in `/p2pmem/allocate`).
pub fn register_mapping(addr: *const u8, len: usize) {
    p2pmem::register_mapping(addr as u64, len as u64);
}

/// The program unmapped a range, or mapped over it. Two loads where no device has memory near it.
#[inline]
pub fn unregister_mapping(addr: *const u8, len: usize) {
    if any_device() && RANGES.overlaps(addr as u64, len as u64) {
        p2pmem::unregister_mapping(addr as u64, len as u64);
    }
}

/// Creates a device and assigns the number of its ranges.
pub(crate) fn add_owner<D: Device>(make: impl FnOnce(u32) -> &'static D) -> Result<&'static D, DeviceError> {
    let owner = OWNERS_USED.fetch_add(1, Relaxed);
    let slot = OWNERS.get(owner as usize).ok_or(DeviceError::new(ErrorKind::NoMemory, "table of devices"))?;
    let device = make(owner);
    let _ = slot.set(device);
    Ok(device)
}

/// Adds a range of a device.
pub(crate) fn add_range(owner: u32, start: DeviceAddr, len: u64) -> Result<(), DeviceError> {
    if !RANGES.add(DeviceRange { start: start.0, len, owner }) {
        return Err(DeviceError::new(ErrorKind::NoMemory, "table of device ranges"));
    }
    set_present();
    Ok(())
}

/// The range that contains an address, if it is the owner's.
pub(crate) fn range_of(owner: u32, addr: DeviceAddr) -> Option<(DeviceAddr, u64)> {
    let arena = RANGES.find(addr.0).filter(|a| a.owner == owner)?;
    Some((DeviceAddr(arena.start), arena.len))
}

/// Removes a range, or a part of one, of the given owners.
pub(crate) fn remove_range(start: DeviceAddr, len: u64, is_owner: impl Fn(u32) -> bool) {
    RANGES.remove(start.0, len, is_owner);
}
