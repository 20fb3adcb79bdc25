//! The memory of a Python object, found and checked.

use std::sync::OnceLock;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use spinio_runtime::client::Target;

use crate::described::{BufferGuard, Described, Location, ReadOrder, type_name};
use crate::{dlpack, interface, pybuffer, tensor};

/// The process that loaded the module.
static LOADED_PID: OnceLock<u32> = OnceLock::new();

/// Records the PID.
pub(crate) fn record_pid() {
    LOADED_PID.get_or_init(std::process::id);
}

/// The direction of the transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Bytes are written into it.
    Fill,
    /// Bytes are read from it.
    Drain,
}

/// The address of the bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryPlace {
    /// Memory of the host.
    Host(usize),
    /// Memory of a device.
    Device(Target),
}

/// What keeps device memory alive for longer than a call.
pub(crate) enum OwnedGuard {
    /// A reference.
    Object(#[expect(dead_code, reason = "kept alive, not read")] Py<PyAny>),
    /// A tensor, which has to be released.
    Tensor(#[expect(dead_code, reason = "kept alive, not read")] dlpark::python::ImportedDlpack),
    /// Nothing has to be kept.
    None,
}

/// The memory of an object, found and checked.
pub(crate) struct Buffer<'py> {
    pub(crate) memory_place: MemoryPlace,
    pub(crate) bytes: usize,
    pub(crate) order: ReadOrder,
    keep: BufferGuard<'py>,
}

impl<'py> Buffer<'py> {
    /// The memory of `object`, by the first protocol that it has.
    pub(crate) fn from_object(object: &Bound<'py, PyAny>, access: Access) -> PyResult<Buffer<'py>> {
        let Some(found) = described(object)? else {
            return Err(PyTypeError::new_err(format!(
                "{} is no memory: it has neither the buffer protocol, nor __cuda_array_interface__, nor __dlpack__",
                type_name(object)
            )));
        };
        if !found.contiguous {
            return Err(PyBufferError::new_err(format!(
                "{} is not C-contiguous, and files are: pass a contiguous one (torch: .contiguous(), \
                 NumPy and CuPy: ascontiguousarray()) or read part by part",
                type_name(object)
            )));
        }
        if found.readonly && access == Access::Fill {
            return Err(PyBufferError::new_err(format!("{} is read-only", type_name(object))));
        }
        let place = match found.location {
            // An empty array is on no device; the address need not be valid.
            _ if found.bytes == 0 => MemoryPlace::Host(1),
            Location::Host => MemoryPlace::Host(found.address),
            Location::Device => MemoryPlace::Device(device_memory(object, found.address, found.bytes)?),
        };
        Ok(Buffer { memory_place: place, bytes: found.bytes, order: found.order, keep: found.keep })
    }
}

impl Buffer<'_> {
    /// The object that keeps device memory alive; host memory has none that outlasts the call.
    pub(crate) fn keep(self) -> OwnedGuard {
        match self.keep {
            BufferGuard::Object(object) => OwnedGuard::Object(object.unbind()),
            BufferGuard::Tensor(tensor) => OwnedGuard::Tensor(tensor),
            BufferGuard::View(_) => OwnedGuard::None,
        }
    }
}

fn described<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
    if let Some(found) = tensor::describe(object)? {
        return Ok(Some(found));
    }
    // Before the buffer protocol, which CuPy's arrays have and refuse with an exception.
    if let Some(found) = interface::describe_device(object)? {
        return Ok(Some(found));
    }
    match pybuffer::describe(object) {
        Ok(Some(found)) => return Ok(Some(found)),
        Ok(None) => {}
        // NumPy cannot describe the elements of some arrays (bfloat16, dates) in this protocol; it can in its own.
        Err(error) => return interface::describe_host(object)?.map(Some).ok_or(error),
    }
    if let Some(found) = dlpack::describe(object)? {
        return Ok(Some(found));
    }
    interface::describe_host(object)
}

/// The device that owns memory which an object reports as device memory.
fn device_memory(object: &Bound<'_, PyAny>, address: usize, bytes: usize) -> PyResult<Target> {
    let Some(target) = Target::find(address as u64, bytes) else {
        let forked = LOADED_PID.get().is_some_and(|process| *process != std::process::id());
        let why = if forked { ": a forked process has no device memory, its parent has" } else { "" };
        return Err(PyBufferError::new_err(format!(
            "{} reports memory of a device at {address:#x}, but no device knows that address{why}",
            type_name(object)
        )));
    };
    let room = target.bytes_left();
    if room < bytes as u64 {
        return Err(PyValueError::new_err(format!(
            "{} reports {bytes} bytes at {address:#x}, but its device memory ends after {room}",
            type_name(object)
        )));
    }
    Ok(target)
}
