//! What memory a Python object stands for.

use std::sync::OnceLock;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use spinio_runtime::client::{Stream, Target};

use crate::{dlpack, interface, pybuffer, tensor};

/// The process that loaded the module.
static LOADED_PID: OnceLock<u32> = OnceLock::new();

/// Remembers it.
pub(crate) fn record_pid() {
    LOADED_PID.get_or_init(std::process::id);
}

/// What the caller will do with it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Bytes are put into it.
    Fill,
    /// Bytes are taken out of it.
    Drain,
}

/// Where the bytes are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryPlace {
    /// Memory of the host.
    Host(usize),
    /// Memory of a device.
    Device(Target),
}

/// What an object says about its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// The host's.
    Host,
    /// A device's.
    Device,
}

/// When work that follows on the device will see a read that is only queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadOrder {
    /// Work that goes to this queue: the object's framework works there now.
    On(Stream),
    /// Nobody said where that work goes: the bytes must have arrived.
    Synchronous,
}

/// What keeps the memory alive and where it is; dropped when the transfer is over.
pub(crate) enum BufferGuard<'py> {
    /// A reference is enough.
    Object(Bound<'py, PyAny>),
    /// A view that the exporter must be told the end of.
    View(#[expect(dead_code, reason = "held, not looked at")] pybuffer::View<'py>),
    /// A tensor that the exporter must be told the end of.
    Tensor(dlpark::python::ImportedDlpack),
}

/// What keeps device memory alive for longer than a call.
pub(crate) enum OwnedGuard {
    /// A reference.
    Object(#[expect(dead_code, reason = "held, not looked at")] Py<PyAny>),
    /// A tensor that the exporter must be told the end of.
    Tensor(#[expect(dead_code, reason = "held, not looked at")] dlpark::python::ImportedDlpack),
    /// There is nothing to keep.
    None,
}

/// What an object of any protocol says of itself, in common terms.
pub(crate) struct Described<'py> {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) contiguous: bool,
    pub(crate) readonly: bool,
    pub(crate) location: Location,
    pub(crate) order: ReadOrder,
    pub(crate) keep: BufferGuard<'py>,
}

/// The memory of an object, found and checked.
pub(crate) struct Buffer<'py> {
    pub(crate) memory_place: MemoryPlace,
    pub(crate) bytes: usize,
    pub(crate) order: ReadOrder,
    keep: BufferGuard<'py>,
}

impl<'py> Buffer<'py> {
    /// The memory that `object` means, by the first protocol it speaks.
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
            // Nothing is nobody's; its address need not be one.
            _ if found.bytes == 0 => MemoryPlace::Host(1),
            Location::Host => MemoryPlace::Host(found.address),
            Location::Device => MemoryPlace::Device(device_memory(object, found.address, found.bytes)?),
        };
        Ok(Buffer { memory_place: place, bytes: found.bytes, order: found.order, keep: found.keep })
    }
}

impl Buffer<'_> {
    /// What keeps device memory alive; of the host's there is none that outlasts the call.
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
        // NumPy cannot say in this protocol what the elements of some arrays are (bfloat16, dates); it can in its own.
        Err(error) => return interface::describe_host(object)?.map(Some).ok_or(error),
    }
    if let Some(found) = dlpack::describe(object)? {
        return Ok(Some(found));
    }
    interface::describe_host(object)
}

/// The device that owns the memory an object says is a device's.
fn device_memory(object: &Bound<'_, PyAny>, address: usize, bytes: usize) -> PyResult<Target> {
    let Some(target) = Target::find(address as u64, bytes) else {
        let forked = LOADED_PID.get().is_some_and(|process| *process != std::process::id());
        let why = if forked { ": a forked process has no device memory, its parent has" } else { "" };
        return Err(PyBufferError::new_err(format!(
            "{} says that its memory at {address:#x} is a device's, but no device knows that address{why}",
            type_name(object)
        )));
    };
    let room = target.room();
    if room < bytes as u64 {
        return Err(PyValueError::new_err(format!(
            "{} says that it has {bytes} bytes at {address:#x}, but its device memory ends after {room}",
            type_name(object)
        )));
    }
    Ok(target)
}

/// The type of an object, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "The object".into(), |name| name.to_string())
}

/// Bytes of a file must not become references: whoever follows one goes anywhere.
pub(crate) fn references_error(object: &Bound<'_, PyAny>) -> PyErr {
    PyBufferError::new_err(format!(
        "Elements of this {} are references to objects in memory, not bytes that a file could hold",
        type_name(object)
    ))
}

/// Whether elements of `shape` lie one after another, in the order of C. `strides` count what `unit` counts: bytes
/// (`unit` is an element's) or elements (`unit` is 1).
pub(crate) fn is_contiguous(shape: &[i64], strides: &[i64], unit: i64) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = unit;
    for (&length, &stride) in shape.iter().zip(strides).rev() {
        if length != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(length);
    }
    true
}

/// The bytes of so many elements of so many bytes each.
pub(crate) fn total_bytes(shape: &[i64], element: usize) -> PyResult<usize> {
    let count = shape.iter().try_fold(element, |n, &length| n.checked_mul(usize::try_from(length).ok()?));
    count
        .filter(|&n| n <= isize::MAX as usize)
        .ok_or_else(|| PyValueError::new_err(format!("An array of shape {shape:?} cannot be: it has no such size")))
}
