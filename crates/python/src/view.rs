//! A view of an object that has the buffer protocol.
//!
//! The protocol is part of Python's stable ABI since 3.11. The functions and the structure are the same in 3.10, which
//! exports them too, so they are declared here and one wheel serves all versions.

#![expect(unsafe_code, reason = "buffers of other Python objects")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use pyo3::ffi::PyObject;
use pyo3::prelude::*;

/// `Py_buffer`
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_IsContiguous(view: *const PyBuffer, order: c_char) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
}

/// `PyBUF_FULL_RO`: any memory, so that an error can report what is wrong with it.
const FULL_RO: c_int = 0x0100 | 0x0010 | 0x0008 | 0x0004;

/// A view, released when it is dropped.
pub(crate) struct View<'py> {
    // Boxed: exporters may keep its address.
    view: Box<PyBuffer>,
    _py: Python<'py>,
}

impl<'py> View<'py> {
    /// A view of an object; `None` if it does not have the protocol.
    pub(crate) fn of(object: &Bound<'py, PyAny>) -> PyResult<Option<View<'py>>> {
        let py = object.py();
        // SAFETY: a live object, under the GIL.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let mut view = Box::new(PyBuffer {
            buf: ptr::null_mut(),
            obj: ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 1,
            ndim: 0,
            format: ptr::null_mut(),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        });
        // SAFETY: a live object and a structure of the layout above, under the GIL.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &mut *view, FULL_RO) } != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(Some(View { view, _py: py }))
    }

    /// Its address.
    pub(crate) fn address(&self) -> usize {
        self.view.buf as usize
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.view.len.max(0) as usize
    }

    /// Whether it is contiguous, in C order.
    pub(crate) fn is_contiguous(&self) -> bool {
        // SAFETY: filled in by PyObject_GetBuffer.
        unsafe { PyBuffer_IsContiguous(&*self.view, b'C' as c_char) != 0 }
    }

    /// Whether it must not be written.
    pub(crate) fn is_readonly(&self) -> bool {
        self.view.readonly != 0
    }

    /// The format of its elements (PEP 3118), if it has one.
    pub(crate) fn format(&self) -> Option<&[u8]> {
        // SAFETY: NULL, for bytes, or a string that is valid as long as the view.
        (!self.view.format.is_null()).then(|| unsafe { CStr::from_ptr(self.view.format) }.to_bytes())
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // SAFETY: filled in by PyObject_GetBuffer and released once, under the GIL, which `_py` stands for.
        unsafe { PyBuffer_Release(&mut *self.view) }
    }
}
