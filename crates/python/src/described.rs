//! The memory of an object, as its protocol describes it; one type for all protocols.

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use spinio_runtime::client::Stream;

use crate::view::View;

/// The memory that an object claims to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// Host memory.
    Host,
    /// Device memory.
    Device,
}

/// How later work on the device is ordered after a read that is only queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadOrder {
    /// The read is queued on this stream, on which the object's framework works now.
    On(Stream),
    /// The stream of that work is unknown: the read waits for its copies.
    Synchronous,
}

/// Keeps the memory alive and at its address; dropped when the transfer is complete.
pub(crate) enum BufferGuard<'py> {
    /// A reference is enough.
    Object(Bound<'py, PyAny>),
    /// A view, which has to be released.
    View(#[expect(dead_code, reason = "kept alive, not read")] View<'py>),
    /// A tensor, which has to be released.
    Tensor(dlpark::python::ImportedDlpack),
}

/// The memory of an object, in the same terms for all protocols.
pub(crate) struct Described<'py> {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) contiguous: bool,
    pub(crate) readonly: bool,
    pub(crate) location: Location,
    pub(crate) order: ReadOrder,
    pub(crate) keep: BufferGuard<'py>,
}

/// The type of an object, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "The object".into(), |name| name.to_string())
}

/// Bytes of a file must not become references: following one would access arbitrary memory.
pub(crate) fn references_error(object: &Bound<'_, PyAny>) -> PyErr {
    PyBufferError::new_err(format!(
        "Elements of this {} are references to objects in memory, not bytes that a file could hold",
        type_name(object)
    ))
}

/// Whether the elements of an array are contiguous, in C order. `strides` are in bytes (`unit` is the size of an
/// element) or in elements (`unit` is 1).
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

/// The size of an array in bytes; `element` is the size of an element.
pub(crate) fn total_bytes(shape: &[i64], element: usize) -> PyResult<usize> {
    let count = shape.iter().try_fold(element, |n, &length| n.checked_mul(usize::try_from(length).ok()?));
    count
        .filter(|&n| n <= isize::MAX as usize)
        .ok_or_else(|| PyValueError::new_err(format!("An array of shape {shape:?} cannot be: it has no such size")))
}
