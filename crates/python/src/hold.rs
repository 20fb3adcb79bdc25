//! Held files: their pages stay registered with a device.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use spinio_runtime::client::{self, Map, Target};

use crate::buffer::{Access, Buffer, MemoryPlace};
use crate::failure;

/// Holds the file of a descriptor for the device of `like`, or for the one in use.
#[pyfunction]
#[pyo3(signature = (fd, like=None))]
pub(crate) fn hold(py: Python<'_>, fd: i32, like: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let device = device_of(like)?;
    py.detach(|| client::hold(fd, device)).map_err(|e| failure::request_error(&e))
}

/// Ends one `hold`.
#[pyfunction]
pub(crate) fn release(py: Python<'_>, fd: i32) -> PyResult<()> {
    py.detach(|| client::release(fd)).map_err(|e| failure::request_error(&e))
}

/// Whether the file is held, and nobody wants it back.
#[pyfunction]
pub(crate) fn is_held(py: Python<'_>, fd: i32) -> bool {
    py.detach(|| client::is_held(fd))
}

/// A range of a held file, at an address that kernels read.
#[pyclass(frozen, module = "spinio._spinio")]
pub(crate) struct Mapped {
    range: Mutex<Option<Map>>,
}

#[pymethods]
impl Mapped {
    #[new]
    #[pyo3(signature = (fd, offset, bytes, like=None))]
    fn new(py: Python<'_>, fd: i32, offset: u64, bytes: u64, like: Option<&Bound<'_, PyAny>>) -> PyResult<Mapped> {
        let device = device_of(like)?;
        let range = py.detach(|| Map::new(fd, offset, bytes, device)).map_err(|e| failure::request_error(&e))?;
        Ok(Mapped { range: Mutex::new(Some(range)) })
    }

    /// Address and bytes.
    #[getter]
    fn place(&self) -> PyResult<(u64, u64)> {
        self.with_mapping(|range| (range.address(), range.len()))
    }

    /// Whether somebody waits to write the file.
    #[getter]
    fn is_wanted_back(&self) -> PyResult<bool> {
        self.with_mapping(Map::is_wanted_back)
    }

    /// Ends it. In a forked child, whose parent goes on with it, only the child's knowledge of it.
    fn unmap(&self, py: Python<'_>) {
        let range = self.range.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(range));
    }
}

impl Mapped {
    fn with_mapping<T>(&self, query: impl FnOnce(&Map) -> T) -> PyResult<T> {
        let range = self.range.lock().unwrap_or_else(PoisonError::into_inner);
        match range.as_ref() {
            None => Err(PyValueError::new_err("The range is no longer mapped")),
            Some(range) if !range.is_here() => {
                Err(PyValueError::new_err("The range is mapped in the process that this one was forked from"))
            }
            Some(range) => Ok(query(range)),
        }
    }
}

/// The memory of an array, whose device is meant. None: the one in use, the current context's or the emulated one.
fn device_of(like: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Target>> {
    let Some(like) = like else { return Ok(None) };
    match Buffer::from_object(like, Access::Drain)?.memory_place {
        MemoryPlace::Device(target) => Ok(Some(target)),
        MemoryPlace::Host(_) => Err(PyValueError::new_err("Files are held for a device, and this array is the host's")),
    }
}
