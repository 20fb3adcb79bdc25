//! Memory of the emulated device, for tests and for machines without a GPU; and of maps of files, on any device.

#![expect(unsafe_code, reason = "buffers of other Python objects")]

use std::sync::Arc;

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use spinio_runtime::client::{self, Error, Target};
use spinio_sys::Errno;

use crate::buffer::{Access, Buffer, MemoryPlace};
use crate::described::total_bytes;
use crate::device_memory::{MapSlot, OwnedMemory, lock_deferred};
use crate::failure;

/// Who keeps the memory of an array.
enum Owner {
    Array(Arc<OwnedMemory>),
    /// A map of a file, until it is unmapped.
    Map(Arc<MapSlot>),
}

/// Memory of a device.
#[pyclass(frozen, module = "spinio._spinio")]
pub(crate) struct Memory {
    owner: Owner,
    device: DLDevice,
    addr: u64,
    bytes: usize,
    /// Of a map whose addresses are those of a mapping of the file.
    in_place: bool,
}

#[pymethods]
impl Memory {
    #[new]
    #[pyo3(signature = (bytes, host_mapped=false, device=0))]
    fn new(bytes: usize, host_mapped: bool, device: u32) -> PyResult<Memory> {
        // Empty memory has an address too, so that arrays without elements need no special case.
        let addr = client::emulated::alloc(device, bytes.max(1), host_mapped).map_err(|e| {
            let said = || format!("Cannot allocate {bytes} bytes on the emulated device: {e}");
            match e.errno {
                number if number == Errno::NOMEM.raw_os_error() => PyMemoryError::new_err(said()),
                number if number == Errno::INVAL.raw_os_error() => PyValueError::new_err(e.text),
                _ => PyRuntimeError::new_err(said()),
            }
        })?;
        let owned = OwnedMemory::of_allocation(addr);
        let device = emulated_device(device);
        Ok(Memory { owner: Owner::Array(Arc::new(owned)), device, addr, bytes, in_place: false })
    }

    /// Its address, as the device knows it.
    #[getter]
    fn address(&self) -> u64 {
        self.addr
    }

    /// Its device, as DLPack names it.
    #[getter]
    fn device(&self) -> (u32, i32) {
        (self.device.device_type.0, self.device.device_id)
    }

    /// Its bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    /// Copies a range to the host, after the work that this thread has queued.
    fn get<'py>(&self, py: Python<'py>, at: usize, bytes: usize) -> PyResult<Bound<'py, PyBytes>> {
        if self.in_place {
            return self.get_in_place(py, at, bytes);
        }
        let (_owned, from) = self.range(at, bytes)?;
        PyBytes::new_with(py, bytes, |into| {
            py.detach(|| if bytes == 0 { Ok(()) } else { from.copy_to_host(into) })
                .map_err(|e| failure::request_error(&e))
        })
    }

    /// Copies host memory in and waits for it.
    fn put(&self, at: usize, from: &Bound<'_, PyAny>) -> PyResult<()> {
        let buffer = Buffer::from_object(from, Access::Drain)?;
        let MemoryPlace::Host(address) = buffer.memory_place else {
            return Err(PyBufferError::new_err("The source must be memory of the host"));
        };
        if self.in_place {
            return self.put_in_place(from.py(), at, address as *const u8, buffer.bytes);
        }
        let (_owned, to) = self.range(at, buffer.bytes)?;
        if buffer.bytes == 0 {
            return Ok(());
        }
        // SAFETY: memory of an object that `buffer` keeps. If another thread changes it meanwhile, either byte may be
        // copied.
        let bytes = unsafe { core::slice::from_raw_parts(address as *const u8, buffer.bytes) };
        let done = from.py().detach(|| to.copy_from_host(bytes));
        done.map_err(|e| failure::request_error(&e))
    }

    /// A DLPack capsule of an array in this memory. Strides count elements; `code` and `bits` are DLPack's.
    #[expect(clippy::too_many_arguments, reason = "the arguments are those of DLPack, and of the array")]
    #[pyo3(signature = (at, shape, strides, code, bits, readonly, stream=None, max_version=None, dl_device=None, copy=None))]
    fn dlpack<'py>(
        &self,
        py: Python<'py>,
        at: u64,
        shape: Vec<i64>,
        strides: Vec<i64>,
        code: u8,
        bits: u8,
        readonly: bool,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        total_bytes(&shape, 1)?;
        let request = ExportRequest::parse(stream, max_version, dl_device, copy)?;
        let flags = if readonly { DlpackFlags::READ_ONLY } else { DlpackFlags::empty() };
        let dtype = DLDataType::scalar(DLDataTypeCode(code), bits);
        let owned = self.owned()?;
        export_dlpack(
            &DlpackArray { owned, device: self.device, addr: self.addr, at, shape, strides, dtype, flags },
            py,
            request,
        )
    }
}

