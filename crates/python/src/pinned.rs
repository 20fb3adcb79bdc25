//! Pinned files: their pages stay registered with a device.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use spinio_runtime::client::{self, Map, Target};

use crate::buffer::{Access, Buffer, MemoryPlace};
use crate::failure;

/// Pins the file of a descriptor for the device of `like`, or for the device in use. Returns the generation of its pins.
#[pyfunction]
#[pyo3(signature = (fd, like=None))]
pub(crate) fn pin_file(py: Python<'_>, fd: i32, like: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
    let device = device_of(like)?;
    py.detach(|| client::pin_file(fd, device)).map_err(|e| failure::request_error(&e))
}

/// Undoes one `pin_file` of a generation; ESTALE if its pins are gone.
#[pyfunction]
pub(crate) fn unpin_file(py: Python<'_>, fd: i32, generation: u64) -> PyResult<()> {
    py.detach(|| client::unpin_file(fd, generation)).map_err(|e| failure::request_error(&e))
}

/// Whether the file is pinned, and no process waits to write it.
#[pyfunction]
pub(crate) fn is_pinned(py: Python<'_>, fd: i32) -> bool {
    py.detach(|| client::is_pinned(fd))
}

/// A range of a pinned file, at an address that GPU kernels read.
#[pyclass(frozen, module = "spinio._spinio")]
pub(crate) struct DeviceMapping {
    range: Mutex<Option<Map>>,
}

#[pymethods]
impl DeviceMapping {
    #[new]
    #[pyo3(signature = (fd, offset, bytes, like=None))]
    fn new(
        py: Python<'_>,
        fd: i32,
        offset: u64,
        bytes: u64,
        like: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<DeviceMapping> {
        let device = device_of(like)?;
        let range = py.detach(|| Map::new(fd, offset, bytes, device)).map_err(|e| failure::request_error(&e))?;
        Ok(DeviceMapping { range: Mutex::new(Some(range)) })
    }

    /// Address and bytes.
    #[getter]
    fn place(&self) -> PyResult<(u64, u64)> {
        self.with_mapping(|range| (range.address(), range.len()))
    }

    /// Whether a process waits to write the file.
    #[getter]
    fn revoke_requested(&self) -> PyResult<bool> {
        self.with_mapping(Map::revoke_requested)
    }

    /// Unmaps. In a forked child only the child's record of the mapping is dropped; the parent keeps using it.
    fn unmap(&self, py: Python<'_>) {
        let range = self.range.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(range));
    }
}

impl DeviceMapping {
    fn with_mapping<T>(&self, query: impl FnOnce(&Map) -> T) -> PyResult<T> {
        let range = self.range.lock().unwrap_or_else(PoisonError::into_inner);
        match range.as_ref() {
            None => Err(failure::not_mapped(false)),
            Some(range) if !range.is_own_process() => Err(failure::not_mapped(true)),
            Some(range) => Ok(query(range)),
        }
    }
}

/// The memory of an array, for its device. None: the device in use, the current context's or the emulated one.
fn device_of(like: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Target>> {
    let Some(like) = like else { return Ok(None) };
    match Buffer::from_object(like, Access::Drain)?.memory_place {
        MemoryPlace::Device(target) => Ok(Some(target)),
        MemoryPlace::Host(_) => {
            Err(PyValueError::new_err("Files are pinned for a device, and this array is in host memory"))
        }
    }
}
