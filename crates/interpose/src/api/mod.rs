//! The C API, declared in `include/spinio.h`: the header is its manual.
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
//! ```
//!
//! Every function answers as POSIX does, with -1 or NULL and errno, and keeps a sentence for `spinio_last_error`.
//! `SPINIO_DISABLE` turns off the hooks, not these: who calls them means them.

mod batch;
mod emulated;
mod hold;
mod memory;
mod nvmmu;
mod read;
mod stats;
mod write;

use spinio_device::{Allocation, DeviceAddr, registry};
use spinio_io::Target;

/// What an explicit call means by `address`: the devices themselves are asked before it counts as the host's.
fn target(address: *const u8, want: usize) -> Option<Target> {
    let target = |allocation: Allocation| Target { allocation, addr: DeviceAddr(address as u64) };
    registry::find(address, want).or_else(|| registry::find_after_fault(address, want)).map(target)
}