impl Memory {
    /// The memory of a map, on the device of this name.
    pub(crate) fn of_map(map: Arc<MapSlot>, device: &str, addr: u64, bytes: usize, in_place: bool) -> Memory {
        let device = match device.split_once(':').map(|(kind, number)| (kind, number.parse())) {
            Some(("cuda", Ok(device_id))) => DLDevice { device_type: DLDeviceType::CUDA, device_id },
            Some((_, Ok(number))) => emulated_device(number as u32),
            _ => emulated_device(0),
        };
        Memory { owner: Owner::Map(map), device, addr, bytes, in_place }
    }

    /// Copies bytes of a map that is read in place: its addresses are those of a mapping of the file.
    fn get_in_place<'py>(&self, py: Python<'py>, at: usize, bytes: usize) -> PyResult<Bound<'py, PyBytes>> {
        let _owned = self.owned()?;
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let from = (self.addr as usize).wrapping_add(at) as *const u8;
        // What was not acquired has no memory.
        if !inside || !spinio_sys::linux::is_readable(from, bytes) {
            return Err(PyRuntimeError::new_err(
                "There is no memory: a page of a map in place has it from its first acquire on",
            ));
        }
        PyBytes::new_with(py, bytes, |into| {
            // SAFETY: readable memory of the map, which `_owned` keeps. Where another program changes it meanwhile, either
            // byte may be copied.
            unsafe { core::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), bytes) };
            Ok(())
        })
    }

    /// Stores bytes into a map that is written in place.
    fn put_in_place(&self, py: Python<'_>, at: usize, from: *const u8, bytes: usize) -> PyResult<()> {
        let _owned = self.owned()?;
        if at.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(PyValueError::new_err(format!("{bytes} bytes from {at} are not in {} bytes", self.bytes)));
        }
        let to = (self.addr as usize).wrapping_add(at);
        // SAFETY: memory of an object that the caller keeps. If another thread changes it meanwhile, either byte may be
        // stored.
        let bytes = if bytes == 0 { &[][..] } else { unsafe { core::slice::from_raw_parts(from, bytes) } };
        // SAFETY: addresses of the map, which `_owned` keeps; other programs may store there at any time.
        let stored = py.detach(|| unsafe { spinio_sys::linux::store_checked(to as *mut u8, bytes) });
        stored.map_err(|e| match e {
            Errno::FAULT => {
                PyRuntimeError::new_err("There is no memory to store to: the file was cut, or the map is read-only")
            }
            e => PyRuntimeError::new_err(format!("Cannot store to a map in place: {}", std::io::Error::from(e))),
        })
    }

    fn owned(&self) -> PyResult<Arc<OwnedMemory>> {
        match &self.owner {
            Owner::Array(owned) => Ok(Arc::clone(owned)),
            Owner::Map(slot) => slot.get(),
        }
    }

    /// A range, and what keeps it while it is used.
    fn range(&self, at: usize, bytes: usize) -> PyResult<(Arc<OwnedMemory>, Target)> {
        let owned = self.owned()?;
        if at.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let said = format!("{bytes} bytes from {at} do not lie in memory of {} bytes", self.bytes);
            return Err(PyValueError::new_err(said));
        }
        let found = Target::find(self.addr + at as u64, bytes);
        let gone = || {
            PyRuntimeError::new_err(match &self.owner {
                Owner::Array(_) => "The device is gone: a forked process has none",
                Owner::Map(_) => "There is no device memory: a page of a map has it while it is acquired",
            })
        };
        found.map(|target| (owned, target)).ok_or_else(gone)
    }
}

