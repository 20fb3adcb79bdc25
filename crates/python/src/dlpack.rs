//! DLPack, both ways: arrays of any framework in, memory of the emulated device out.

#![expect(unsafe_code, reason = "buffers of other Python objects")]

use std::cell::Cell;
use std::ffi::c_void;

use dlpark::ffi::{DLDevice, DLDeviceType};
use dlpark::python::consumer::stream::cuda;
use dlpark::python::{DlpackStream, ImportRequest, ImportedDlpack, StreamArg};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client::{Stream, thread_stream};

use crate::described::{BufferGuard, Described, Location, ReadOrder, is_contiguous};

/// The stream that SPIN will work on, in the notation of DLPack.
struct StreamRequest {
    /// The thread's stream; 0 for none.
    chosen: Stream,
    /// The stream that the producer reported as its own.
    producer: Cell<Option<Stream>>,
}

// SAFETY: the stream is the default one, or one that the program chose and must keep alive while it is chosen. A stream
// is passed for CUDA devices only.
unsafe impl DlpackStream for StreamRequest {
    fn as_python_arg(&self, _py: Python<'_>, _device: DLDevice) -> PyResult<StreamArg> {
        Ok(cuda(self.chosen.0 as *mut c_void))
    }

    unsafe fn wait_for_producer(&self, _device: DLDevice, producer: *mut c_void) -> PyResult<bool> {
        // SPIN uses the producer's stream, so neither has to wait for the other.
        self.producer.set(Some(Stream(producer as u64)));
        Ok(self.chosen.0 == 0)
    }
}

/// What `__dlpack__` of an object returns; `None` if it has none.
pub(crate) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
    if object.getattr_opt("__dlpack__")?.is_none() {
        return Ok(None);
    }
    let request = ImportRequest::new(object.as_borrowed())?;
    let device = request.device()?;
    let cuda = matches!(device.device_type, DLDeviceType::CUDA | DLDeviceType::CUDAMANAGED);
    let claim = match device.device_type {
        DLDeviceType::CPU | DLDeviceType::CUDAHOST | DLDeviceType::ROCMHOST => Location::Host,
        DLDeviceType::CUDA | DLDeviceType::CUDAMANAGED | DLDeviceType::EXTDEV => Location::Device,
        DLDeviceType(other) => {
            return Err(PyBufferError::new_err(format!(
                "SPIN cannot reach memory of DLPack's device type {other}: it knows the host's (1, 3, 11), CUDA's (2, 13) \
                 and the emulated device's (12)"
            )));
        }
    };
    let stream = StreamRequest { chosen: thread_stream(), producer: Cell::new(None) };
    // Not `copy=False`, which producers from before DLPack 1.0 do not know.
    let imported = match request.import(if cuda { Some(&stream) } else { None }, None) {
        Err(e) if e.is_instance_of::<PyTypeError>(object.py()) => {
            import_legacy(object, cuda.then_some(stream.chosen), e)?
        }
        other => other?,
    };
    if imported.flags().contains(dlpark::DlpackFlags::IS_COPIED) {
        return Err(PyBufferError::new_err("The array hands out copies of its bytes, not the bytes themselves"));
    }
    let order = match (claim, cuda) {
        (Location::Host, _) => ReadOrder::Synchronous,
        // The emulated device has a default stream with which all streams are ordered.
        (Location::Device, false) => ReadOrder::On(Stream(0)),
        (Location::Device, true) => stream.producer.get().map_or(ReadOrder::Synchronous, ReadOrder::On),
    };
    let tensor = imported.validate().map_err(|e| PyBufferError::new_err(format!("DLPack: {e}")))?;
    let contiguous = tensor.strides().is_none_or(|strides| is_contiguous(tensor.shape(), strides, 1));
    let address = (tensor.data_ptr() as usize).wrapping_add(tensor.byte_offset() as usize);
    let bytes = tensor.num_bytes();
    let readonly = imported.flags().contains(dlpark::DlpackFlags::READ_ONLY);
    Ok(Some(Described {
        address,
        bytes,
        contiguous,
        readonly,
        location: claim,
        order,
        keep: BufferGuard::Tensor(imported),
    }))
}

/// A producer from before DLPack 1.0, which takes no argument but the stream.
fn import_legacy(object: &Bound<'_, PyAny>, stream: Option<Stream>, refused: PyErr) -> PyResult<ImportedDlpack> {
    let options = PyDict::new(object.py());
    if let Some(stream) = stream {
        // The legacy default stream is called 1 here.
        options.set_item("stream", if stream.0 == 0 { 1 } else { stream.0 })?;
    }
    let Ok(capsule) = object.call_method("__dlpack__", (), Some(&options)) else { return Err(refused) };
    ImportRequest::new(capsule.as_borrowed())?.import(None, None)
}
