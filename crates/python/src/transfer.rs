//! Bytes between a file and a Python object's memory, without the GIL.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_device::Wait;
use spinio_io::settings::SMALL;
use spinio_io::{ErrorKind, runtime};
use spinio_sys::{Errno, linux};

use crate::buffer::{Access, Buffer, Place};
use crate::failure;
use crate::stream::Chosen;

/// What the kernel moves in a call at most; longer transfers of host memory go by pieces.
const MOST: usize = 0x7fff_f000;
const PIECE: usize = 1 << 30;

/// Fills `into` from the file, at `offset` or, with None, where the descriptor stands. Returns the bytes read, or None
/// where a descriptor that does not wait has none. `wait`: until they have arrived, however few they are.
#[pyfunction]
#[pyo3(signature = (fd, into, offset=None, *, wait=false))]
pub(crate) fn read(fd: i32, into: &Bound<'_, PyAny>, offset: Option<i64>, wait: bool) -> PyResult<Option<usize>> {
    let py = into.py();
    let at = start(offset)?;
    let buffer = Buffer::of(into, Access::Fill)?;
    match buffer.place {
        Place::Host(address) => host(py, buffer.bytes, "Cannot read", |done, len| {
            let to = (address + done) as *mut u8;
            // SAFETY: writable memory of an object that `buffer` keeps; the range ends with it.
            unsafe {
                match at {
                    Some(at) => linux::pread(fd, to, len, at + done as u64),
                    None => linux::read(fd, to, len),
                }
            }
        }),
        Place::Device(to) => {
            let order = buffer.order;
            device(py, || {
                let chosen = Chosen::new(order);
                let got = runtime().read(fd, at, to, buffer.bytes)?;
                if (wait || chosen.settle) && buffer.bytes <= SMALL {
                    let device = to.allocation.device;
                    let late = |e| spinio_io::Error::device(e, "read", at.unwrap_or(0), buffer.bytes as u64);
                    device.drain(device.program_queue().0, Wait::Context).map_err(late)?;
                }
                Ok(got)
            })
        }
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
        Place::Host(address) => host(py, buffer.bytes, "Cannot write", |done, len| {
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

/// What `spinio` takes an object's memory for: device, address, bytes, stream.
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
            Err(errno) => return Err(failure::kernel(errno, &format!("{what} {bytes} bytes"))),
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
