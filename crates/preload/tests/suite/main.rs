//! The library as programs meet it: C programs, compiled here, run under LD_PRELOAD.
//!
//! ```text
//!   c/differential.c ... ──cc──> program ──┐
//!   c/memory.c (allocator shim, the only ──cc──> libmemory.so   names our symbols)
//!                                          └── LD_PRELOAD=libspinio.so program ── exit 0, or a line that says what differs
//! ```

mod build;
mod cuda;
mod device;
mod exports;
mod header;
mod nvmmu;
mod programs;
mod users;
