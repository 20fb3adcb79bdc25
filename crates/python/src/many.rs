//! Many reads of one file by one call.

#![expect(unsafe_code, reason = "buffers of other Python objects")]

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use spinio_runtime::client::{self, Arg};

use crate::buffer::{Access, Buffer, MemoryPlace};
use crate::stream::StreamScope;
use crate::{failure, signals};

/// Reads `lengths` bytes (a number for all, or 8-byte integers) from each of `offsets` into `out`, one after the other,
/// and waits. `results` has the result of each: bytes, or a negative errno. Returns the number of failed reads.
#[pyfunction]
pub(crate) fn read_many(
    fd: i32,
    offsets: &Bound<'_, PyAny>,
    lengths: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    results: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    let py = out.py();
    let offsets = Integers::from_object(offsets, Access::Drain)?;
    let results = Integers::from_object(results, Access::Fill)?;
    let n = offsets.count;
    if results.count != n {
        return Err(PyValueError::new_err(format!("{} results for {n} offsets", results.count)));
    }
    if let Some((piece, at)) = offsets.copy().into_iter().enumerate().find(|&(_, at)| at < 0) {
        return Err(PyValueError::new_err(format!("Offset {at} of piece {piece} is negative")));
    }
    let buffer = Buffer::from_object(out, Access::Fill)?;
    let (address, known) = match buffer.memory_place {
        MemoryPlace::Host(address) => (address as u64, None),
        MemoryPlace::Device(target) => (target.address, Some(target)),
    };
    let same = lengths.extract::<u64>().ok();
    let (lens, addresses) = match same {
        Some(len) => (Vec::new(), piece_addresses(address, &[], len, n, buffer.bytes)?),
        None => {
            // A copy: if another thread changed these, bytes would be written outside of the array.
            let lens = Integers::from_object(lengths, Access::Drain)?.copy();
            let lens = lens.into_iter().enumerate().map(|(piece, len)| {
                let negative = |_| PyValueError::new_err(format!("Length {len} of piece {piece} is negative"));
                u64::try_from(len).map_err(negative)
            });
            let lens = lens.collect::<PyResult<Vec<u64>>>()?;
            if lens.len() != n {
                return Err(PyValueError::new_err(format!("{} lengths for {n} offsets", lens.len())));
            }
            let addresses = piece_addresses(address, &lens, 0, n, buffer.bytes)?;
            (lens, addresses)
        }
    };
    if n == 0 {
        return Ok(0);
    }
    let order = buffer.order;
    let done = signals::run_interruptible(py, || {
        let _chosen = StreamScope::new(order);
        // SAFETY: as many 8-byte integers as were counted, in memory that `offsets` keeps; none is negative. If another
        // thread changes them, other bytes of the file are read.
        let offsets = unsafe { core::slice::from_raw_parts(offsets.address as *const u64, n) };
        // SAFETY: as many 8-byte integers as were counted, in writable memory that `results` keeps and that the caller
        // has allocated for this call.
        let results = unsafe { core::slice::from_raw_parts_mut(results.address as *mut i64, n) };
        let lens = same.map_or(Arg::PerOp(&lens), Arg::Same);
        let addresses = if same.is_some() { Arg::Same(address) } else { Arg::PerOp(&addresses) };
        client::read_many(fd, offsets, lens, addresses, results, known)
    });
    done?.map_err(|e| failure::request_error(&e))
}

/// The destination of each read, empty if one length applies to all; an error if they do not fit into `buffer_len`
/// bytes.
fn piece_addresses(start: u64, lens: &[u64], len: u64, n: usize, buffer_len: usize) -> PyResult<Vec<u64>> {
    let mut at = 0u64;
    let mut places = Vec::with_capacity(lens.len());
    let mut fits = lens.is_empty() && len.checked_mul(n as u64).is_some_and(|all| all <= buffer_len as u64);
    if !lens.is_empty() {
        fits = lens.iter().all(|len| {
            places.push(start + at);
            at = at.saturating_add(*len);
            at <= buffer_len as u64
        });
    }
    if n == 0 || fits {
        return Ok(places);
    }
    let all = if lens.is_empty() { u128::from(len) * n as u128 } else { lens.iter().map(|&len| u128::from(len)).sum() };
    Err(PyValueError::new_err(format!("The pieces do not fit: they have {all} bytes, the array {buffer_len}")))
}

/// 8-byte integers of a host buffer.
struct Integers<'py> {
    address: usize,
    count: usize,
    _keep: Buffer<'py>,
}

impl<'py> Integers<'py> {
    fn from_object(object: &Bound<'py, PyAny>, access: Access) -> PyResult<Integers<'py>> {
        let buffer = Buffer::from_object(object, access)?;
        match buffer.memory_place {
            MemoryPlace::Host(address) if buffer.bytes % 8 == 0 && (buffer.bytes == 0 || address % 8 == 0) => {
                Ok(Integers { address, count: buffer.bytes / 8, _keep: buffer })
            }
            _ => Err(PyTypeError::new_err("Offsets, lengths and results are 8-byte integers in host memory")),
        }
    }

    fn copy(&self) -> Vec<i64> {
        if self.count == 0 {
            return Vec::new();
        }
        // SAFETY: `count` 8-byte integers are there, aligned, in memory that is kept; if another thread changes one
        // meanwhile, the old or the new value is copied.
        unsafe { core::slice::from_raw_parts(self.address as *const i64, self.count) }.to_vec()
    }
}
