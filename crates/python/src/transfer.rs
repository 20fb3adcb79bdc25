//! Bytes between a file and a Python object's memory, without the GIL.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_device::Wait;
use spinio_io::settings::SMALL;
use spinio_io::{ErrorKind, Target, runtime};
use spinio_sys::{Errno, linux};

use crate::buffer::{Access, Buffer, Place};
use crate::failure;
use crate::stream::Chosen;

/// What the kernel moves in a call at most; longer transfers of host memory go by pieces.
const MOST: usize = 0x7fff_f000;
const PIECE: usize = 1 << 30;

/// A device read at an offset goes by pieces of this size, so that a signal's handler runs now and then.
const DEVICE_PIECE: usize = 4 << 30;

/// Fills `into` from the file, at `offset` or, with None, where the descriptor stands. Returns the bytes read, or None
/// where a descriptor that does not wait has none. `wait`: until they have arrived, however few they are. `piece`: for
/// tests.
#[pyfunction]
#[pyo3(signature = (fd, into, offset=None, *, wait=false, piece=DEVICE_PIECE))]
pub(crate) fn read(
    fd: i32,
    into: &Bound<'_, PyAny>,
    offset: Option<i64>,
    wait: bool,
    piece: usize,
) -> PyResult<Option<usize>> {
    let py = into.py();
    let at = start(offset)?;
    let buffer = Buffer::of(into, Access::Fill)?;
    match buffer.place {
        Place::Host(address) => host(py, buffer.bytes, "Cannot read", at, |done, len| {
            let to = (address + done) as *mut u8;
            // SAFETY: writable memory of an object that `buffer` keeps; the range ends with it.
            unsafe {
                match at {
                    Some(at) => linux::pread(fd, to, len, at + done as u64),
                    None => linux::read(fd, to, len),
                }
            }
        }),
        Place::Device(to) => fill(py, fd, at, to, &buffer, wait, piece),
    }
}

/// Device memory, by pieces; between two of them a signal's handler runs.
fn fill(
    py: Python<'_>,
    fd: i32,
    at: Option<u64>,
    to: Target,
    buffer: &Buffer<'_>,
    wait: bool,
    piece: usize,
) -> PyResult<Option<usize>> {
    let (order, bytes) = (buffer.order, buffer.bytes);
    // At the descriptor's own offset other readers would come in between.
    let piece = if at.is_some() { piece.max(1) } else { bytes };
    let mut done = 0;
    loop {
        let len = piece.min(bytes - done);
        let got = device(py, || {
            let chosen = Chosen::new(order);
            let at = at.map(|at| at + done as u64);
            let to = Target { addr: to.addr.offset(done as u64), ..to };
            let got = runtime().read(fd, at, to, len)?;
            // The end of a large read may be small, and must have arrived all the same.
            if (wait || chosen.settle || done > 0) && len <= SMALL {
                let device = to.allocation.device;
                let late = |e| spinio_io::Error::device(e, "read", at.unwrap_or(0), len as u64);
                device.drain(device.program_queue().0, Wait::Context).map_err(late)?;
            }
            Ok(got)
        });
        let got = match got {
            Ok(Some(got)) => got,
            // What was read before counts; the next call says what is wrong.
            Ok(None) if done > 0 => return Ok(Some(done)),
            Err(e) if done > 0 && e.is_instance_of::<PyOSError>(py) => return Ok(Some(done)),
            ended => return ended,
        };
        done += got;
        if got < len || done == bytes {
            return Ok(Some(done));
        }
        py.check_signals()?;
    }
}

/// Writes the bytes of `from` to the file, at `offset` or where the descriptor stands. Returns the bytes written, or None
/// where a descriptor that does not wait takes none.
#[pyfunction]
#[pyo3(signature = (fd, from, offset=None))]
pub(crate) fn write(fd: i32, from: &Bound<'_, PyAny>, offset: Option<i64>) -> PyResult<Option<usize>> {
    let py = from.py();
    let at = start(offset)?;
    let buffer = Buffer::of(from, Access::Drain)?;
    match buffer.place {
        Place::Host(address) => host(py, buffer.bytes, "Cannot write", at, |done, len| {
            let from = (address + done) as *const u8;
            // SAFETY: memory of an object that `buffer` keeps; the range ends with it.
            unsafe {
                match at {
                    Some(at) => linux::pwrite(fd, from, len, at + done as u64),
                    None => linux::write(fd, from, len),
                }
            }
        }),
        Place::Device(from) => {
            let order = buffer.order;
            device(py, || {
                let _chosen = Chosen::new(order);
                runtime().write(fd, at, from, buffer.bytes)
            })
        }
    }
}

/// What `spinio` takes an object's memory for.
///
/// A dictionary: device ("cpu", "cuda:0", "emulated:0"), address, bytes, and the handle of the stream that transfers of the
/// array are ordered with; None where it names none. A BufferError or TypeError says why it is no memory to read into or
/// write out of.
#[pyfunction]
pub(crate) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let buffer = Buffer::of(object, Access::Drain)?;
    let said = PyDict::new(object.py());
    let (device, address) = match buffer.place {
        Place::Host(address) => ("cpu".to_owned(), address as u64),
        Place::Device(target) => (target.allocation.device.id().to_string(), target.addr.0),
    };
    said.set_item("device", device)?;
    said.set_item("address", address)?;
    said.set_item("bytes", buffer.bytes)?;
    let stream = match buffer.order {
        crate::buffer::Order::On(queue) => Some(queue.0),
        crate::buffer::Order::Arrived => None,
    };
    said.set_item("stream", stream)?;
    Ok(said)
}

fn start(offset: Option<i64>) -> PyResult<Option<u64>> {
    let start = offset.map(u64::try_from).transpose();
    start.map_err(|_| {
        PyOSError::new_err((Errno::INVAL.raw_os_error(), format!("Offset {} is negative", offset.unwrap_or(0))))
    })
}

/// Host memory: one kernel call, or several where the kernel's bound is passed. A signal's handler runs in between, as
/// it does in all of Python's own calls.
fn host(
    py: Python<'_>,
    bytes: usize,
    what: &str,
    at: Option<u64>,
    call: impl Fn(usize, usize) -> Result<usize, Errno> + Sync,
) -> PyResult<Option<usize>> {
    let mut done = 0;
    loop {
        let len = if bytes <= MOST { bytes } else { PIECE.min(bytes - done) };
        match py.detach(|| call(done, len)) {
            Ok(got) => {
                done += got;
                if got < len || done == bytes {
                    return Ok(Some(done));
                }
            }
            Err(Errno::INTR) => py.check_signals()?,
            Err(_) if done > 0 => return Ok(Some(done)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => {
                let place = at.map_or_else(String::new, |at| format!(" at offset {at}"));
                return Err(failure::kernel(errno, &format!("{what} {bytes} bytes{place}")));
            }
        }
    }
}

/// Device memory, likewise.
fn device(py: Python<'_>, call: impl Fn() -> Result<usize, spinio_io::Error> + Sync) -> PyResult<Option<usize>> {
    loop {
        match py.detach(&call) {
            Ok(got) => return Ok(Some(got)),
            Err(e) if e.kind == ErrorKind::Kernel(Errno::INTR) => py.check_signals()?,
            Err(e) if e.kind == ErrorKind::Kernel(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(failure::request(&e)),
        }
    }
}
