//! NVMMU's sessions, for Python.

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyBufferError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_device::Wait;
use spinio_io::settings::SMALL;
use spinio_io::{Target, runtime};
use spinio_nvmmu::{Direction, Error, Report, Session};

use crate::buffer::{Access, Buffer, Place};
use crate::stream::Chosen;

/// Moves between files and devices, from its making to `end`.
#[pyclass(frozen, module = "spinio._spinio", name = "NvmmuSession")]
pub(crate) struct Moves {
    /// Locked without the GIL only: who waits for it must not keep others from ending their move.
    session: Mutex<Option<Session>>,
}

#[pymethods]
impl Moves {
    #[new]
    #[pyo3(signature = (output=None))]
    fn new(py: Python<'_>, output: Option<PathBuf>) -> PyResult<Moves> {
        let session = py.detach(|| Session::begin(runtime(), output.as_deref())).map_err(|e| failed(&e))?;
        Ok(Moves { session: Mutex::new(Some(session)) })
    }

    /// Says where downloads to the output will go.
    fn expect(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with(py, |session| {
            session.expect(offset, bytes);
            Ok(())
        })
    }

    /// Fills an array from a file; the bytes moved.
    fn upload(&self, path: PathBuf, into: &Bound<'_, PyAny>, offset: u64) -> PyResult<u64> {
        let buffer = Buffer::of(into, Access::Fill)?;
        let Some(to) = memory(&buffer)? else { return Ok(0) };
        let (len, order) = (buffer.bytes, buffer.order);
        self.with(into.py(), |session| {
            let chosen = Chosen::new(order);
            let at = to.addr.0 as *mut c_void;
            let moved = session.move_range(&path, at, offset, len as u64, Direction::Upload)?;
            if chosen.settle && len <= SMALL {
                let device = to.allocation.device;
                let late = |e| spinio_io::Error::device(e, "upload", offset, len as u64);
                let drained = device.drain(device.program_queue().0, Wait::Context).map_err(late);
                drained.map_err(|e| {
                    Error::new(spinio_nvmmu::ErrorKind::Failed(e.kind.errno()), "upload", e.to_string())
                        .of(&path)
                        .at(offset, len as u64)
                })?;
            }
            Ok(moved)
        })
    }

    /// Brings an array to a file, or to the output; the bytes moved.
    fn download(&self, from: &Bound<'_, PyAny>, path: Option<PathBuf>, offset: u64) -> PyResult<u64> {
        let buffer = Buffer::of(from, Access::Drain)?;
        let Some(from_device) = memory(&buffer)? else { return Ok(0) };
        let (len, order) = (buffer.bytes, buffer.order);
        self.with(from.py(), |session| {
            let no_output = || {
                let why = "the session has no output: name a file";
                Error::new(spinio_nvmmu::ErrorKind::UnknownDirection, "download", why)
            };
            let path = path.clone().or_else(|| session.output()).ok_or_else(no_output)?;
            let _chosen = Chosen::new(order);
            let at = from_device.addr.0 as *mut c_void;
            session.move_range(&path, at, offset, len as u64, Direction::Download)
        })
    }

    /// Writes what is still gathered.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Session::flush)
    }

    /// As `flush`, and waits until the storage has it.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Session::sync)
    }

    /// What was done so far.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dictionary(py, &self.with(py, |session| Ok(session.report()))?)
    }

    /// Ends: everything is in the files. What was done; None if it had ended.
    fn end<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let report = py.detach(|| {
            let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
            session.map(Session::end).transpose()
        });
        report.map_err(|e| failed(&e))?.map(|report| dictionary(py, &report)).transpose()
    }
}

impl Moves {
    fn with<T: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut Session) -> Result<T, Error> + Send) -> PyResult<T> {
        let done = py.detach(|| {
            let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
            session.as_mut().map(body)
        });
        done.ok_or_else(|| PyValueError::new_err("The session has ended"))?.map_err(|e| failed(&e))
    }
}

impl Drop for Moves {
    fn drop(&mut self) {
        let session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // What it still has is written, which others need not wait for.
        if let Some(session) = session {
            Python::attach(|py| py.detach(|| drop(session)));
        }
    }
}

/// The device memory of an array; `None` if it has no byte.
fn memory(buffer: &Buffer<'_>) -> PyResult<Option<Target>> {
    match buffer.place {
        _ if buffer.bytes == 0 => Ok(None),
        Place::Device(target) => Ok(Some(target)),
        Place::Host(_) => Err(PyBufferError::new_err(
            "NVMMU moves between files and devices, and this memory is the host's: spinio.open() reads and writes it",
        )),
    }
}

fn dictionary<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let said = PyDict::new(py);
    said.set_item("uploaded", report.uploaded)?;
    said.set_item("downloaded", report.downloaded)?;
    said.set_item("promise", report.promise.to_string())?;
    said.set_item("whole", report.whole)?;
    said.set_item("neighbours", report.neighbours)?;
    said.set_item("loose", report.loose)?;
    said.set_item("read_ahead", report.read_ahead)?;
    said.set_item("read_late", report.read_late)?;
    Ok(said)
}

fn failed(error: &Error) -> PyErr {
    let number = error.kind.errno().raw_os_error();
    match &error.path {
        Some(path) => PyOSError::new_err((number, error.to_string(), path.clone().into_os_string())),
        None => PyOSError::new_err((number, error.to_string())),
    }
}
