//! Transfers between a file and a Python object's memory, without the GIL.

#![expect(unsafe_code, reason = "buffers of other Python objects")]

use std::time::Instant;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client::{self, Error};
use spinio_sys::{Errno, linux};

use crate::buffer::{Access, Buffer, MemoryPlace};
use crate::signals::CHECK_INTERVAL;
use crate::stream::StreamScope;
use crate::{failure, signals};

/// Transfers of host memory that are longer than one call can be are made in pieces of this size.
const PIECE: usize = 1 << 30;

/// A read of host memory at an offset is made in pieces of this size, so that signal handlers run in between. At the
/// descriptor's own offset other readers could read in between, and other writers could write in the middle of a write.
const HOST_PIECE: usize = 64 << 20;

/// The longest piece of a transfer that should be one system call.
fn max_piece(bytes: usize) -> usize {
    if bytes <= linux::MAX_RW_COUNT { linux::MAX_RW_COUNT } else { PIECE }
}

/// Fills `into` from the file, at `offset` or, with None, at the descriptor's offset. Returns the bytes read, or None
/// if a non-blocking descriptor has none. `wait`: until they have arrived, however few they are.
#[pyfunction]
#[pyo3(signature = (fd, into, offset=None, *, wait=false))]
pub(crate) fn read(fd: i32, into: &Bound<'_, PyAny>, offset: Option<i64>, wait: bool) -> PyResult<Option<usize>> {
    read_part(into.py(), fd, parse_offset(offset)?, &Buffer::from_object(into, Access::Fill)?, 0, wait)
}

/// Fills `into` from the file at `offset`. Returns the bytes read: fewer than its size only where the file ends. Unlike
/// `read`, it fails even after bytes were read. `wait`: as for `read`.
#[pyfunction]
#[pyo3(signature = (fd, into, offset, *, wait=false))]
pub(crate) fn read_full(fd: i32, into: &Bound<'_, PyAny>, offset: i64, wait: bool) -> PyResult<usize> {
    let at = parse_offset(Some(offset))?;
    let buffer = Buffer::from_object(into, Access::Fill)?;
    let mut done = 0;
    while done < buffer.bytes {
        let from = at.map(|at| at + done as u64);
        // The rest may be short enough to be queued only, which a read of this size is not.
        match read_part(into.py(), fd, from, &buffer, done, wait || done > 0)? {
            None | Some(0) => break,
            Some(got) => done += got,
        }
    }
    Ok(done)
}

/// Fills a buffer from its byte `skip` on.
fn read_part(
    py: Python<'_>,
    fd: i32,
    at: Option<u64>,
    buffer: &Buffer<'_>,
    skip: usize,
    wait: bool,
) -> PyResult<Option<usize>> {
    let bytes = buffer.bytes - skip;
    match buffer.memory_place {
        MemoryPlace::Host(address) => transfer_host(
            py,
            bytes,
            if at.is_some() { HOST_PIECE } else { max_piece(bytes) },
            "Cannot read",
            at,
            |done, len| {
                let to = (address + skip + done) as *mut u8;
                // SAFETY: writable memory of an object that `buffer` keeps; the range ends with it.
                unsafe {
                    match at {
                        Some(at) => linux::pread(fd, to, len, at + done as u64),
                        None => linux::read(fd, to, len),
                    }
                }
            },
        ),
        MemoryPlace::Device(mut to) => {
            to.address += skip as u64;
            let order = buffer.order;
            transfer_device(py, || {
                let chosen = StreamScope::new(order);
                client::read(fd, at, to, bytes, wait || chosen.synchronize)
            })
        }
    }
}

/// Writes the bytes of `from` to the file, at `offset` or at the descriptor's offset. Returns the bytes written, or
/// None if a non-blocking descriptor takes none.
#[pyfunction]
#[pyo3(signature = (fd, from, offset=None))]
pub(crate) fn write(fd: i32, from: &Bound<'_, PyAny>, offset: Option<i64>) -> PyResult<Option<usize>> {
    write_part(from.py(), fd, parse_offset(offset)?, &Buffer::from_object(from, Access::Drain)?, 0)
}

/// Writes all bytes of `from`. Unlike `write`, it fails even after bytes were written. Only a non-blocking descriptor takes
/// fewer: returns the bytes written, or None for none.
#[pyfunction]
#[pyo3(signature = (fd, from, offset=None))]
pub(crate) fn write_full(fd: i32, from: &Bound<'_, PyAny>, offset: Option<i64>) -> PyResult<Option<usize>> {
    let at = parse_offset(offset)?;
    let buffer = Buffer::from_object(from, Access::Drain)?;
    let mut done = 0;
    while done < buffer.bytes {
        match write_part(from.py(), fd, at.map(|at| at + done as u64), &buffer, done)? {
            None | Some(0) => return Ok((done > 0).then_some(done)),
            Some(wrote) => done += wrote,
        }
    }
    Ok(Some(done))
}

