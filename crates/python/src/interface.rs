//! `__cuda_array_interface__` (CuPy, Numba, RAPIDS) and NumPy's `__array_interface__`, which is the same dictionary for
//! host memory.

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client::Stream;

use crate::described::{BufferGuard, Described, Location, ReadOrder, is_contiguous, references_error, total_bytes};

/// Device memory.
pub(crate) fn describe_device<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
    let Some(said) = object.getattr_opt("__cuda_array_interface__")? else { return Ok(None) };
    let said = said.cast_into::<PyDict>()?;
    let mut described = parse(object, &said, "__cuda_array_interface__", Location::Device)?;
    // This stream has the work in flight on the array, and will have the next. If no stream is given, no work is in
    // flight, and the framework's next work may be on any stream.
    if let Some(stream) = said.get_item("stream")?.filter(|s| !s.is_none()) {
        described.order = match stream.extract::<u64>()? {
            0 => return Err(PyValueError::new_err("__cuda_array_interface__ names stream 0, which means none")),
            // The legacy default stream has a second name.
            1 => ReadOrder::On(Stream(0)),
            stream => ReadOrder::On(Stream(stream)),
        };
    }
    Ok(Some(described))
}

/// Host memory.
pub(crate) fn describe_host<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
    let Some(said) = object.getattr_opt("__array_interface__")? else { return Ok(None) };
    parse(object, &said.cast_into::<PyDict>()?, "__array_interface__", Location::Host).map(Some)
}

fn parse<'py>(
    object: &Bound<'py, PyAny>,
    interface: &Bound<'py, PyDict>,
    protocol: &str,
    claim: Location,
) -> PyResult<Described<'py>> {
    let part = |name: &str| {
        interface.get_item(name)?.ok_or_else(|| PyBufferError::new_err(format!("{protocol} has no \"{name}\"")))
    };
    if interface.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
        return Err(PyBufferError::new_err("A masked array is more than its bytes: pass data and mask one by one"));
    }
    let shape: Vec<i64> = part("shape")?.extract()?;
    // "<f4", "|V8", "<M8[s]": byte order, kind, bytes of an element, unit. "<U8": characters of an element, which have 4
    // bytes each.
    let typestr: String = part("typestr")?.extract()?;
    if typestr.get(1..2) == Some("O") {
        return Err(references_error(object));
    }
    let digits = typestr.get(2..).map(|rest| rest.split_once('[').map_or(rest, |(digits, _)| digits));
    let unit = if typestr.get(1..2) == Some("U") { 4 } else { 1 };
    let element = digits.and_then(|digits| digits.parse::<usize>().ok()?.checked_mul(unit));
    let element = element.filter(|_| is_plain_type(&typestr));
    let element =
        element.ok_or_else(|| PyBufferError::new_err(format!("{protocol} has the unknown type \"{typestr}\"")))?;
    let fields = interface.get_item("descr")?.filter(|fields| !fields.is_none());
    if fields.is_some_and(|fields| !are_plain_fields(&fields)) {
        return Err(references_error(object));
    }
    let bytes = total_bytes(&shape, element)?;
    let contiguous = match interface.get_item("strides")?.filter(|s| !s.is_none()) {
        None => true,
        Some(strides) => {
            let strides: Vec<i64> = strides.extract()?;
            if strides.len() != shape.len() {
                return Err(PyValueError::new_err(format!("{protocol} has strides {strides:?} for shape {shape:?}")));
            }
            is_contiguous(&shape, &strides, element as i64)
        }
    };
    let (address, readonly): (usize, bool) = part("data")?.extract()?;
    Ok(Described {
        address,
        bytes,
        contiguous,
        readonly,
        location: claim,
        order: ReadOrder::Synchronous,
        keep: BufferGuard::Object(object.clone()),
    })
}

/// Whether elements of a type ("<f4") consist of plain bytes. Others are references to objects, bits ("t"), or unknown.
fn is_plain_type(typestr: &str) -> bool {
    typestr.get(1..2).is_some_and(|kind| "biufcmMSUV".contains(kind))
}

/// The same for the fields of a structure: name, type or nested fields, and perhaps a shape.
fn are_plain_fields(fields: &Bound<'_, PyAny>) -> bool {
    if let Ok(typestr) = fields.extract::<String>() {
        return is_plain_type(&typestr);
    }
    let Ok(mut fields) = fields.try_iter() else { return false };
    fields.all(|field| field.and_then(|field| field.get_item(1)).is_ok_and(|of| are_plain_fields(&of)))
}
