//! The device object of each context.
//!
//! A context is identified by its address *and* its number: a reset device gets its next context at the same address.
//! Objects are leaked: a caller may still use the one of a destroyed context. Its slot is reused, so that the table
//! bounds the contexts alive at once, not all that ever existed.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::sync::atomic::{
    AtomicPtr,
    Ordering::{Acquire, Release},
};
use std::sync::{Mutex, PoisonError};

use spinio_sys::cuda::{Context, CuError, Driver};

use super::device::Cuda;

const MAX_CONTEXTS: usize = 64;

static DEVICES: [AtomicPtr<Cuda>; MAX_CONTEXTS] = [const { AtomicPtr::new(core::ptr::null_mut()) }; MAX_CONTEXTS];
static CREATE_LOCK: Mutex<()> = Mutex::new(());

/// Known objects, oldest first.
fn devices() -> impl Iterator<Item = &'static Cuda> {
    DEVICES.iter().map_while(|slot| {
        let device = slot.load(Acquire);
        // SAFETY: null or a leaked `Cuda`, published with Release after it was complete.
        (!device.is_null()).then(|| unsafe { &*device })
    })
}

/// The object for a living context, created now if there is none.
pub(super) fn device_of_context(driver: &'static Driver, context: Context, ordinal: i32) -> Option<&'static Cuda> {
    // SAFETY: the driver has just named this context as the owner of living memory, or as current.
    let id = unsafe { driver.context_id(context) }.ok()?;
    if let Some(device) = devices().find(|d| d.matches(context, id)) {
        return Some(device);
    }
    let _making = CREATE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = devices().find(|d| d.matches(context, id)) {
        return Some(device);
    }
    let slot = DEVICES.iter().find(|slot| {
        let device = slot.load(Acquire);
        // SAFETY: null or a leaked `Cuda`.
        unsafe { device.as_ref() }.is_none_or(Cuda::is_dead)
    })?;
    let device = Box::leak(Box::new(Cuda::new(driver, context, id, ordinal)?));
    slot.store(device, Release);
    Some(device)
}

/// The object for memory that belongs to a device but to no context: the current context if it is of that device, as a
/// copy of the program would use, else the device's primary context, if the program uses it.
pub(super) fn device_of_ordinal(driver: &'static Driver, ordinal: i32) -> Option<&'static Cuda> {
    let current = driver.current().ok().filter(|c| c.0 != 0);
    if let Some(context) = current
        && driver.current_device() == Ok(ordinal)
    {
        return device_of_context(driver, context, ordinal);
    }
    device_of_context(driver, active_primary(driver, ordinal).ok()??, ordinal)
}

/// The primary context of a device, if the program has one. SPIN's own reference to it is released at once: the program
/// decides how long it lives.
fn active_primary(driver: &'static Driver, ordinal: i32) -> Result<Option<Context>, CuError> {
    let device = driver.device(ordinal)?;
    if !driver.primary_is_active(device)? {
        return Ok(None);
    }
    let context = driver.primary_retain(device)?;
    // SAFETY: retained in the line above.
    unsafe { driver.primary_release(device) }?;
    Ok(Some(context))
}
