//! Hooks of `writev` and `pwritev`, whose vectors may mix host and device buffers.
//!
//! ```text
//!   all host      the next function, untouched
//!   else          one system call: host parts as they are, bounce buffers in the place of device parts
//! ```
//!
//! Known flaw: a part of device memory that SPIN has not been notified of, after host parts, ends the call short. When
//! the rest is written, as after any short write, the kernel returns EFAULT, and the devices are queried.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::c_int;

use libc::iovec;
use spinio_io::{Part, program_fd, runtime};

use super::vector::{FilePosition, parts, serve};
use super::{hook, target};
use crate::ffi_guard::{self as guard, Failure};
use crate::next_symbol as next;

hook! {
    fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> isize, caller in "rcx" =>
        serve(fd, vectors, count, FilePosition::FileOffset, 0, caller, write_parts, || next::WRITEV.get()(fd, vectors, count));
    fn pwritev(fd: c_int, vectors: *const iovec, count: c_int, offset: i64) -> isize, caller in "r8" =>
        serve(fd, vectors, count, FilePosition::Offset(offset), 0, caller, write_parts,
            || next::PWRITEV.get()(fd, vectors, count, offset));
    fn pwritev64(fd: c_int, vectors: *const iovec, count: c_int, offset: i64) -> isize, caller in "r8" =>
        serve(fd, vectors, count, FilePosition::Offset(offset), 0, caller, write_parts,
            || next::PWRITEV64.get()(fd, vectors, count, offset));
    fn pwritev2(fd: c_int, vectors: *const iovec, count: c_int, offset: i64, flags: c_int) -> isize, caller in "r9" =>
        serve(fd, vectors, count, FilePosition::of_preadv2(offset), flags, caller, write_parts,
            || next::PWRITEV2.get()(fd, vectors, count, offset, flags));
    fn pwritev64v2(fd: c_int, vectors: *const iovec, count: c_int, offset: i64, flags: c_int) -> isize,
        caller in "r9" =>
        serve(fd, vectors, count, FilePosition::of_preadv2(offset), flags, caller, write_parts,
            || next::PWRITEV64V2.get()(fd, vectors, count, offset, flags));
}

#[cold]
#[inline(never)]
fn write_parts(fd: c_int, vectors: *const iovec, count: c_int, at: FilePosition, flags: c_int) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        // SAFETY: `any_device` has looked at the same vectors in this call.
        let vectors = unsafe { core::slice::from_raw_parts(vectors, count as usize) };
        let parts: Vec<Part> = parts(vectors)?
            .iter()
            .map(|part| match part.device {
                Some(allocation) => Part::Device(target(allocation, part.at), part.len),
                None => Part::Host(part.at, part.len),
            })
            .collect();
        let at = match at {
            FilePosition::FileOffset => None,
            FilePosition::Offset(offset) => Some(u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?),
        };
        Ok(runtime().write_parts(program_fd(fd), at, flags as u32, &parts)?)
    })
}
