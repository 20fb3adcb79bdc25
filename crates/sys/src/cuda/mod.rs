//! The CUDA driver, opened at run time and never linked.
//!
//! SPIN runs in the processes of other programs, so it uses the driver as it is:
//!
//! ```text
//!   Driver::loaded()   the driver that the program itself has loaded, or None      (library)
//!   Driver::load()     loads it                                                    (command)
//!        │
//!        ▼
//!   table ── every function looked up once; functions that a driver may lack are an Option
//!        ▼
//!   calls/ ── one method per function: the driver's own status as Result<_, CuError>
//! ```
//!
//! Why a separate table, when complete bindings exist: those open libraries the program never requested, look symbols
//! up by panicking, and prefer `libcuda.so` (a toolkit's stub, if one is installed) to `libcuda.so.1` (the driver).
//! Inside a preloaded library each of these harms a correct program.
//!
//! Handles are plain numbers here. The caller must ensure that one is alive, which is why nearly every call that
//! takes one is `unsafe`: the driver does not check them.
//!
//! Known flaws: drivers before CUDA 12 (525) are not used: only `cuCtxGetId` distinguishes a context from another at
//! the same address, and the driver crashes on handles of a dead one. The driver is never closed again.

mod calls;
mod error;
mod nvrtc;
mod table;
mod types;

pub use error::CuError;
pub use nvrtc::{CompileError, Compiler};
pub use table::{Driver, LoadError};
pub use types::*;

#[cfg(test)]
mod tests;
