//! Bytes between files, devices and the host.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::time::Duration;

use spinio_batch::{Arg, Batches, ReadArrays};
use spinio_device::WaitMode;
use spinio_io::settings::SMALL_REQUEST_MAX;
use spinio_io::{CancelPoll, Target, install_cancel_poll, runtime};

use super::{Failure, boxed, count};
use crate::{ARRIVED, Memory, Pieces, Report};

type Ask = extern "C" fn() -> c_int;

thread_local! {
    /// Whom long requests of this thread ask. Without a destructor.
    static ASK: Cell<Option<Ask>> = const { Cell::new(None) };
}

/// What `begin_asking` began, and whom it put aside.
struct Asking {
    before: Option<Ask>,
    _asking: CancelPoll,
}

fn ask() -> bool {
    ASK.get().is_some_and(|ask| ask() != 0)
}

pub(super) unsafe extern "C" fn begin_asking(who: Ask, every_nanos: u64) -> *mut c_void {
    let before = ASK.replace(Some(who));
    boxed(Some(Asking { before, _asking: install_cancel_poll(ask, Duration::from_nanos(every_nanos)) }))
}

pub(super) unsafe extern "C" fn end_asking(asking: *mut c_void) {
    // SAFETY: made by `begin_asking`, on this thread, and ended once.
    let asking = unsafe { Box::from_raw(asking.cast::<Asking>()) };
    ASK.set(asking.before);
}

/// Waits for the arrival of what is only queued.
pub(super) fn settle(to: Target, operation: &'static str, offset: u64, len: u64) -> Result<(), spinio_io::Error> {
    let device = to.allocation.device;
    let late = |e| spinio_io::Error::device(e, operation, offset, len);
    device.synchronize(device.app_stream().id(), WaitMode::Context).map_err(late)
}

pub(super) unsafe extern "C" fn read(
    fd: c_int,
    offset: i64,
    memory: *const Memory,
    address: u64,
    len: usize,
    flags: u32,
    report: Report,
) -> i64 {
    let read = || {
        // SAFETY: the caller's memory is one that `find` has filled in.
        let to = unsafe { (*memory).target(address) };
        let at = u64::try_from(offset).ok();
        let got = runtime().read(fd, at, to, len)?;
        if flags & ARRIVED != 0 && len <= SMALL_REQUEST_MAX {
            settle(to, "read", at.unwrap_or(0), len as u64)?;
        }
        Ok(got as u64)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, read) }
}

pub(super) unsafe extern "C" fn write(
    fd: c_int,
    offset: i64,
    memory: *const Memory,
    address: u64,
    len: usize,
    report: Report,
) -> i64 {
    let write = || {
        // SAFETY: the caller's memory is one that `find` has filled in.
        let from = unsafe { (*memory).target(address) };
        Ok(runtime().write(fd, u64::try_from(offset).ok(), from, len)? as u64)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, write) }
}

pub(super) unsafe extern "C" fn fetch(
    memory: *const Memory,
    address: u64,
    into: *mut u8,
    len: usize,
    report: Report,
) -> i64 {
    let fetch = || {
        // SAFETY: the caller's memory is one that `find` has filled in, and it has room for so many bytes.
        let (from, into) = unsafe { ((*memory).target(address), core::slice::from_raw_parts_mut(into, len)) };
        Ok(runtime().fetch(from, into).map(|()| 0)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, fetch) }
}

pub(super) unsafe extern "C" fn put(
    memory: *const Memory,
    address: u64,
    from: *const u8,
    len: usize,
    report: Report,
) -> i64 {
    let put = || {
        // SAFETY: the caller's memory is one that `find` has filled in, and it has so many bytes.
        let (to, bytes) = unsafe { ((*memory).target(address), core::slice::from_raw_parts(from, len)) };
        runtime().put(to, bytes)?;
        settle(to, "copy to the device", 0, len as u64)?;
        Ok(0)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, put) }
}

pub(super) unsafe extern "C" fn read_many(pieces: *const Pieces, report: Report) -> i64 {
    let read = || -> Result<u64, Failure> {
        // SAFETY: the caller's arrays have as many elements as it says, and stay as they are until this returns. `known` is
        // null or was filled in by `find`.
        let (many, known) = unsafe {
            let p = &*pieces;
            let each = |at: *const u64| Arg::Slice(core::slice::from_raw_parts(at, p.count));
            let lens = if p.lens.is_null() { Arg::Same(p.len) } else { each(p.lens) };
            let addresses = if p.addresses.is_null() { Arg::Stride(p.address, p.len) } else { each(p.addresses) };
            let results = core::slice::from_raw_parts_mut(p.results, p.count);
            let known: Vec<_> = p.known.as_ref().map(|memory| memory.allocation()).into_iter().collect();
            (ReadArrays { fd: p.fd, offsets: each(p.offsets), lens, addresses, results }, known)
        };
        Ok(runtime().batch_file(many, &known)?.failed as u64)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, read) }
}
