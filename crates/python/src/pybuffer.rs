//! The buffer protocol: `bytearray`, `memoryview`, `array`, `mmap`, NumPy.
//!
//! It belongs to the stable interface of Python from 3.11 on. The functions and the structure are the same in 3.10, where
//! they are exported too, so they are declared here and one wheel serves all.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use crate::buffer::{BufferGuard, Described, Location, ReadOrder, references_error};

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

/// `PyBUF_FULL_RO`: whatever it is, so that we can say what is wrong with it.
const FULL_RO: c_int = 0x0100 | 0x0010 | 0x0008 | 0x0004;

/// A view, released when it is dropped.
pub(crate) struct View<'py> {
    // Boxed: exporters may keep its address.
    view: Box<PyBuffer>,
    _py: Python<'py>,
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // SAFETY: filled in by PyObject_GetBuffer and released once, under the GIL, which `_py` stands for.
        unsafe { PyBuffer_Release(&mut *self.view) }
    }
}

/// Whether elements of this format (PEP 3118) have references to objects in them: an `O` outside of the fields' names,
/// which stand between colons.
fn has_object_fields(format: &[u8]) -> bool {
    format.split(|&c| c == b':').step_by(2).any(|codes| codes.contains(&b'O'))
}

/// What an object that has the buffer protocol says; `None` if it has not.
pub(crate) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
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
    let view = View { view, _py: py };
    // SAFETY: NULL, for bytes, or a string that stays as long as the view.
    let format = (!view.view.format.is_null()).then(|| unsafe { CStr::from_ptr(view.view.format) }.to_bytes());
    if format.is_some_and(has_object_fields) {
        return Err(references_error(object));
    }
    Ok(Some(Described {
        address: view.view.buf as usize,
        bytes: view.view.len.max(0) as usize,
        // SAFETY: filled in above.
        contiguous: unsafe { PyBuffer_IsContiguous(&*view.view, b'C' as c_char) } != 0,
        readonly: view.view.readonly != 0,
        location: Location::Host,
        order: ReadOrder::Synchronous,
        keep: BufferGuard::View(view),
    }))
}
