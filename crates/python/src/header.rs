//! The safetensors header, for Python.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::safetensors::{self, HeaderError};

pyo3::create_exception!(spinio, SafetensorsError, PyValueError, "The file is not a valid safetensors file.");

/// The free-form metadata, if any: names and texts.
type Metadata = Option<Vec<(String, String)>>;

/// Name, dtype, shape, first byte and end, counted from the end of the header.
type Tensor = (String, &'static str, Vec<u64>, u64, u64);

/// The length of the header, from the first 8 bytes of a file of `file` bytes.
#[pyfunction]
pub(crate) fn header_len(prefix: &[u8], file: u64) -> PyResult<u64> {
    safetensors::header_len(prefix, file).map_err(to_value_error)
}

/// The contents of the header, all of it checked; `data` is the number of bytes after it.
#[pyfunction]
pub(crate) fn parse(py: Python<'_>, text: &[u8], data: u64) -> PyResult<(Metadata, Vec<Tensor>)> {
    let header = py.detach(|| safetensors::parse(text, data)).map_err(to_value_error)?;
    let tensors = header.tensors.into_iter().map(|t| (t.name, t.dtype, t.shape, t.begin, t.end)).collect();
    Ok((header.metadata, tensors))
}

fn to_value_error(error: HeaderError) -> PyErr {
    SafetensorsError::new_err(error.to_string())
}
