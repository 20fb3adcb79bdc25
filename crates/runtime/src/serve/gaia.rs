//! Maps of files in device memory.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::c_int;

use spinio_device::{Device, StreamId, registry};
use spinio_gaia::{Access, FileMap, Info, StreamRelease};
use spinio_io::program_fd;

use super::file_reader::Routes;
use super::{Failure, answer, count, devices};
use crate::{GAIA_IN_PLACE, GAIA_OVERWRITE, GAIA_READ, GAIA_WRITE, Report};

fn access(access: u32) -> Result<Access, Failure> {
    match access {
        GAIA_READ => Ok(Access::Read),
        GAIA_WRITE => Ok(Access::Write),
        _ => Err(Failure::new(libc::EINVAL, format!("{access:#x} is no access"))),
    }
}

/// What an acquire is for: `None` is to overwrite the range.
fn purpose(wanted: u32) -> Result<Option<Access>, Failure> {
    if wanted == GAIA_OVERWRITE { Ok(None) } else { access(wanted).map(Some) }
}

/// The device of a name, or the one in use.
fn device(name: Option<&str>) -> Result<&'static dyn Device, Failure> {
    match name {
        None => registry::current_device()
            .ok_or_else(|| Failure::new(libc::ENODEV, "No device is in use, so there is none to map into")),
        Some(name) => devices::of_name(name),
    }
}

pub(super) unsafe extern "C" fn map(
    fd: c_int,
    offset: u64,
    len: u64,
    wanted: u32,
    name: *const u8,
    name_len: usize,
    report: Report,
) -> u64 {
    let map = || {
        // SAFETY: unless it is null, the caller has `name_len` bytes there.
        let name = (!name.is_null()).then(|| unsafe { core::slice::from_raw_parts(name, name_len) });
        let name = name.map(String::from_utf8_lossy);
        let (fd, device) = (program_fd(fd), device(name.as_deref())?);
        if wanted & GAIA_IN_PLACE == 0 {
            return Ok(spinio_gaia::map(fd, offset, len, access(wanted)?, device, &Routes)?);
        }
        Ok(spinio_gaia::map_in_place(fd, offset, len, access(wanted & !GAIA_IN_PLACE)?, device)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { answer(report, map) }.unwrap_or(0)
}

pub(super) unsafe extern "C" fn unmap(address: u64, report: Report) -> i64 {
    // SAFETY: the report is the caller's.
    unsafe { count(report, || Ok(spinio_gaia::unmap(address).map(|()| 0)?)) }
}

pub(super) unsafe extern "C" fn acquire(address: u64, len: u64, wanted: u32, report: Report) -> i64 {
    let acquire = || {
        let purpose = purpose(wanted)?;
        let acquire = |map: &FileMap, offset| match purpose {
            Some(access) => map.acquire(offset, len, access),
            None => map.overwrite(offset, len),
        };
        Ok(spinio_gaia::with_map(address, acquire)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, acquire) }
}

pub(super) unsafe extern "C" fn release(address: u64, len: u64, report: Report) -> i64 {
    // SAFETY: the report is the caller's.
    unsafe { count(report, || Ok(spinio_gaia::with_map(address, |map, offset| map.release(offset, len))?)) }
}

pub(super) unsafe extern "C" fn release_handing_over(address: u64, len: u64, report: Report) -> i64 {
    let release = |map: &FileMap, offset| map.release_handing_over(offset, len);
    // SAFETY: the report is the caller's.
    unsafe { count(report, || Ok(spinio_gaia::with_map(address, release)?)) }
}

pub(super) unsafe extern "C" fn acquire_async(address: u64, len: u64, wanted: u32, stream: u64, report: Report) -> i64 {
    let acquire = || {
        let purpose = purpose(wanted)?;
        let queue = |map: &FileMap, offset| match purpose {
            Some(access) => map.acquire_async(offset, len, access, StreamId(stream)),
            None => map.overwrite_async(offset, len, StreamId(stream)),
        };
        Ok(spinio_gaia::with_map(address, queue).map(|()| 0)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, acquire) }
}

pub(super) unsafe extern "C" fn release_async(address: u64, len: u64, stream: u64, report: Report) -> i64 {
    let queue = |map: &FileMap, offset| map.release_async(offset, len, StreamRelease::new(StreamId(stream), |_| ()));
    // SAFETY: the report is the caller's.
    unsafe { count(report, || Ok(spinio_gaia::with_map(address, queue).map(|()| 0)?)) }
}

pub(super) unsafe extern "C" fn discard(address: u64, len: u64, report: Report) -> i64 {
    let discard = || Ok(spinio_gaia::with_map(address, |map, offset| map.discard(offset, len).map(|()| 0))?);
    // SAFETY: the report is the caller's.
    unsafe { count(report, discard) }
}

pub(super) unsafe extern "C" fn end_reading(address: u64, len: u64, report: Report) -> i64 {
    let end = || Ok(spinio_gaia::with_map(address, |map, offset| map.end_reading(offset, len).map(|()| 0))?);
    // SAFETY: the report is the caller's.
    unsafe { count(report, end) }
}

pub(super) unsafe extern "C" fn begin_block(address: u64, len: u64, report: Report) -> i64 {
    let begin = || Ok(spinio_gaia::with_map(address, |map, offset| map.begin_block(offset, len).map(|()| 0))?);
    // SAFETY: the report is the caller's.
    unsafe { count(report, begin) }
}

pub(super) unsafe extern "C" fn end_block(address: u64, len: u64, report: Report) -> i64 {
    let end = || Ok(spinio_gaia::with_map(address, |map, offset| map.end_block(offset, len).map(|()| 0))?);
    // SAFETY: the report is the caller's.
    unsafe { count(report, end) }
}

pub(super) unsafe extern "C" fn sync(address: u64, len: u64, report: Report) -> i64 {
    let sync = || Ok(spinio_gaia::with_map(address, |map, offset| map.sync(offset, len).map(|()| 0))?);
    // SAFETY: the report is the caller's.
    unsafe { count(report, sync) }
}

pub(super) unsafe extern "C" fn info(address: u64, out: *mut Info, report: Report) -> i64 {
    let info = || {
        let info = spinio_gaia::with_map(address, |map, _| Ok(map.info()))?;
        // SAFETY: the caller passes a place for it.
        unsafe { out.write(info) };
        Ok(0)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, info) }
}

pub(super) unsafe extern "C" fn device_of(address: u64, report: Report) {
    if let Ok(id) = spinio_gaia::with_map(address, |map, _| Ok(map.device())) {
        // SAFETY: the report is the caller's.
        unsafe { report.send(0, &id.to_string(), None) }
    }
}
