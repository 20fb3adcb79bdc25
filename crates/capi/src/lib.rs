//! The C API, declared in `include/spinio.h` and `include/nvmmu.h`: the headers are its manual.
//!
//! ```text
//!   batch.rs    spinio_batch, _file, _fixed, ...       many reads at once
//!   emulated.rs spinio_emulated_...                kernels of the emulated GPU, for the headers in device/
//!   hold.rs     spinio_hold, _release, spinio_map, ...   files that stay registered
//!   memory.rs   spinio_mem_alloc, _free, _copy     devices without an allocator of their own
//!   nvmmu.rs    nvmmuBegin ... nvmmu_move ...      declared in include/nvmmu.h
//!   read.rs     spinio_pread, spinio_pread_async   what the hooks do, without the 2 GiB bound, or in stream order
//!   write.rs    spinio_pwrite, spinio_pwrite_async
//!   stats.rs    spinio_stats, spinio_version, spinio_last_error
//!
//!   ffi_guard.rs    a C caller on one side, our own code on the other; also for the hooks of crates/preload
//!   errno.rs, last_error.rs, fork_guard.rs     what it needs
//! ```
//!
//! A crate without a library file of its own: the functions are exported by `libspinio.so`, which crates/preload makes.
//! None of them has the name of a function of libc, so a program that links this crate hooks nothing.
//!
//! Every function answers as POSIX does, with -1 or NULL and errno, and keeps a sentence for `spinio_last_error`.
//! `SPINIO_DISABLE` turns off the hooks, not these: who calls them means them.

mod batch;
mod emulated;
pub mod errno;
pub mod ffi_guard;
pub mod fork_guard;
mod hold;
mod last_error;
mod memory;
mod nvmmu;
mod read;
mod stats;
mod write;

use spinio_device::{Allocation, DeviceAddr, registry};
use spinio_io::Target;

use crate::ffi_guard::Failure;

/// What other libraries of this process find the runtime by.
#[unsafe(no_mangle)]
static spinio_runtime_v1: spinio_runtime::Table = spinio_runtime::TABLE;

/// What an explicit call means by `address`: the devices themselves are asked before it counts as the host's.
fn target_of(address: *const u8, wanted: usize) -> Option<Target> {
    let target = |allocation: Allocation| Target { allocation, addr: DeviceAddr(address as u64) };
    registry::find(address, wanted).or_else(|| registry::find_after_fault(address, wanted)).map(target)
}

/// A part of a call that is moved at once.
struct Part {
    /// Where it begins in the buffer.
    at: usize,
    len: usize,
    /// Where it begins in the file.
    offset: u64,
    /// Where it begins in device memory, if the buffer is that.
    device: Option<Target>,
}

/// Moves `size` bytes of a buffer in parts of at most `most`, until one comes back short or fails; the bytes moved. A failure counts
/// only if nothing was moved before.
fn for_each_part(
    buffer: *const u8,
    size: usize,
    offset: i64,
    max_part: usize,
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
        let part = Part { at: done, len: max_part.min(size - done), offset: start + done as u64, device };
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
