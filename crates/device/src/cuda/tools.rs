//! A GPU of our own, for our own programs: the command has no program around it that brings a context.
//!
//! The library never comes here: it loads no driver, initialises none, and makes no context.

use spinio_sys::cuda::{CuError, Driver, LoadError};

use super::contexts::device_of;
use super::lookup;
use crate::{Device, DeviceAddr, DeviceError, ErrorKind};

/// Why there is no GPU to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoGpu {
    /// There is no driver.
    NoDriver(LoadError),
    /// The driver refused; call and reason.
    Refused(&'static str, CuError),
}

impl std::fmt::Display for NoGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoGpu::NoDriver(why) => write!(f, "{why}"),
            NoGpu::Refused(call, why) => write!(f, "The CUDA driver refused {call}: {why}"),
        }
    }
}

impl std::error::Error for NoGpu {}

/// Number of GPUs; loads and initialises the driver.
pub fn count() -> Result<u32, NoGpu> {
    let driver = started()?;
    driver.device_count().map(|n| n.max(0) as u32).map_err(|e| NoGpu::Refused("cuDeviceGetCount", e))
}

/// A GPU with its primary context, which stays for the life of the process.
pub fn open(ordinal: u32) -> Result<&'static dyn Device, NoGpu> {
    let driver = started()?;
    let device = driver.device(ordinal as i32).map_err(|e| NoGpu::Refused("cuDeviceGet", e))?;
    let context = driver.primary_retain(device).map_err(|e| NoGpu::Refused("cuDevicePrimaryCtxRetain", e))?;
    let made = device_of(driver, context, ordinal as i32);
    made.map(|d| d as &'static dyn Device).ok_or(NoGpu::Refused("its context", CuError::INVALID_CONTEXT))
}

/// New memory on a GPU of [`open`].
pub fn alloc(ordinal: u32, len: usize) -> Result<DeviceAddr, DeviceError> {
    let refused = |code: CuError| DeviceError { kind: ErrorKind::NoMemory, operation: "cuMemAlloc", code: code.0 };
    in_primary(ordinal, |driver| driver.alloc(len).map(DeviceAddr).map_err(refused))
}

/// Gives it back, after everything queued on it is done.
///
/// # Safety
/// `addr` must come from [`alloc`] with the same ordinal and be used no more.
pub unsafe fn free(ordinal: u32, addr: DeviceAddr) -> Result<(), DeviceError> {
    let refused = |code: CuError| DeviceError { kind: ErrorKind::BadAddress, operation: "cuMemFree", code: code.0 };
    // SAFETY: passed on to the caller.
    in_primary(ordinal, |driver| unsafe { driver.free(addr.0) }.map_err(refused))
}

fn started() -> Result<&'static Driver, NoGpu> {
    let driver = Driver::load().map_err(NoGpu::NoDriver)?;
    driver.init().map_err(|e| NoGpu::Refused("cuInit", e))?;
    lookup::driver_started();
    Ok(driver)
}

fn in_primary<T>(ordinal: u32, body: impl FnOnce(&'static Driver) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    let refused = |code: CuError| DeviceError { kind: ErrorKind::Driver, operation: "primary context", code: code.0 };
    let driver = Driver::known().ok_or(DeviceError::new(ErrorKind::Unsupported, "CUDA: not opened"))?;
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
