//! The CUDA driver, opened at run time and never linked.
//!
//! SPIN lives in other people's processes, so it takes the driver as it finds it:
//!
//! ```text
//!   Driver::loaded()   the driver that the program itself has loaded, or None      (library)
//!   Driver::load()     loads it                                                    (command)
//!        │
//!        ▼
//!   table ── every function looked up once; what a driver may lack is an Option
//!        │
//!        ▼
//!   calls/ ── one method a function: the driver's own answer as Result<_, CuError>
//! ```
//!
//! Why a table of our own, when complete bindings exist: those open libraries the program never asked for, look
//! symbols up by panicking, and prefer `libcuda.so` (a toolkit's stub, where one is installed) to `libcuda.so.1`
//! (the driver). Inside a preloaded library each of these is harm to a program that did nothing wrong.
//!
//! Handles are plain numbers here. Whether one is alive is the caller's to know, which is why nearly every call that
//! takes one is `unsafe`: the driver does not check them.
//!
//! Known flaws: drivers before CUDA 12 (525) are not used: only `cuCtxGetId` tells a context from another one at the same
//! address, and the driver crashes on handles of a dead one. The driver is never closed again.

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