/// Writes a buffer from its byte `skip` on.
fn write_part(py: Python<'_>, fd: i32, at: Option<u64>, buffer: &Buffer<'_>, skip: usize) -> PyResult<Option<usize>> {
    let bytes = buffer.bytes - skip;
    match buffer.memory_place {
        MemoryPlace::Host(address) => transfer_host(py, bytes, max_piece(bytes), "Cannot write", at, |done, len| {
            let from = (address + skip + done) as *const u8;
            // SAFETY: memory of an object that `buffer` keeps; the range ends with it.
            unsafe {
                match at {
                    Some(at) => linux::pwrite(fd, from, len, at + done as u64),
                    None => linux::write(fd, from, len),
                }
            }
        }),
        MemoryPlace::Device(mut from) => {
            from.address += skip as u64;
            let order = buffer.order;
            transfer_device(py, || {
                let _chosen = StreamScope::new(order);
                client::write(fd, at, from, bytes)
            })
        }
    }
}

/// How `spinio` classifies an object's memory.
///
/// A dictionary: device ("cpu", "cuda:0", "emulated:0"), address, bytes, and the handle of the stream that transfers of
/// the array are ordered with; None if it gives none. A BufferError or TypeError reports why the memory cannot be read
/// into or written from.
#[pyfunction]
pub(crate) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let buffer = Buffer::from_object(object, Access::Drain)?;
    let said = PyDict::new(object.py());
    let (device, address) = match buffer.memory_place {
        MemoryPlace::Host(address) => ("cpu".to_owned(), address as u64),
        MemoryPlace::Device(target) => (target.device(), target.address),
    };
    said.set_item("device", device)?;
    said.set_item("address", address)?;
    said.set_item("bytes", buffer.bytes)?;
    let stream = match buffer.order {
        crate::described::ReadOrder::On(queue) => Some(queue.0),
        crate::described::ReadOrder::Synchronous => None,
    };
    said.set_item("stream", stream)?;
    Ok(said)
}

fn parse_offset(offset: Option<i64>) -> PyResult<Option<u64>> {
    let start = offset.map(u64::try_from).transpose();
    start.map_err(|_| {
        PyOSError::new_err((Errno::INVAL.raw_os_error(), format!("Offset {} is negative", offset.unwrap_or(0))))
    })
}

/// Host memory: one system call, or several of `piece` bytes. Signal handlers run in between, as in all of Python's own
/// calls.
fn transfer_host(
    py: Python<'_>,
    bytes: usize,
    piece: usize,
    what: &str,
    at: Option<u64>,
    call: impl Fn(usize, usize) -> Result<usize, Errno> + Sync,
) -> PyResult<Option<usize>> {
    let mut done = 0;
    loop {
        // None: it is time to check for signals.
        let ended = py.detach(|| {
            let begun = Instant::now();
            while begun.elapsed() < CHECK_INTERVAL {
                let len = piece.min(bytes - done);
                match call(done, len) {
                    Ok(got) => {
                        done += got;
                        if got < len || done == bytes {
                            return Some(Ok(()));
                        }
                    }
                    Err(Errno::INTR) => return None,
                    Err(errno) => return Some(Err(errno)),
                }
            }
            None
        });
        match ended {
            None => py.check_signals()?,
            Some(Ok(())) => return Ok(Some(done)),
            Some(Err(_)) if done > 0 => return Ok(Some(done)),
            Some(Err(Errno::AGAIN)) => return Ok(None),
            Some(Err(errno)) => {
                let place = at.map_or_else(String::new, |at| format!(" at offset {at}"));
                return Err(failure::errno_error(errno, &format!("{what} {bytes} bytes{place}")));
            }
        }
    }
}

/// Device memory, likewise.
fn transfer_device(py: Python<'_>, call: impl Fn() -> Result<usize, Error> + Sync) -> PyResult<Option<usize>> {
    loop {
        match signals::run_interruptible(py, &call)? {
            Ok(got) => return Ok(Some(got)),
            Err(e) if e.errno == Errno::INTR.raw_os_error() => py.check_signals()?,
            Err(e) if e.errno == Errno::AGAIN.raw_os_error() => return Ok(None),
            Err(e) => return Err(failure::request_error(&e)),
        }
    }
}
