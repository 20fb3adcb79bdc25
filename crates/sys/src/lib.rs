//! The only foreign-function interface of SPIN.
//!
//! ```text
//!   linux/   system calls, straight into the kernel: inside a preloaded library
//!            a libc wrapper would call SPIN's own hooks again
//!   cuda/    the CUDA driver, opened at run time, never linked
//! ```
//!
//! Nothing here decides anything. A function does one call, says what it needs
//! and hands back the kernel's or the driver's own answer.

pub mod cuda;
pub mod linux;

pub use rustix::io::Errno;
