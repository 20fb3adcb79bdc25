//! The library as seen by programs: C programs, compiled here, run under LD_PRELOAD.
//!
//! ```text
//!   c/differential.c ... ──cc──> program ──┐
//!   c/memory.c (allocator shim, the only ──cc──> libmemory.so   names our symbols)
//!                                          └── LD_PRELOAD=libspinio.so program ── exit 0, or the difference
//! ```

mod build;
mod cuda;
mod device;
mod exports;
mod header;
mod kernels;
mod nvmmu;
mod programs;
mod stories;
mod users;
