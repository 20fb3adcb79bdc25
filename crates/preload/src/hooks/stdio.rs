//! Hooks of `fread` into device memory, and `fwrite` out of it.
//!
//! libc loads from and stores into the buffer with the CPU, so it must never see a device buffer: chunks go through
//! host memory. The FILE is locked for all of them, so its position and its flags are those that one `fread` or
//! `fwrite` leaves, and written bytes are in order with the stream's other output, in libc's own buffer.
//!
//! Known flaws:
//! - Device memory that SPIN has not been notified of crashes the program here, as it does without SPIN: no EFAULT is
//!   returned.
//! - If the device fails, the bytes have left the FILE: the call returns the items that arrived and sets errno to EIO,
//!   but `ferror` does not report it. Nor does it if the device fails during an `fwrite`.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::c_void;

use libc::FILE;
use spinio_device::Allocation;
use spinio_io::settings::SMALL_REQUEST_MAX;
use spinio_io::{AlignedBuf, runtime};

use super::{device_owner, hook, target};
use crate::ffi_guard::{self as guard, Failure};
use crate::{errno, next_symbol as next};

/// Bytes per chunk of a read.
const READ_CHUNK: usize = 1 << 20;

/// Bytes per chunk of a write. Large, because libc makes one system call of what its own buffer cannot hold.
const WRITE_CHUNK: usize = 64 << 20;

unsafe extern "C" {
    fn flockfile(file: *mut FILE);
    fn funlockfile(file: *mut FILE);
}

hook! {
    fn fread(buffer: *mut c_void, size: usize, items: usize, file: *mut FILE) -> usize, caller in "r8" =>
        serve(buffer, size, items, usize::MAX, file, caller,
            || next::FREAD.get()(buffer, size, items, file));
    fn fread_unlocked(buffer: *mut c_void, size: usize, items: usize, file: *mut FILE) -> usize, caller in "r8" =>
        serve(buffer, size, items, usize::MAX, file, caller,
            || next::FREAD_UNLOCKED.get()(buffer, size, items, file));
    fn __fread_chk(buffer: *mut c_void, room: usize, size: usize, items: usize, file: *mut FILE) -> usize,
        caller in "r9" =>
        serve(buffer, size, items, room, file, caller,
            || next::FREAD_CHK.get()(buffer, room, size, items, file));
    fn __fread_unlocked_chk(buffer: *mut c_void, room: usize, size: usize, items: usize, file: *mut FILE) -> usize,
        caller in "r9" =>
        serve(buffer, size, items, room, file, caller,
            || next::FREAD_UNLOCKED_CHK.get()(buffer, room, size, items, file));
    fn fwrite(buffer: *const c_void, size: usize, items: usize, file: *mut FILE) -> usize, caller in "r8" =>
        serve_write(buffer, size, items, file, caller, || next::FWRITE.get()(buffer, size, items, file));
    fn fwrite_unlocked(buffer: *const c_void, size: usize, items: usize, file: *mut FILE) -> usize, caller in "r8" =>
        serve_write(buffer, size, items, file, caller, || next::FWRITE_UNLOCKED.get()(buffer, size, items, file));
}

/// The bytes of a call on device memory, and their allocation; `None` for a call that is left to libc.
#[inline(always)]
fn device_request(buffer: *const c_void, size: usize, items: usize, caller: usize) -> Option<(usize, Allocation)> {
    let bytes = size.wrapping_mul(items);
    let overflows = size != 0 && bytes / size != items;
    let entry = errno::Saved::now();
    let allocation = device_owner(buffer.cast(), bytes, caller);
    // A query of the driver may have changed errno.
    entry.restore();
    let allocation = allocation?;
    (bytes != 0 && !overflows).then_some((bytes, allocation))
}

#[inline(always)]
unsafe fn serve(
    buffer: *mut c_void,
    size: usize,
    items: usize,
    room: usize,
    file: *mut FILE,
    caller: usize,
    next: impl Fn() -> usize,
) -> usize {
    if let Some((bytes, allocation)) = device_request(buffer, size, items, caller)
        && bytes <= room
    {
        // SAFETY: the program's own FILE.
        return unsafe { with_locked_file(buffer.cast(), bytes, size, file, allocation, read_locked) };
    }
    next()
}

