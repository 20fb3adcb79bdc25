//! Looks up whether an address is device memory.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use spinio_sys::cuda::{CuError, Driver, MemoryType, PointerInfo};
use spinio_sys::linux::wipe_on_fork_word;

use super::contexts::{device_of_context, device_of_ordinal};
use super::device::Cuda;
use super::host_page_cache::HostPageCache;
use crate::{Allocation, DeviceAddr};

static HOST_PAGES: HostPageCache = HostPageCache::new();

/// The driver has been found in this process.
static DRIVER_SEEN: AtomicBool = AtomicBool::new(false);

/// This process, or one that it was forked from, uses the driver ...
static DRIVER_ACTIVE: AtomicBool = AtomicBool::new(false);

/// ... and it is this very process: a fork leaves 0 here.
static DRIVER_ACTIVE_HERE: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();

#[inline]
pub(super) fn is_possible() -> bool {
    DRIVER_SEEN.load(Relaxed)
}

#[inline]
pub(super) fn find(addr: u64, wanted: u64) -> Option<Allocation> {
    if !is_possible() || HOST_PAGES.contains(addr) {
        return None;
    }
    query_driver(usable_driver()?, addr, wanted)
}

pub(super) fn find_after_fault(addr: u64, wanted: u64) -> Option<Allocation> {
    if addr < 4096 || Driver::loaded().is_none() {
        return None;
    }
    DRIVER_SEEN.store(true, Relaxed);
    HOST_PAGES.remove(addr);
    query_driver(usable_driver()?, addr, wanted)
}

/// `/dev/nvidia*` is opened by the driver's initialisation and by nothing that does not use a GPU. Under WSL it is
/// `/dev/dxg`.
pub(super) fn hint_open(path: &[u8]) {
    if !path.starts_with(b"/dev/nvidia") && path != b"/dev/dxg" {
        return;
    }
    if Driver::loaded().is_some() {
        mark_driver_active();
        DRIVER_SEEN.store(true, Relaxed);
    }
}

/// SPIN's own program has started the driver.
pub(super) fn driver_started() {
    mark_driver_active();
    DRIVER_SEEN.store(true, Relaxed);
    crate::registry::set_present();
}

fn mark_driver_active() {
    if let Some(word) = DRIVER_ACTIVE_HERE.get_or_init(|| wipe_on_fork_word().ok()) {
        word.store(1, Relaxed);
    }
    DRIVER_ACTIVE.store(true, Relaxed);
}

/// The driver, unless only the parent of this process could use it.
#[inline]
fn usable_driver() -> Option<&'static Driver> {
    let driver = Driver::cached()?;
    if DRIVER_ACTIVE.load(Relaxed)
        && let Some(Some(word)) = DRIVER_ACTIVE_HERE.get()
        && word.load(Relaxed) == 0
    {
        return None;
    }
    Some(driver)
}

fn query_driver(driver: &'static Driver, addr: u64, wanted: u64) -> Option<Allocation> {
    let _held = crate::registry::hold_signals(wanted);
    let info = match driver.pointer_info(addr) {
        Ok(info) if info.kind == MemoryType::Device => info,
        // Only these two are about the address; the others are about the driver and will change.
        Ok(_) | Err(CuError::INVALID_VALUE) => {
            HOST_PAGES.insert(addr);
            return None;
        }
        Err(_) => return None,
    };
    if !DRIVER_ACTIVE.load(Relaxed) {
        mark_driver_active();
    }
    let device = device_for(driver, &info)?;
    allocation_of(device, &info, addr, wanted)
}

/// The device object of the context that is current on this thread.
pub(super) fn current() -> Option<&'static Cuda> {
    if Driver::cached().is_none() && Driver::loaded().is_none() {
        return None;
    }
    let driver = usable_driver()?;
    let context = driver.current().ok().filter(|c| c.0 != 0)?;
    let ordinal = driver.current_device().ok()?;
    device_of_context(driver, context, ordinal)
}

/// The device object that an address belongs to.
pub(super) fn device_for(driver: &'static Driver, info: &PointerInfo) -> Option<&'static Cuda> {
    if info.context.0 != 0 {
        device_of_context(driver, info.context, info.ordinal)
    } else {
        device_of_ordinal(driver, info.ordinal)
    }
}

/// The allocation around `addr`, which the driver reports as device memory of this device.
pub(super) fn allocation_of(device: &'static Cuda, info: &PointerInfo, addr: u64, wanted: u64) -> Option<Allocation> {
    if info.context.0 != 0 {
        return Some(allocation(device, info.start, info.len, info.managed));
    }
    // Of no context: a pool's, or mapped by the program. For a mapping the attributes report the
    // whole reservation, holes included; only the address range ends at the end of the memory.
    let _entered = device.enter().ok()?;
    let (start, mut len) = device.driver.address_range(addr).ok()?;
    let is_mapping = (info.start, info.len) != (start, len);
    let end = addr.saturating_add(wanted);
    while is_mapping && start + len < end {
        let next = start + len;
        // The neighbour continues the range if it is device memory of the same reservation.
        let Ok(adjacent) = device.driver.pointer_info(next) else { break };
        let same = adjacent.kind == MemoryType::Device
            && adjacent.context == info.context
            && adjacent.ordinal == info.ordinal
            && (adjacent.start, adjacent.len) == (info.start, info.len);
        match device.driver.address_range(next) {
            Ok((at, more)) if same && at == next && more > 0 => len += more,
            _ => break,
        }
    }
    Some(allocation(device, start, len, info.managed))
}

/// Converts to the registry's allocation.
fn allocation(device: &'static Cuda, start: u64, len: u64, managed: bool) -> Allocation {
    Allocation { device, start: DeviceAddr(start), len, host_mapped: managed, p2p_mapped: false }
}
