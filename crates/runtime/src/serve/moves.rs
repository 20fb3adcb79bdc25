//! Sessions of NVMMU and their tickets.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use spinio_device::{StreamId, registry};
use spinio_io::settings::SMALL_REQUEST_MAX;
use spinio_io::{Target, device_call, runtime};
use spinio_nvmmu::{Direction, Error, ErrorKind, Report as Done, Session, Ticket};

use super::{answer, boxed, count};
use crate::{DOWNLOAD, Move, Report, SessionReport, UPLOAD, WAIT_ARRIVED};

// A client may use sessions from any thread, one at a time, and a ticket from several threads.
const _: () = {
    const fn moves<T: Send>() {}
    const fn is_shared<T: Send + Sync>() {}
    moves::<Session>();
    is_shared::<Ticket>();
};

/// # Safety
/// There must be `len` bytes, for that long.
unsafe fn path<'a>(bytes: *const u8, len: usize) -> &'a Path {
    // SAFETY: the caller's promise.
    Path::new(OsStr::from_bytes(unsafe { core::slice::from_raw_parts(bytes, len) }))
}

/// # Safety
/// It must be a session of this library that no other thread uses meanwhile.
unsafe fn session<'a>(session: *mut c_void) -> &'a mut Session {
    // SAFETY: the caller's promise.
    unsafe { &mut *session.cast() }
}

pub(super) unsafe extern "C" fn session_begin(output: *const u8, len: usize, report: Report) -> *mut c_void {
    let begin = || {
        // SAFETY: null, or `len` bytes of the caller's.
        let output = (!output.is_null()).then(|| unsafe { path(output, len) });
        Ok(Session::begin(runtime(), output)?)
    };
    // SAFETY: the report is the caller's.
    boxed(unsafe { answer(report, begin) })
}

pub(super) unsafe extern "C" fn session_hint_range(of: *mut c_void, offset: u64, len: u64, report: Report) -> i64 {
    let hint = || {
        // SAFETY: the caller's session, which no other thread uses.
        unsafe { session(of) }.hint_range(offset, len);
        Ok(0)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, hint) }
}

fn direction(number: u32) -> Result<Direction, Error> {
    match number {
        UPLOAD => Ok(Direction::Upload),
        DOWNLOAD => Ok(Direction::Download),
        _ => Err(Error::new(ErrorKind::UnknownDirection, "move", "neither an upload nor a download")),
    }
}

pub(super) unsafe extern "C" fn session_move(of: *mut c_void, wanted: *const Move, report: Report) -> i64 {
    let make = || {
        // SAFETY: the caller's session, which no other thread uses, and its move, with a path of `path_len` bytes.
        let (session, wanted, path) = unsafe { (session(of), *wanted, path((*wanted).path, (*wanted).path_len)) };
        let (offset, len) = (wanted.offset, wanted.len);
        let moved =
            session.move_range(path, wanted.address as *mut c_void, offset, len, direction(wanted.direction)?)?;
        if wanted.flags & WAIT_ARRIVED != 0 && len > 0 && len <= SMALL_REQUEST_MAX as u64 {
            let found = registry::find(wanted.address as *const u8, len as usize);
            let to = found.map(|allocation| Target { allocation, addr: spinio_device::DeviceAddr(wanted.address) });
            let arrived = to.map_or(Ok(()), |to| runtime().wait_arrived(to, "upload", offset, len));
            arrived.map_err(|e| {
                Error::new(ErrorKind::Failed(e.kind.errno()), "upload", e.to_string())
                    .with_path(path)
                    .with_range(offset, len)
            })?;
        }
        Ok(moved)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, make) }
}

