//! The slots of a ring: numbers by which its reads name files, instead of descriptors of a table.

#![expect(unsafe_code, reason = "system calls")]

use rustix::io::Errno;

use super::{NR_REGISTER, Result, syscall};
use crate::linux::files::{Fd, close};
use crate::linux::pipe::pipe;

/// In a submission entry: the descriptor is the number of a slot.
pub(super) const SQE_FIXED_FILE: u64 = 1 << 8;
pub(super) const REGISTER_FILES: usize = 2;
pub(super) const REGISTER_FILES_UPDATE: usize = 6;

/// `struct io_uring_files_update`.
#[repr(C)]
struct FilesUpdate {
    offset: u32,
    reserved: u32,
    fds: u64,
}

/// # Safety
/// `arg` must be what the operation takes, and live across the call.
pub(super) unsafe fn register(ring: Fd, operation: usize, arg: usize, count: u32) -> Result<usize> {
    // SAFETY: passed on.
    unsafe { syscall(NR_REGISTER, [ring as usize, operation, arg, count as usize, 0, 0]) }
}

/// Gives a ring that many empty slots.
pub(super) fn add_slots(ring: Fd, count: u32) -> Result<()> {
    let empty = vec![-1 as Fd; count as usize];
    // SAFETY: an array of as many descriptors as said; the kernel copies it.
    unsafe { register(ring, REGISTER_FILES, empty.as_ptr() as usize, count) }.map(drop)
}

/// Puts a file into a slot, or none. On a thread with the ring's descriptor table.
pub(super) fn set_slot(ring: Fd, slot: u32, file: Option<Fd>) -> Result<()> {
    let file: Fd = file.unwrap_or(-1);
    let update = FilesUpdate { offset: slot, reserved: 0, fds: &raw const file as u64 };
    // SAFETY: `update` and `file` live across the call.
    unsafe { register(ring, REGISTER_FILES_UPDATE, &raw const update as usize, 1) }.map(drop)
}

/// Whether a slot that is emptied closes its file at once. Up to Linux 6.3 it does so a second later, and a file system
/// would stay busy after the program closed its last file. Uses slot 0, which must be empty.
fn frees_slots(ring: Fd) -> Result<bool> {
    let (out, into) = pipe()?;
    let put = set_slot(ring, 0, Some(out));
    let _ = close(out);
    let emptied = put.and_then(|()| set_slot(ring, 0, None)).is_ok();
    let mut state = libc::pollfd { fd: into, events: 0, revents: 0 };
    // SAFETY: one entry, alive across the call. Without a reader a pipe is in error; up to 2 ms for what the kernel does
    // on the way out of a system call.
    let closed = emptied && unsafe { libc::poll(&raw mut state, 1, 2) } == 1 && state.revents & libc::POLLERR != 0;
    let _ = close(into);
    Ok(closed)
}

/// The ring, if its slots close files at once.
pub(super) fn checked<R>(ring: Fd, value: R) -> Result<R> {
    if frees_slots(ring)? { Ok(value) } else { Err(Errno::OPNOTSUPP) }
}
