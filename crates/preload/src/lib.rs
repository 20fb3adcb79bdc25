//! libspinio.so, the library that an unmodified program loads.
//!
//! ```text
//!   program ── pread(fd, gpu, n, off) ──> hooks/ ── host memory ──> next_symbol: libc's own pread
//!      │                                    │ device memory
//!      │                                    ▼
//!      └── spinio_pread(...) ──> crates/capi ──> spinio_io::runtime()
//! ```
//!
//! Loaded by LD_PRELOAD, or linked by a program that wants the C API. Interposed symbols carry no version node, since
//! the loader would then never bind a program's versioned reference to them; `exports.txt` lists every name.
//!
//! Known flaws:
//! - A statically linked program, a setuid program and a raw system call never reach these hooks.
//! - Only calls of libc's users are seen. What libc does inside itself (`getline`, `fgets`, iostreams that gather small
//!   chunks) stores with the CPU, and crashes on device memory as it does without SPIN.

mod caller;
mod disabled;
mod hooks;
mod next_symbol;

use spinio_capi::{errno, ffi_guard};