/// A stream of the device.
#[pyclass(frozen, module = "spinio._spinio")]
pub(crate) struct Stream {
    queue: client::Stream,
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (device=0))]
    fn new(device: u32) -> PyResult<Stream> {
        let mut queue = client::emulated::stream(device).map_err(no_device)?;
        if queue.0 == 1 {
            // CUDA's second handle of the default stream. It stays open, so that it is not used for another stream.
            queue = client::emulated::stream(device).map_err(no_device)?;
        }
        Ok(Stream { queue })
    }

    /// The handle for set_stream.
    #[getter]
    fn handle(&self) -> u64 {
        self.queue.0
    }

    /// Waits for the work queued on it.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| client::emulated::wait(self.queue)).map_err(no_device)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Work queued on it still runs.
        client::emulated::release_stream(self.queue);
    }
}

/// DLPack's type for devices that have none of their own.
fn emulated_device(ordinal: u32) -> DLDevice {
    DLDevice { device_type: DLDeviceType::EXTDEV, device_id: ordinal as i32 }
}

struct DlpackArray {
    owned: Arc<OwnedMemory>,
    device: DLDevice,
    addr: u64,
    at: u64,
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: DLDataType,
    flags: DlpackFlags,
}

impl DlpackArray {
    fn export<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let metadata = Dynamic::new(&self.shape[..], &self.strides[..]);
        let refused = |e: &dyn std::fmt::Display| PyBufferError::new_err(format!("DLPack: {e}"));
        let mut made = metadata.prepare_as::<M>().map_err(|e| refused(&e))?.initialize(Arc::clone(&self.owned));
        made.set_data(self.addr as *mut _).set_device(self.device).set_dtype(self.dtype).set_byte_offset(self.at);
        made.set_flags(self.flags).map_err(|e| refused(&e))?;
        // SAFETY: data, device, type, shape and strides are set; `owned` keeps the memory, and the array of `at`, shape
        // and strides is inside it, as its caller checks.
        Ok(unsafe { made.finish() })
    }
}

impl DlpackExporter for DlpackArray {
    fn device(&self) -> DLDevice {
        self.device
    }

    fn flags(&self) -> DlpackFlags {
        self.flags
    }

    fn prepare_export(&self, _py: Python<'_>, _request: &ExportRequest<'_>) -> PyResult<()> {
        Ok(())
    }

    fn export_legacy(&self, _py: Python<'_>) -> PyResult<Managed<dlpark::ffi::DLManagedTensor>> {
        self.export()
    }

    fn export_versioned(&self, _py: Python<'_>) -> PyResult<Managed<dlpark::ffi::DLManagedTensorVersioned>> {
        self.export()
    }
}

/// Configures the emulated device, in the format of `SPINIO_EMULATED`, which takes precedence. Without effect once it
/// has memory.
#[pyfunction]
pub(crate) fn configure(text: &str) -> PyResult<()> {
    client::emulated::configure(text).map_err(|e| PyValueError::new_err(e.text))
}

/// For tests: no copy starts on the device until `resume`.
#[pyfunction]
pub(crate) fn pause() -> PyResult<()> {
    // First: memory freed from now on is freed when the device resumes.
    lock_deferred().pauses += 1;
    client::emulated::pause().map_err(|e| {
        lock_deferred().pauses -= 1;
        no_device(e)
    })
}

/// Undoes one `pause`.
#[pyfunction]
pub(crate) fn resume(py: Python<'_>) -> PyResult<()> {
    client::emulated::resume().map_err(no_device)?;
    let freed = {
        let mut waiting = lock_deferred();
        waiting.pauses = waiting.pauses.saturating_sub(1);
        if waiting.pauses == 0 { std::mem::take(&mut waiting.freed) } else { Vec::new() }
    };
    py.detach(|| drop(freed));
    Ok(())
}

fn no_device(error: Error) -> PyErr {
    match error.errno {
        number if number == Errno::INVAL.raw_os_error() => PyValueError::new_err(error.text),
        _ => PyRuntimeError::new_err(format!("No emulated device: {error}")),
    }
}
