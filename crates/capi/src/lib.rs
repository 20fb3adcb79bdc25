//! The C API, declared in `include/spinio.h`, `include/spinio_gaia.h`, `include/spinio_net.h` and `include/nvmmu.h`: the headers are its manual.
//!
//! ```text
//!   batch.rs       spinio_batch, _file, _fixed, ...     many reads at once
//!   emulated.rs    spinio_emulated_...                  GPU kernels of the emulated GPU, for the headers in device/
//!   gaia.rs        spinio_gaia_...                     declared in include/spinio_gaia.h
//!   gaia_reader.rs spinio_gaia_reader_...              on-demand reads from kernels, declared there too
//!   pinned.rs      spinio_pin_file, spinio_map, ...     pinned files
//!   memory.rs      spinio_mem_alloc, _free, _copy       memory of devices without their own allocator
//!   net.rs         spinio_net_...                      declared in include/spinio_net.h
//!   socket.rs      spinio_socket_...                   declared there too
//!   nvmmu.rs       nvmmuBegin ... nvmmu_move ...        declared in include/nvmmu.h
//!   read.rs        spinio_pread, spinio_pread_async     as the hooks, without the 2 GiB limit, or stream-ordered
//!   write.rs       spinio_pwrite, spinio_pwrite_async
//!   stats.rs       spinio_stats, spinio_version, spinio_last_error
//!   deprecated.rs  names of earlier releases
//!
//!   ffi_guard.rs   between a C caller and Rust: errno, panics, cancellation; crates/preload's hooks use it too
//!   errno.rs, last_error.rs   used by it
//! ```
//!
//! The crate is not a library file: `libspinio.so`, which crates/preload builds, exports the functions. None of them
//! has the name of a libc function, so a program that links this crate hooks nothing.
//!
//! Every function reports a failure as POSIX does, with -1 or NULL and errno, and stores a message for
//! `spinio_last_error`. `SPINIO_DISABLE` turns off the hooks, not these functions: a program that calls them needs
//! them.

#![expect(unsafe_code, reason = "C functions and their arguments")]

mod batch;
mod deprecated;
mod emulated;
pub mod errno;
pub mod ffi_guard;
pub mod gaia;
mod gaia_reader;
mod last_error;
mod memory;
mod net;
mod nvmmu;
mod pinned;
mod read;
mod socket;
mod stats;
mod write;

use std::ffi::c_char;

use spinio_device::{Allocation, DeviceAddr, registry};
use spinio_io::Target;

use crate::ffi_guard::Failure;

/// Other libraries of this process find the runtime by this symbol.
#[unsafe(no_mangle)]
static spinio_runtime_v3: spinio_runtime::Table = spinio_runtime::TABLE;

/// The device memory at `address`; the devices themselves are queried before it counts as host memory.
fn target_of(address: *const u8, wanted: usize) -> Option<Target> {
    let target = |allocation: Allocation| Target { allocation, addr: DeviceAddr(address as u64) };
    registry::find_or_query(address, wanted).map(target)
}

/// Fills a struct of a caller, who says its size: one with an older header gets the part that it knows, one with a newer
/// header zeros for fields that this library does not have.
///
/// # Safety
/// `out` must have `size` bytes, and `value` no padding.
unsafe fn fill_struct<T>(out: *mut u8, size: usize, value: &T) {
    let known = size.min(size_of::<T>());
    // SAFETY: the caller's promise.
    unsafe {
        core::ptr::copy_nonoverlapping(core::ptr::from_ref(value).cast(), out, known);
        out.add(known).write_bytes(0, size - known);
    }
}

/// A struct of a caller that begins with its own size: fields that an older header does not have are zeros, and those of a
/// newer one are ignored. `of`: what the struct is for.
///
/// # Safety
/// `from` must be null, for zeros, or have as many bytes as it says. Any bits must be valid for a `T`.
unsafe fn read_struct<T: Copy>(from: *const T, of: &str) -> Result<T, Failure> {
    // SAFETY: the caller's promise: zeros are valid.
    let mut read: T = unsafe { core::mem::zeroed() };
    if !from.is_null() {
        // SAFETY: the struct begins with its size.
        let size = unsafe { from.cast::<usize>().read_unaligned() };
        if size < size_of::<usize>() {
            let sentence = format!("The options of a {of} say that they have {size} bytes: set their size");
            return Err(Failure::Message(libc::EINVAL, sentence));
        }
        // SAFETY: the caller's promise.
        unsafe { core::ptr::copy_nonoverlapping(from.cast(), (&raw mut read).cast::<u8>(), size.min(size_of::<T>())) };
    }
    Ok(read)
}

/// Stores a text and its zero.
///
/// # Safety
/// `to` is null, or has `size` bytes.
unsafe fn write_text(to: *mut c_char, size: usize, text: &str, what: &str) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::Message(libc::EFAULT, format!("There is no memory for the {what}: the pointer is NULL")));
    }
    if text.len() >= size {
        let sentence = format!("The {what} {text} has no room in {size} bytes");
        return Err(Failure::Message(libc::ENAMETOOLONG, sentence));
    }
    // SAFETY: guaranteed by the caller; the text and its zero are no longer.
    unsafe {
        core::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// A part of a call, moved in one step.
struct Part {
    /// Its start in the buffer.
    at: usize,
    len: usize,
    /// Its start in the file.
    offset: u64,
    /// Its start in device memory, if the buffer is device memory.
    device: Option<Target>,
}

/// Moves `size` bytes of a buffer in parts, until one is short or fails; returns the bytes moved. A failure is returned
/// only if nothing was moved before. `next_part`: the length of the next part, of the bytes that are left.
fn for_each_part(
    buffer: *const u8,
    size: usize,
    offset: i64,
    next_part: impl Fn(usize) -> usize,
    mut move_part: impl FnMut(&Part) -> Result<usize, Failure>,
) -> Result<usize, Failure> {
    let start = u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?;
    if size > isize::MAX as usize {
        return Err(Failure::Errno(libc::EINVAL));
    }
    let target_at = target_of(buffer, size);
    let mut done = 0;
    loop {
        let device = target_at.map(|buffer| Target { addr: buffer.addr.offset(done as u64), ..buffer });
        let part = Part { at: done, len: next_part(size - done), offset: start + done as u64, device };
        match move_part(&part) {
            Ok(got) => {
                done += got;
                if got < part.len || done == size {
                    return Ok(done);
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(failure) => return Err(failure),
        }
    }
}
