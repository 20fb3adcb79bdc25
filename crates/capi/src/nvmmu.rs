//! Moves between files and device memory, declared in `include/nvmmu.h`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use spinio_device::StreamId;
use spinio_nvmmu::{Direction, Error, ErrorKind, OutputMode, PipelineSpec, Report, Slot, Step, Ticket};

use crate::ffi_guard::{self as guard, Failure};
use crate::fill_struct;

/// `H2D`, `D2H`
const H2D: c_int = 1;
const D2H: c_int = 2;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Message(error.kind.errno().raw_os_error(), error.to_string())
    }
}

/// The path at a pointer; `None` if it is NULL.
///
/// # Safety
/// A string of C, or NULL.
unsafe fn path<'a>(name: *const c_char) -> Option<&'a Path> {
    if name.is_null() {
        return None;
    }
    // SAFETY: the header requires a string.
    Some(Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes())))
}

/// The file of a move.
///
/// # Safety
/// As [`path`].
unsafe fn require_path<'a>(name: *const c_char, operation: &'static str) -> Result<&'a Path, Error> {
    // SAFETY: passed on to the caller.
    unsafe { path(name) }
        .ok_or_else(|| Error::new(ErrorKind::Failed(spinio_sys::Errno::INVAL), operation, "no file is named"))
}

fn parse_range(offset: i64, length: i64) -> Result<(u64, u64), Error> {
    let bad = |what: &str, value: i64| Error::new(ErrorKind::BadRange, "move", format!("{what} {value} is negative"));
    let offset_ = u64::try_from(offset).map_err(|_| bad("offset", offset))?;
    Ok((offset_, u64::try_from(length).map_err(|_| bad("length", length))?))
}