#[inline(always)]
unsafe fn serve_write(
    buffer: *const c_void,
    size: usize,
    items: usize,
    file: *mut FILE,
    caller: usize,
    next: impl Fn() -> usize,
) -> usize {
    if let Some((bytes, allocation)) = device_request(buffer, size, items, caller) {
        // SAFETY: the program's own FILE.
        return unsafe { with_locked_file(buffer.cast_mut().cast(), bytes, size, file, allocation, write_locked) };
    }
    next()
}

/// Moves bytes between a FILE and a device, under the FILE's lock.
type LockedMove = fn(*mut u8, usize, *mut FILE, Allocation) -> usize;

/// # Safety
/// `file` must be open.
#[cold]
#[inline(never)]
unsafe fn with_locked_file(
    buffer: *mut u8,
    bytes: usize,
    size: usize,
    file: *mut FILE,
    allocation: Allocation,
    locked: LockedMove,
) -> usize {
    guard::cancellation_point();
    // A thread that is cancelled in between would leave the FILE locked.
    let done = guard::with_cancel_disabled(|| {
        // SAFETY: the FILE is open. The lock is recursive, so a caller of fread_unlocked that holds it does not block.
        unsafe { flockfile(file) };
        let done = locked(buffer, bytes, file, allocation);
        // SAFETY: locked above.
        unsafe { funlockfile(file) };
        done
    });
    done / size
}

/// Fills device memory from a FILE that this thread has locked; the bytes that arrived. Sets errno where libc would.
fn read_locked(buffer: *mut u8, bytes: usize, file: *mut FILE, allocation: Allocation) -> usize {
    let mut done = 0;
    guard::run(|| {
        // Like the kernel, stop at the end of the allocation, whatever length was requested.
        let end = bytes.min(allocation.bytes_left(target(allocation, buffer).addr) as usize);
        let mut bounce = AlignedBuf::zeroed(end.min(READ_CHUNK));
        while done < end {
            let piece = bounce.len().min(end - done);
            // SAFETY: `bounce` has room for a chunk, and the FILE is locked by this thread.
            let got = unsafe { next::FREAD_UNLOCKED.get()(bounce.as_mut_ptr().cast(), 1, piece, file) };
            if got > 0 {
                let to = target(allocation, buffer.wrapping_add(done));
                runtime().put(to, &bounce[..got])?;
                if done > 0 && got <= SMALL_REQUEST_MAX {
                    // Such a chunk is only queued, but a read of this length promises that all bytes have arrived.
                    runtime().wait_arrived(to, "copy to the device", 0, got as u64)?;
                }
            }
            done += got;
            if got < piece {
                // SAFETY: the FILE is open.
                let error = unsafe { libc::ferror(file) } != 0;
                return if error { Err(Failure::Errno(errno::get())) } else { Ok(()) };
            }
        }
        if end < bytes { Err(Failure::Errno(libc::EFAULT)) } else { Ok(()) }
    });
    done
}

/// Writes device memory to a FILE that this thread has locked; the bytes that libc took. Sets errno where libc would.
fn write_locked(buffer: *mut u8, bytes: usize, file: *mut FILE, allocation: Allocation) -> usize {
    let mut done = 0;
    guard::run(|| {
        let end = bytes.min(allocation.bytes_left(target(allocation, buffer).addr) as usize);
        let mut bounce = AlignedBuf::zeroed(end.min(WRITE_CHUNK));
        while done < end {
            let piece = bounce.len().min(end - done);
            runtime().get(target(allocation, buffer.wrapping_add(done)), &mut bounce[..piece])?;
            // SAFETY: `bounce` holds a chunk, and the FILE is locked by this thread.
            let wrote = unsafe { next::FWRITE_UNLOCKED.get()(bounce.as_ptr().cast(), 1, piece, file) };
            done += wrote;
            if wrote < piece {
                return Err(Failure::Errno(errno::get()));
            }
        }
        if end < bytes { Err(Failure::Errno(libc::EFAULT)) } else { Ok(()) }
    });
    done
}
