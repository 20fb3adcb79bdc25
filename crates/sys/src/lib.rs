//! The only foreign-function interface of SPIN.
//!
//! ```text
//!   linux/   system calls, directly into the Linux kernel: inside a preloaded library
//!            a libc wrapper would call SPIN's own hooks again
//!   cuda/    the CUDA driver, opened at run time, never linked
//!   injection.rs   where tests end or stop a process
//! ```
//!
//! No policy is here. A function makes one call, documents its requirements
//! and returns the result of the Linux kernel or of the driver unchanged.

pub mod cuda;
pub mod injection;
pub mod linux;

pub use rustix::io::Errno;