pub(super) unsafe extern "C" fn session_move_async(
    of: *mut c_void,
    wanted: *const Move,
    stream: u64,
    report: Report,
) -> *mut c_void {
    let make = || {
        // SAFETY: the caller's session, which no other thread uses, and its move, with a path of `path_len` bytes.
        let (session, wanted, path) = unsafe { (session(of), *wanted, path((*wanted).path, (*wanted).path_len)) };
        let (at, direction) = (wanted.address as *mut c_void, direction(wanted.direction)?);
        Ok(session.move_async(path, at, wanted.offset, wanted.len, direction, StreamId(stream))?)
    };
    // SAFETY: the report is the caller's.
    boxed(unsafe { answer(report, make) })
}

pub(super) unsafe extern "C" fn session_flush(of: *mut c_void, sync: c_int, report: Report) -> i64 {
    let flush = || {
        // SAFETY: the caller's session, which no other thread uses.
        let session = unsafe { session(of) };
        Ok(if sync != 0 { session.sync() } else { session.flush() }.map(|()| 0)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, flush) }
}

pub(super) unsafe extern "C" fn session_output(of: *const c_void, report: Report) {
    // SAFETY: the caller's session, which no thread changes meanwhile; the report is its own.
    unsafe {
        if let Some(path) = (*of.cast::<Session>()).output() {
            report.send(0, "", Some(path.as_os_str().as_bytes()));
        }
    }
}

/// # Safety
/// There must be a place for the counts, and the report must be the caller's.
unsafe fn write_report(done: &Done, out: *mut SessionReport, report: Report) {
    let Done { uploaded, downloaded, mode, full_stripe, filler, unaligned, read_ahead } = done.clone();
    // SAFETY: the caller's promise.
    unsafe {
        out.write(SessionReport { uploaded, downloaded, full_stripe, filler, unaligned, read_ahead });
        report.send(0, &mode.to_string(), None);
    }
}

pub(super) unsafe extern "C" fn session_report(of: *mut c_void, out: *mut SessionReport, report: Report) -> i64 {
    // SAFETY: the caller's session, which no other thread uses; the report and the place for the counts are the
    // caller's.
    unsafe {
        let done = answer(report, || Ok(session(of).report()));
        done.map_or(-1, |done| {
            write_report(&done, out, report);
            0
        })
    }
}

pub(super) unsafe extern "C" fn session_end(of: *mut c_void, out: *mut SessionReport, report: Report) -> i64 {
    // SAFETY: the caller's session, which ends here; the report and the place for the counts are the caller's.
    unsafe {
        let session = Box::from_raw(of.cast::<Session>());
        let done = answer(report, || Ok(session.end()?));
        done.map_or(-1, |done| {
            write_report(&done, out, report);
            0
        })
    }
}

pub(super) unsafe extern "C" fn session_drop(of: *mut c_void) {
    // SAFETY: the caller's session, which ends here.
    device_call(|| drop(unsafe { Box::from_raw(of.cast::<Session>()) }));
}

/// # Safety
/// It must be a ticket of this library.
unsafe fn ticket<'a>(ticket: *const c_void) -> &'a Ticket {
    // SAFETY: the caller's promise.
    unsafe { &*ticket.cast() }
}

pub(super) unsafe extern "C" fn ticket_is_done(of: *const c_void) -> c_int {
    // SAFETY: the caller has a ticket.
    unsafe { ticket(of) }.is_done().into()
}

pub(super) unsafe extern "C" fn ticket_wait(of: *const c_void, report: Report) -> i64 {
    // SAFETY: the caller has a ticket, and the report is its own.
    unsafe { count(report, || Ok(ticket(of).wait()?)) }
}

pub(super) unsafe extern "C" fn ticket_clone(of: *const c_void) -> *mut c_void {
    // SAFETY: the caller has a ticket.
    boxed(Some(unsafe { ticket(of) }.clone()))
}

pub(super) unsafe extern "C" fn ticket_drop(of: *mut c_void) {
    // SAFETY: the caller has a ticket, and releases it once.
    device_call(|| drop(unsafe { Box::from_raw(of.cast::<Ticket>()) }));
}