fn parse_direction(direction: c_int) -> Result<Direction, Error> {
    match direction {
        H2D => Ok(Direction::Upload),
        D2H => Ok(Direction::Download),
        other => {
            let why = format!("{other} is no direction: H2D is {H2D}, D2H is {D2H}");
            Err(Error::new(ErrorKind::UnknownDirection, "move", why))
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmu_begin(thread: c_int, download: *const c_char) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header requires a string or NULL.
    guard::status(|| Ok(spinio_nvmmu::begin(thread, unsafe { path(download) })?))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmu_move(
    file: *const c_char,
    device: *mut c_void,
    offset: i64,
    length: i64,
    direction: c_int,
) -> i64 {
    guard::cancellation_point();
    let done = guard::run(|| {
        // SAFETY: the header requires a string.
        let file = unsafe { require_path(file, "move") }?;
        let direction = parse_direction(direction)?;
        let (offset, length) = parse_range(offset, length)?;
        Ok(spinio_nvmmu::current("move", |session| session.move_range(file, device, offset, length, direction))?)
    });
    done.map_or(-1, |bytes| bytes as i64)
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn nvmmu_hint_range(offset: i64, length: i64) -> c_int {
    guard::status(|| {
        let (offset, length) = parse_range(offset, length)?;
        Ok(spinio_nvmmu::current("announce a range", |session| {
            session.hint_range(offset, length);
            Ok(())
        })?)
    })
}

#[unsafe(no_mangle)]
extern "C-unwind" fn nvmmu_flush(sync: c_int) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        Ok(spinio_nvmmu::current("flush", |session| if sync == 0 { session.flush() } else { session.sync() })?)
    })
}

/// `struct nvmmu_report`
#[repr(C)]
struct CReport {
    uploaded: u64,
    downloaded: u64,
    mode: u64,
    full_stripe: u64,
    filler: u64,
    unaligned: u64,
    read_ahead: u64,
}

impl From<&Report> for CReport {
    fn from(report: &Report) -> CReport {
        CReport {
            uploaded: report.uploaded,
            downloaded: report.downloaded,
            mode: match report.mode {
                OutputMode::Passthrough(_) => 1,
                OutputMode::Aligned(_) => 2,
                OutputMode::Preread => 3,
                _ => 0,
            },
            full_stripe: report.full_stripe,
            filler: report.filler,
            unaligned: report.unaligned,
            read_ahead: report.read_ahead,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmu_end(thread: c_int, report: *mut c_void, size: usize) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        let ended = spinio_nvmmu::end(thread)?;
        if !report.is_null() {
            // SAFETY: the header requires `size` bytes at `report`; the struct has no padding.
            unsafe { fill_struct(report.cast(), size, &CReport::from(&ended)) };
        }
        Ok(())
    })
}

// ---- stream-ordered moves -------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmu_move_async(
    file: *const c_char,
    device: *mut c_void,
    offset: i64,
    length: i64,
    direction: c_int,
    stream: *mut c_void,
    ticket: *mut *mut Ticket,
) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        // SAFETY: the header requires a string.
        let file = unsafe { require_path(file, "move") }?;
        let direction = parse_direction(direction)?;
        let (offset, length) = parse_range(offset, length)?;
        let queue = StreamId(stream as u64);
        let made = spinio_nvmmu::current("move", |session| {
            session.move_async(file, device, offset, length, direction, queue)
        })?;
        if !ticket.is_null() {
            // SAFETY: the header requires a place for a pointer, or NULL.
            unsafe { ticket.write(Box::into_raw(Box::new(made))) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmu_wait(ticket: *mut Ticket) -> i64 {
    guard::cancellation_point();
    let done = guard::run(|| {
        if ticket.is_null() {
            return Err(Failure::Errno(libc::EINVAL));
        }
        // SAFETY: the header requires a ticket, once.
        let ticket = unsafe { Box::from_raw(ticket) };
        Ok(ticket.wait()?)
    });
    done.map_or(-1, |moved| moved as i64)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmmu_done(ticket: *const Ticket) -> c_int {
    // SAFETY: the header requires a ticket that was not waited for.
    guard::run(|| Ok(unsafe { ticket.as_ref() }.is_some_and(Ticket::is_done))).map_or(0, c_int::from)
}

/// `struct nvmmu_slot`
#[repr(C)]
#[derive(Clone, Copy)]
struct CSlot {
    stream: *mut c_void,
    input: *mut c_void,
    output: *mut c_void,
}

/// `struct nvmmu_step`
#[repr(C)]
struct CStep {
    number: u64,
    length: u64,
    slot: CSlot,
}

type CKernel = unsafe extern "C" fn(*const CStep, *mut c_void) -> i64;

/// `struct nvmmu_pieces`
#[repr(C)]
struct CPieces {
    input: *const c_char,
    input_offset: i64,
    input_length: i64,
    piece: i64,
    output: *const c_char,
    output_offset: i64,
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmu_pipeline(
    pieces: *const CPieces,
    slots: *const CSlot,
    count: usize,
    kernel: Option<CKernel>,
    context: *mut c_void,
) -> i64 {
    guard::cancellation_point();
    let done = guard::run(|| {
        // SAFETY: the header requires both.
        let (Some(c), false, Some(kernel)) = (unsafe { pieces.as_ref() }, slots.is_null(), kernel) else {
            return Err(Failure::Errno(libc::EINVAL));
        };
        // SAFETY: the header requires `count` of them.
        let slots = unsafe { core::slice::from_raw_parts(slots, count) };
        let (input_offset, input_len) = parse_range(c.input_offset, c.input_length)?;
        let (output_offset, piece) = parse_range(c.output_offset, c.piece)?;
        // SAFETY: the header requires strings.
        let (input, output) =
            unsafe { (require_path(c.input, "run a pipeline")?, require_path(c.output, "run a pipeline")?) };
        let pieces = PipelineSpec { input, input_offset, input_len, chunk: piece, output, output_offset };
        let ours = |s: &CSlot| Slot { queue: StreamId(s.stream as u64), input: s.input, output: s.output };
        let ours: Vec<Slot> = slots.iter().map(ours).collect();
        let call = |step: &Step| {
            let slot = slots[(step.number % count as u64) as usize];
            let step = CStep { number: step.number, length: step.len, slot };
            // SAFETY: the header requires a function that takes these.
            let made = unsafe { kernel(&raw const step, context) };
            u64::try_from(made).map_err(|_| format!("the program's function answered {made}"))
        };
        Ok(spinio_nvmmu::current("run a pipeline", |session| session.pipeline(&pieces, &ours, call))?)
    });
    done.map_or(-1, |written| written as i64)
}

// ---- as in the paper ------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmuBegin(thread: c_int, download: *const c_char) -> c_int {
    // SAFETY: passed on to the caller.
    c_int::from(unsafe { nvmmu_begin(thread, download) } == 0)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmuMove(
    file: *const c_char,
    device: *mut c_void,
    offset: c_int,
    length: c_int,
    direction: c_int,
) -> c_int {
    // SAFETY: passed on to the caller.
    let moved = unsafe { nvmmu_move(file, device, offset.into(), length.into(), direction) };
    c_int::try_from(moved).unwrap_or(0).max(0)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn nvmmuEnd(thread: c_int) -> c_int {
    // SAFETY: no report is wanted.
    c_int::from(unsafe { nvmmu_end(thread, core::ptr::null_mut(), 0) } == 0)
}
