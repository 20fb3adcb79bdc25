//! Batches of reads, for programs that link the library.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};

use spinio_batch::{Arg, BatchHandle, BatchResult, Batches, ReadArrays, ReadOp};
use spinio_io::runtime;

use crate::ffi_guard::{self as guard, Failure};

/// The struct of the header.
const _: () = assert!(size_of::<ReadOp>() == 40 && size_of::<usize>() == 8);

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_batch(pieces: *mut ReadOp, count: usize) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        // SAFETY: the header requires `count` read ops that no other thread uses meanwhile.
        let pieces = unsafe { slice_mut(pieces, count) }?;
        Ok(total_bytes(runtime().batch(pieces)?))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_batch_file(
    fd: c_int,
    offsets: *const u64,
    sizes: *const u64,
    buffers: *const *mut c_void,
    results: *mut i64,
    count: usize,
) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        // SAFETY: the header requires `count` of each, which no thread writes meanwhile; an address is a number of 64
        // bits.
        let (offsets, sizes, addresses) = unsafe {
            (slice_shared(offsets, count)?, slice_shared(sizes, count)?, slice_shared(buffers.cast::<u64>(), count)?)
        };
        read_arrays(fd, Arg::Slice(offsets), Arg::Slice(sizes), Arg::Slice(addresses), results, count)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_batch_fixed(
    fd: c_int,
    offsets: *const u64,
    size: usize,
    buffer: *mut c_void,
    results: *mut i64,
    count: usize,
) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        // SAFETY: the header requires `count` offsets, which no thread writes meanwhile.
        let offsets = unsafe { slice_shared(offsets, count) }?;
        let size = size as u64;
        read_arrays(fd, Arg::Slice(offsets), Arg::Same(size), Arg::Stride(buffer as u64, size), results, count)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_batch_submit(pieces: *mut ReadOp, count: usize) -> *mut BatchHandle {
    guard::cancellation_point();
    let made = guard::run(|| {
        // SAFETY: the header requires `count` read ops that no other thread uses until the wait for the batch has
        // returned.
        let pieces: *mut [ReadOp] = unsafe { slice_mut(pieces, count) }?;
        // SAFETY: as above; the header requires open descriptors and allocated memory until then.
        Ok(unsafe { runtime().submit(pieces) }?)
    });
    made.map_or(core::ptr::null_mut(), |ticket| Box::into_raw(Box::new(ticket)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_batch_poll(batch: *const BatchHandle) -> c_int {
    let done = guard::run(|| {
        // SAFETY: the header requires a batch that was submitted and not waited for.
        let batch = unsafe { batch.as_ref() }.ok_or(Failure::Errno(libc::EINVAL))?;
        Ok(batch.is_done()?)
    });
    done.map_or(-1, c_int::from)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_batch_wait(batch: *mut BatchHandle) -> isize {
    guard::call(|| {
        if batch.is_null() {
            return Err(Failure::Errno(libc::EINVAL));
        }
        // SAFETY: the header requires a batch that was submitted and not waited for: made by `Box::into_raw` above.
        let ticket = unsafe { Box::from_raw(batch) };
        Ok(total_bytes(ticket.wait()?))
    })
}

fn read_arrays(
    fd: c_int,
    offsets: Arg<'_>,
    lens: Arg<'_>,
    addresses: Arg<'_>,
    results: *mut i64,
    count: usize,
) -> Result<usize, Failure> {
    let mut own;
    let results = if results.is_null() {
        // Not filled: new memory is zero, and the thread that resolves an op is the first to access its result.
        own = vec![0; count];
        &mut own[..]
    } else {
        // SAFETY: the header requires `count` results that no other thread uses meanwhile.
        unsafe { slice_mut(results, count) }?
    };
    Ok(total_bytes(runtime().batch_file(ReadArrays { fd, offsets, lens, addresses, results }, &[])?))
}

fn total_bytes(done: BatchResult) -> usize {
    usize::try_from(done.bytes).unwrap_or(usize::MAX)
}

/// # Safety
/// `at` must be null or have `count` values that no other thread uses during the call.
unsafe fn slice_mut<'a, T>(at: *mut T, count: usize) -> Result<&'a mut [T], Failure> {
    if count == 0 {
        return Ok(&mut []);
    }
    check_array(at, count)?;
    // SAFETY: neither null nor misaligned; the rest is required of the caller.
    Ok(unsafe { core::slice::from_raw_parts_mut(at, count) })
}

/// # Safety
/// `at` must be null or have `count` values that no thread writes during the call; arrays may overlap.
unsafe fn slice_shared<'a, T>(at: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    check_array(at, count)?;
    // SAFETY: neither null nor misaligned; the rest is required of the caller.
    Ok(unsafe { core::slice::from_raw_parts(at, count) })
}

fn check_array<T>(at: *const T, count: usize) -> Result<(), Failure> {
    let refused = at.is_null() || !at.is_aligned() || count > isize::MAX as usize / size_of::<T>();
    if refused { Err(Failure::Errno(libc::EINVAL)) } else { Ok(()) }
}
