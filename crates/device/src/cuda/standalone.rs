//! A GPU for SPIN's own programs: the command has no host program that provides a context.
//!
//! The library uses only [`count`], for a program that opens a net, has no context and names no device. Else it loads no driver and
//! initialises none, and it never creates a context.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::sync::{Mutex, PoisonError};

use spinio_sys::cuda::{CuError, Driver, LoadError};

use super::contexts::device_of_context;
use super::lookup;
use crate::{Device, DeviceAddr, DeviceError, ErrorKind};

/// Why no GPU is available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuError {
    /// There is no driver.
    NoDriver(LoadError),
    /// The driver refused; call and reason.
    Driver(&'static str, CuError),
}

impl std::fmt::Display for GpuError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            GpuError::NoDriver(why) => write!(f, "{why}"),
            GpuError::Driver(call, why) => write!(f, "The CUDA driver refused {call}: {why}"),
        }
    }
}

impl std::error::Error for GpuError {}

/// Number of GPUs; loads and initialises the driver.
pub fn count() -> Result<u32, GpuError> {
    let driver = init_driver()?;
    driver.device_count().map(|n| n.max(0) as u32).map_err(|e| GpuError::Driver("cuDeviceGetCount", e))
}

/// A GPU with its primary context, which stays for the life of the process.
pub fn open(ordinal: u32) -> Result<&'static dyn Device, GpuError> {
    let driver = init_driver()?;
    let device = driver.device(ordinal as i32).map_err(|e| GpuError::Driver("cuDeviceGet", e))?;
    let context = driver.primary_retain(device).map_err(|e| GpuError::Driver("cuDevicePrimaryCtxRetain", e))?;
    let made = device_of_context(driver, context, ordinal as i32);
    made.map(|d| d as &'static dyn Device).ok_or(GpuError::Driver("its context", CuError::INVALID_CONTEXT))
}

/// [`open`] of the GPU with this UUID.
pub(crate) fn open_uuid(uuid: [u8; 16]) -> Result<&'static dyn Device, DeviceError> {
    let count = count().map_err(|e| unavailable(&e))?;
    let driver = init_driver().map_err(|e| unavailable(&e))?;
    let has_uuid = |ordinal: &u32| {
        let device = driver.device(*ordinal as i32);
        device.and_then(|device| driver.device_uuid(device)) == Ok(uuid)
    };
    let unknown = DeviceError::new(ErrorKind::Unsupported, "search for a GPU by its UUID");
    let ordinal = (0..count).find(has_uuid).ok_or(unknown)?;
    open(ordinal).map_err(|e| unavailable(&e))
}

fn unavailable(error: &GpuError) -> DeviceError {
    match *error {
        GpuError::NoDriver(_) => DeviceError::new(ErrorKind::Unsupported, "loading the CUDA driver"),
        GpuError::Driver(operation, code) => DeviceError { kind: ErrorKind::Unsupported, operation, code: code.0 },
    }
}

/// The allocations, with their GPUs.
static ALLOCATED: Mutex<Vec<(u64, u32)>> = Mutex::new(Vec::new());

/// Allocates GPU memory; loads the driver if necessary.
pub(crate) fn alloc(ordinal: u32, len: usize) -> Result<DeviceAddr, DeviceError> {
    let error = |kind, operation, code: CuError| DeviceError { kind, operation, code: code.0 };
    open(ordinal).map_err(|e| unavailable(&e))?;
    let addr =
        with_primary_context(ordinal, |d| d.alloc(len).map_err(|e| error(ErrorKind::NoMemory, "cuMemAlloc", e)))?;
    ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner).push((addr, ordinal));
    Ok(DeviceAddr(addr))
}

/// Frees memory of [`alloc`], after all work enqueued on it is done.
pub(crate) fn free(addr: DeviceAddr) -> Result<(), DeviceError> {
    let mut allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = allocated.iter().position(|a| a.0 == addr.0);
    let (_, ordinal) = allocated.swap_remove(at.ok_or(DeviceError::new(ErrorKind::BadAddress, "free"))?);
    drop(allocated);
    let refused = |e: CuError| DeviceError { kind: ErrorKind::Driver, operation: "cuMemFree", code: e.0 };
    // SAFETY: allocated above and removed from the list, so it is freed once; the caller no longer uses it.
    with_primary_context(ordinal, |d| unsafe { d.free(addr.0) }.map_err(refused))
}

fn init_driver() -> Result<&'static Driver, GpuError> {
    let driver = Driver::load().map_err(GpuError::NoDriver)?;
    driver.init().map_err(|e| GpuError::Driver("cuInit", e))?;
    lookup::driver_started();
    Ok(driver)
}

fn with_primary_context<T>(
    ordinal: u32,
    body: impl FnOnce(&'static Driver) -> Result<T, DeviceError>,
) -> Result<T, DeviceError> {
    let refused = |code: CuError| DeviceError { kind: ErrorKind::Driver, operation: "primary context", code: code.0 };
    let driver = Driver::cached().ok_or(DeviceError::new(ErrorKind::Unsupported, "CUDA: not opened"))?;
    let context = driver.primary_retain(ordinal as i32).map_err(refused)?;
    // SAFETY: retained in the line above, and released only after it was taken off this thread again.
    let done = unsafe { driver.push(context) }.map_err(refused).and_then(|()| {
        let done = body(driver);
        driver.pop().map_err(refused)?;
        done
    });
    // SAFETY: retained above.
    unsafe { driver.primary_release(ordinal as i32) }.map_err(refused)?;
    done
}
