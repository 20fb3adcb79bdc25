//! Maps of files in device memory, consistent with CPU programs.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client::gaia::{Access, Info, Map};
use spinio_runtime::client::{self, Stream};

use crate::device_memory::MapSlot;
use crate::emulated::Memory;
use crate::failure;

/// A range of a file in device memory.
#[pyclass(frozen, module = "spinio._spinio")]
pub(crate) struct GaiaMap {
    slot: Arc<MapSlot>,
    device: String,
    address: u64,
    bytes: u64,
    in_place: bool,
}

fn access(write: bool, overwrite: bool) -> Access {
    match (write, overwrite) {
        (_, true) => Access::Overwrite,
        (true, false) => Access::Write,
        (false, false) => Access::Read,
    }
}

#[pymethods]
impl GaiaMap {
    #[new]
    #[pyo3(signature = (fd, offset, bytes, write, in_place, device=None))]
    fn new(
        py: Python<'_>,
        fd: i32,
        offset: u64,
        bytes: u64,
        write: bool,
        in_place: bool,
        device: Option<&str>,
    ) -> PyResult<GaiaMap> {
        let map = py
            .detach(|| Map::new(fd, offset, bytes, write, in_place, device))
            .map_err(|e| failure::request_error(&e))?;
        let (address, device) = (map.address(), map.device());
        Ok(GaiaMap { slot: Arc::new(MapSlot::new(map)), device, address, bytes, in_place })
    }

    /// Address and bytes.
    #[getter]
    fn place(&self) -> PyResult<(u64, u64)> {
        self.slot.get().map(|_| (self.address, self.bytes))
    }

    /// The name of its device: `cuda:0`.
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// Its memory, for arrays.
    fn memory(&self) -> PyResult<Memory> {
        self.slot.get()?;
        Ok(Memory::of_map(Arc::clone(&self.slot), &self.device, self.address, self.bytes as usize, self.in_place))
    }

    /// Brings a range up to date, and begins an epoch; the bytes of the range that are in the file.
    fn acquire(&self, py: Python<'_>, offset: u64, bytes: u64, write: bool, overwrite: bool) -> PyResult<u64> {
        self.with_map(py, |map| map.acquire(offset, bytes, access(write, overwrite)))
    }

    /// Publishes the stores to a range; the bytes that were published.
    fn release(&self, py: Python<'_>, offset: u64, bytes: u64, handoff: bool) -> PyResult<u64> {
        self.with_map(py, |map| match handoff {
            true => map.release_handing_over(offset, bytes),
            false => map.release(offset, bytes),
        })
    }

    /// As `acquire`, in the order of a stream (a handle), and without waiting.
    fn acquire_async(
        &self,
        py: Python<'_>,
        offset: u64,
        bytes: u64,
        write: bool,
        overwrite: bool,
        stream: u64,
    ) -> PyResult<()> {
        self.with_map(py, |map| map.acquire_async(offset, bytes, access(write, overwrite), Stream(stream)))
    }

    /// As `release`, in the order of a stream (a handle), and without waiting.
    fn release_async(&self, py: Python<'_>, offset: u64, bytes: u64, stream: u64) -> PyResult<()> {
        self.with_map(py, |map| map.release_async(offset, bytes, Stream(stream)))
    }

    /// Drops the stores to a range.
    fn discard(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with_map(py, |map| map.discard(offset, bytes))
    }

    /// A block begins that will acquire a range for reading.
    fn begin_block(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with_map(py, |map| map.begin_block(offset, bytes))
    }

    /// It has ended.
    fn end_block(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with_map(py, |map| map.end_block(offset, bytes))
    }

    /// Waits until what was released of a range is on storage.
    fn sync(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with_map(py, |map| map.sync(offset, bytes))
    }

    /// What it has done.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info: Info = self.with_map(py, Map::info)?;
        let dict = PyDict::new(py);
        for (name, value) in [
            ("file_size", info.file_size),
            ("acquires", info.acquires),
            ("releases", info.releases),
            ("bytes_from_file", info.bytes_from_file),
            ("bytes_from_snapshots", info.bytes_from_snapshots),
            ("pages_patched", info.pages_patched),
            ("bytes_published", info.bytes_published),
            ("pages_committed", info.pages_committed),
            ("pages_merged", info.pages_merged),
            ("reattached", info.reattached),
            ("releases_recovered", info.releases_recovered),
            ("bytes_shared", info.bytes_shared),
            ("acquires_unchanged", info.acquires_unchanged),
            ("device_bytes", info.device_bytes),
            ("chunks_evicted", info.chunks_evicted),
            ("bytes_registered", info.bytes_registered),
            ("bytes_from_peer", info.bytes_from_peer),
            ("peer_refused", info.peer_refused),
            ("releases_handed_over", info.releases_handed_over),
            ("peer_bytes_refused", info.peer_bytes_refused),
            ("flush_ns", info.flush_ns),
            ("plan_ns", info.plan_ns),
            ("read_ns", info.read_ns),
            ("copy_ns", info.copy_ns),
            ("confirm_ns", info.confirm_ns),
            ("scan_ns", info.scan_ns),
            ("release_scan_ns", info.release_scan_ns),
            ("release_copy_ns", info.release_copy_ns),
            ("release_commit_ns", info.release_commit_ns),
            ("in_place", info.in_place),
        ] {
            dict.set_item(name, value)?;
        }
        // In words; the order is that of the C struct.
        dict.set_item("peer_refused", client::gaia::peer_refusal(&info))?;
        Ok(dict)
    }

    /// Unmaps. In a forked child only the child's record of the map is dropped; the parent keeps using it.
    fn unmap(&self, py: Python<'_>) {
        let owned = self.slot.take();
        py.detach(|| drop(owned));
    }
}

impl GaiaMap {
    /// Makes a call without the GIL. It may wait for the device, for the server, or for another thread's call.
    fn with_map<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Map) -> Result<T, spinio_runtime::client::Error> + Send,
    ) -> PyResult<T> {
        let owned = self.slot.get()?;
        let done = py.detach(move || {
            let done = owned.map().map(call);
            // If this was the last reference, it unmaps here.
            drop(owned);
            done
        });
        let done = done.ok_or_else(|| PyValueError::new_err("The range is no longer mapped"))?;
        done.map_err(|e| failure::request_error(&e))
    }
}
