//! The buffer protocol: `bytearray`, `memoryview`, `array`, `mmap`, NumPy.

use pyo3::prelude::*;

use crate::described::{BufferGuard, Described, Location, ReadOrder, references_error};
use crate::view::View;

/// Whether elements of this format (PEP 3118) contain references to objects: an `O` outside the field names, which are
/// between colons.
fn has_object_fields(format: &[u8]) -> bool {
    format.split(|&c| c == b':').step_by(2).any(|codes| codes.contains(&b'O'))
}

/// The memory of an object that has the buffer protocol; `None` if it does not.
pub(crate) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
    let Some(view) = View::of(object)? else { return Ok(None) };
    if view.format().is_some_and(has_object_fields) {
        return Err(references_error(object));
    }
    Ok(Some(Described {
        address: view.address(),
        bytes: view.bytes(),
        contiguous: view.is_contiguous(),
        readonly: view.is_readonly(),
        location: Location::Host,
        order: ReadOrder::Synchronous,
        keep: BufferGuard::View(view),
    }))
}
