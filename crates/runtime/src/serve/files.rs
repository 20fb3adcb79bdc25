//! Pinned files.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};

use spinio_device::{Device, registry};
use spinio_io::{DeviceMapping, PinError, device_call, program_fd, runtime};

use super::{answer, boxed, count};
use crate::{Memory, Report};

/// The device of some memory, or the one in use.
///
/// # Safety
/// The memory must be null or filled in by `find`.
unsafe fn device(like: *const Memory) -> Option<&'static dyn Device> {
    // SAFETY: the caller's promise.
    match unsafe { like.as_ref() } {
        // SAFETY: the caller's promise.
        Some(memory) => Some(unsafe { memory.allocation() }.device),
        None => registry::current_device(),
    }
}

pub(super) unsafe extern "C" fn pin_file(fd: c_int, like: *const Memory, report: Report) -> i64 {
    // SAFETY: `like` is null or was filled in by `find`; the report is the caller's.
    unsafe { count(report, || Ok(runtime().pin_file(program_fd(fd), device(like))?)) }
}

pub(super) unsafe extern "C" fn unpin_file(fd: c_int, generation: u64, report: Report) -> i64 {
    // SAFETY: the report is the caller's.
    unsafe { count(report, || Ok(runtime().unpin_generation(program_fd(fd), generation).map(|()| 0)?)) }
}

pub(super) extern "C" fn is_pinned(fd: c_int) -> c_int {
    device_call(|| runtime().is_pinned(program_fd(fd))).into()
}

pub(super) unsafe extern "C" fn map(
    fd: c_int,
    offset: u64,
    len: u64,
    like: *const Memory,
    report: Report,
) -> *mut c_void {
    let map = || {
        // SAFETY: `like` is null or was filled in by `find`.
        let device = unsafe { device(like) }.ok_or(PinError::NoDevice)?;
        Ok(runtime().map(program_fd(fd), offset, len, device)?)
    };
    // SAFETY: the report is the caller's.
    boxed(unsafe { answer(report, map) })
}

/// # Safety
/// It must have been made by `map`, and not unmapped.
unsafe fn mapped<'a>(map: *const c_void) -> &'a DeviceMapping {
    // SAFETY: the caller's promise.
    unsafe { &*map.cast() }
}

pub(super) unsafe extern "C" fn map_address(map: *const c_void) -> u64 {
    // SAFETY: the caller has a map.
    unsafe { mapped(map) }.address()
}

pub(super) unsafe extern "C" fn map_len(map: *const c_void) -> u64 {
    // SAFETY: the caller has a map.
    unsafe { mapped(map) }.len()
}

pub(super) unsafe extern "C" fn map_is_own_process(map: *const c_void) -> c_int {
    // SAFETY: the caller has a map.
    unsafe { mapped(map) }.is_own_process().into()
}

pub(super) unsafe extern "C" fn map_revoke_requested(map: *const c_void) -> c_int {
    // SAFETY: the caller has a map.
    unsafe { mapped(map) }.revoke_requested().into()
}

pub(super) unsafe extern "C" fn unmap(map: *mut c_void) {
    // SAFETY: the caller has a map, and unmaps it once.
    device_call(|| drop(unsafe { Box::from_raw(map.cast::<DeviceMapping>()) }));
}
