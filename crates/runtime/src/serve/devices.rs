//! Device memory, the stream of a thread, and the emulated device.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::c_int;

use spinio_device::emulated::{self, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode, registry};
use spinio_io::{device_call, runtime};

use super::{Failure, answer, count};
use crate::{Memory, Report};

pub(super) unsafe extern "C" fn find(address: u64, len: usize, memory: *mut Memory) -> c_int {
    match registry::find_or_query(address as *const u8, len) {
        Some(allocation) => {
            // SAFETY: the caller passes a place for it.
            unsafe { memory.write(Memory::of(&allocation)) };
            1
        }
        None => 0,
    }
}

pub(super) unsafe extern "C" fn device_name(memory: *const Memory, report: Report) {
    // SAFETY: `find` has filled in the caller's memory, and the report is the caller's.
    unsafe { report.send(0, &(*memory).allocation().device.id().to_string(), None) }
}

pub(super) extern "C" fn thread_stream() -> u64 {
    spinio_device::thread_stream().0
}

pub(super) extern "C" fn set_thread_stream(stream: u64) {
    spinio_device::set_thread_stream(StreamId(stream));
}

/// The device is configured by SPINIO_EMULATED; without effect once it is created.
pub(super) fn as_set() -> Result<(), Failure> {
    let Some(text) = &runtime().settings().emulated else { return Ok(()) };
    emulated::configure(text).map_err(|e| Failure::new(libc::EINVAL, format!("SPINIO_EMULATED={text}: {e}")))
}

/// An emulated device, as SPINIO_EMULATED describes it.
pub(super) fn emulated_device(ordinal: u32) -> Result<&'static Emulated, Failure> {
    as_set()?;
    Ok(emulated::device(ordinal)?)
}

/// The device of a name: an emulated one, or the one in use.
pub(super) fn of_name(name: &str) -> Result<&'static dyn Device, Failure> {
    if let Some(ordinal) = emulated_ordinal(name) {
        return Ok(emulated_device(ordinal)?);
    }
    registry::current_device().filter(|device| device.id().to_string() == name).ok_or_else(|| {
        let text = format!("{name} is not the device in use on this thread: make its context current first");
        Failure::new(libc::ENODEV, text)
    })
}

/// The number in `emulated:1`; 0 if it has none.
fn emulated_ordinal(name: &str) -> Option<u32> {
    match name.split_once(':') {
        Some(("emulated", ordinal)) => ordinal.parse().ok(),
        Some(_) => None,
        None => (name == "emulated").then_some(0),
    }
}

fn first() -> Result<&'static Emulated, Failure> {
    Ok(emulated::device(0)?)
}

pub(super) unsafe extern "C" fn emulated_configure(text: *const u8, len: usize, report: Report) -> i64 {
    let configure = || {
        // SAFETY: the caller has `len` bytes there.
        let text = String::from_utf8_lossy(unsafe { core::slice::from_raw_parts(text, len) });
        emulated::configure(&text).map(|()| 0).map_err(|e| Failure::new(libc::EINVAL, e))
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, configure) }
}

pub(super) unsafe extern "C" fn emulated_alloc(device: u32, len: usize, host_mapped: c_int, report: Report) -> u64 {
    let alloc = || Ok(emulated_device(device)?.alloc(len, host_mapped != 0)?.0);
    // SAFETY: the report is the caller's.
    unsafe { answer(report, alloc) }.unwrap_or(0)
}

pub(super) extern "C" fn emulated_free(address: u64) {
    let _ = device_call(|| registry::free(DeviceAddr(address)));
}

pub(super) unsafe extern "C" fn emulated_stream(device: u32, stream: *mut u64, report: Report) -> i64 {
    let make = || {
        let queue = emulated_device(device)?.new_stream()?;
        // SAFETY: the caller passes a place for it.
        unsafe { stream.write(queue.0) };
        Ok(0)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, make) }
}

pub(super) extern "C" fn emulated_release_stream(stream: u64) {
    if let Ok(device) = emulated::of_stream(StreamId(stream)) {
        device.release_stream(StreamId(stream));
    }
}

pub(super) unsafe extern "C" fn emulated_wait(stream: u64, report: Report) -> i64 {
    let wait = || {
        let stream = StreamId(stream);
        Ok(emulated::of_stream(stream)?.synchronize(stream, WaitMode::Context).map(|()| 0)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, wait) }
}

pub(super) unsafe extern "C" fn emulated_pause(report: Report) -> i64 {
    // SAFETY: the report is the caller's.
    unsafe { count(report, || first().map(Emulated::pause).map(|()| 0)) }
}

pub(super) unsafe extern "C" fn emulated_resume(report: Report) -> i64 {
    // SAFETY: the report is the caller's.
    unsafe { count(report, || first().map(Emulated::resume).map(|()| 0)) }
}
