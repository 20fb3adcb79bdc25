//! Is this address device memory?

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use spinio_sys::cuda::{CuError, Driver, MemoryType, PointerInfo};
use spinio_sys::linux::word_wiped_on_fork;

use super::contexts::{device_of, device_of_ordinal};
use super::device::Cuda;
use super::granules::Granules;
use crate::{Allocation, DeviceAddr};

static HOST: Granules = Granules::new();

/// The driver has been seen in this process.
static SEEN: AtomicBool = AtomicBool::new(false);

/// This process, or one that it was forked from, has the driver at work ...
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// ... and it is this very process: a fork leaves 0 here.
static AT_WORK_HERE: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();

#[inline]
pub(super) fn possible() -> bool {
    SEEN.load(Relaxed)
}

#[inline]
pub(super) fn find(addr: u64, want: u64) -> Option<Allocation> {
    if !possible() || HOST.is_host(addr) {
        return None;
    }
    ask(usable_driver()?, addr, want)
}

pub(super) fn find_after_fault(addr: u64, want: u64) -> Option<Allocation> {
    if addr < 4096 || Driver::loaded().is_none() {
        return None;
    }
    SEEN.store(true, Relaxed);
    HOST.forget(addr);
    ask(usable_driver()?, addr, want)
}

/// `/dev/nvidia*` is opened by the driver's initialisation and by nothing that does not use a GPU. `/dev/dxg` stands for
/// it under WSL.
pub(super) fn hint_open(path: &[u8]) {
    if !path.starts_with(b"/dev/nvidia") && path != b"/dev/dxg" {
        return;
    }
    if Driver::loaded().is_some() {
        at_work();
        SEEN.store(true, Relaxed);
    }
}

/// Our own program has started the driver.
pub(super) fn driver_started() {
    at_work();
    SEEN.store(true, Relaxed);
    crate::registry::raise();
}

fn at_work() {
    if let Some(word) = AT_WORK_HERE.get_or_init(|| word_wiped_on_fork().ok()) {
        word.store(1, Relaxed);
    }
    AT_WORK.store(true, Relaxed);
}

/// The driver, unless it is one that only the parent of this process could use.
#[inline]
fn usable_driver() -> Option<&'static Driver> {
    let driver = Driver::known()?;
    if AT_WORK.load(Relaxed)
        && let Some(Some(word)) = AT_WORK_HERE.get()
        && word.load(Relaxed) == 0
    {
        return None;
    }
    Some(driver)
}

fn ask(driver: &'static Driver, addr: u64, want: u64) -> Option<Allocation> {
    let info = match driver.pointer_info(addr) {
        Ok(info) if info.kind == MemoryType::Device => info,
        // Only these two are about the address; the others are about the driver and will change.
        Ok(_) | Err(CuError::INVALID_VALUE) => {
            HOST.remember(addr);
            return None;
        }
        Err(_) => return None,
    };
    if !AT_WORK.load(Relaxed) {
        at_work();
    }
    let device = device_for(driver, &info)?;
    allocation_of(device, &info, addr, want)
}

/// The device object of the context that is current on this thread.
pub(super) fn current() -> Option<&'static Cuda> {
    if Driver::known().is_none() && Driver::loaded().is_none() {
        return None;
    }
    let driver = usable_driver()?;
    let context = driver.current().ok().filter(|c| c.0 != 0)?;
    let ordinal = driver.current_device().ok()?;
    device_of(driver, context, ordinal)
}

/// The device object that an address belongs to.
pub(super) fn device_for(driver: &'static Driver, info: &PointerInfo) -> Option<&'static Cuda> {
    if info.context.0 != 0 {
        device_of(driver, info.context, info.ordinal)
    } else {
        device_of_ordinal(driver, info.ordinal)
    }
}

/// The allocation around `addr`, which the driver says is device memory of this device.
pub(super) fn allocation_of(device: &'static Cuda, info: &PointerInfo, addr: u64, want: u64) -> Option<Allocation> {
    if info.context.0 != 0 {
        return Some(allocation(device, info.start, info.len, info.managed));
    }
    // Of no context: a pool's, or mapped by the program. What the attributes call the range of a mapping is the
    // whole reservation, holes included; only the address range ends where the memory does.
    let _entered = device.enter().ok()?;
    let (start, mut len) = device.driver.address_range(addr).ok()?;
    let is_mapping = (info.start, info.len) != (start, len);
    let end = addr.saturating_add(want);
    while is_mapping && start + len < end {
        let next = start + len;
        // The neighbour continues the range if it is device memory of the same reservation.
        let Ok(beside) = device.driver.pointer_info(next) else { break };
        let same = beside.kind == MemoryType::Device
            && beside.context == info.context
            && beside.ordinal == info.ordinal
            && (beside.start, beside.len) == (info.start, info.len);
        match device.driver.address_range(next) {
            Ok((at, more)) if same && at == next && more > 0 => len += more,
            _ => break,
        }
    }
    Some(allocation(device, start, len, info.managed))
}

/// The allocation in terms of the registry.
fn allocation(device: &'static Cuda, start: u64, len: u64, managed: bool) -> Allocation {
    Allocation { device, start: DeviceAddr(start), len, host_mapped: managed, p2p_mapped: false }
}
