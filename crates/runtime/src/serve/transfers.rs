//! Transfers between files, devices and the host.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::time::Duration;

use spinio_batch::{Arg, Batches, ReadArrays};
use spinio_io::settings::SMALL_REQUEST_MAX;
use spinio_io::{CancelPoll, install_cancel_poll, program_fd, runtime};

use super::{Failure, boxed, count};
use crate::{Memory, ReadOps, Report, WAIT_ARRIVED};

type Poll = extern "C" fn() -> c_int;

thread_local! {
    /// The cancellation poll of long requests of this thread. Without a destructor.
    static POLL: Cell<Option<Poll>> = const { Cell::new(None) };
}

/// The poll that `set_cancel_poll` installed, and the one that it replaced.
struct InstalledPoll {
    before: Option<Poll>,
    _installed: CancelPoll,
}

fn poll() -> bool {
    POLL.get().is_some_and(|poll| poll() != 0)
}

pub(super) unsafe extern "C" fn set_cancel_poll(function: Poll, every_nanos: u64) -> *mut c_void {
    let before = POLL.replace(Some(function));
    boxed(Some(InstalledPoll { before, _installed: install_cancel_poll(poll, Duration::from_nanos(every_nanos)) }))
}

pub(super) unsafe extern "C" fn restore_cancel_poll(installed: *mut c_void) {
    // SAFETY: made by `set_cancel_poll`, on this thread, and restored once.
    let installed = unsafe { Box::from_raw(installed.cast::<InstalledPoll>()) };
    POLL.set(installed.before);
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
        // SAFETY: `find` has filled in the caller's memory.
        let to = unsafe { (*memory).target(address) };
        let at = u64::try_from(offset).ok();
        let got = runtime().read(program_fd(fd), at, to, len)?;
        if flags & WAIT_ARRIVED != 0 && len <= SMALL_REQUEST_MAX {
            runtime().wait_arrived(to, "read", at.unwrap_or(0), len as u64)?;
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
        // SAFETY: `find` has filled in the caller's memory.
        let from = unsafe { (*memory).target(address) };
        Ok(runtime().write(program_fd(fd), u64::try_from(offset).ok(), from, len)? as u64)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, write) }
}

pub(super) unsafe extern "C" fn copy_to_host(
    memory: *const Memory,
    address: u64,
    into: *mut u8,
    len: usize,
    report: Report,
) -> i64 {
    let copy = || {
        // SAFETY: `find` has filled in the caller's memory, and it has a place for `len` bytes.
        let (from, into) = unsafe { ((*memory).target(address), core::slice::from_raw_parts_mut(into, len)) };
        Ok(runtime().fetch(from, into).map(|()| 0)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, copy) }
}

pub(super) unsafe extern "C" fn copy_from_host(
    memory: *const Memory,
    address: u64,
    from: *const u8,
    len: usize,
    report: Report,
) -> i64 {
    let copy = || {
        // SAFETY: `find` has filled in the caller's memory, and it has `len` bytes.
        let (to, bytes) = unsafe { ((*memory).target(address), core::slice::from_raw_parts(from, len)) };
        runtime().put(to, bytes)?;
        runtime().wait_arrived(to, "copy to the device", 0, len as u64)?;
        Ok(0)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, copy) }
}

pub(super) unsafe extern "C" fn read_many(ops: *const ReadOps, report: Report) -> i64 {
    let read = || -> Result<u64, Failure> {
        // SAFETY: the caller's arrays have `count` elements, and are not changed until this returns. `known` is null or
        // was filled in by `find`.
        let (many, known) = unsafe {
            let p = &*ops;
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
