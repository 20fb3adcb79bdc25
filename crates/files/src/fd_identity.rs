//! Whether a descriptor number has referred to one file all the time.
//!
//! ```text
//!   of(fd) ── read by number ── is_still(file) ── read by number ── is_still(file)
//!                  └── dup2 of another file over the number, and back: fstat does not show that
//! ```
//!
//! Each system call looks its number up again, so a read that takes several could return bytes of two files. `fstat` before
//! and after finds a number that refers to another file *by then*. It does not find one that referred to another file in
//! between. So the hooks of `close`, `dup2` and similar calls count here, before they pass the call on, how often a number
//! was reassigned, and data that was read while the count changed is read again.
//!
//! A count is one word, in memory that Linux allocates when its page is first used. Numbers from [`NUMBERS`] on share the
//! words of others, which costs a second read if both are in use.
//!
//! Known flaw: calls without a hook are not counted: raw system calls, `fclose`, io_uring, a program without the hooks
//! (Python, or one that links the C API and is not preloaded). There a number that is reassigned and restored between two
//! checks, about 10 us to 1 ms apart, is not noticed. To close that gap too, the bytes would have to be read through a private
//! reference of the open file (`pidfd_getfd`) by threads with an unshared descriptor table, which costs a hand-over for each
//! request.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use spinio_sys::linux::Fd;

use spinio_host::syscalls::Syscalls;

use crate::shadow_file::is_shadow;

/// Numbers that are counted separately.
const NUMBERS: usize = 1 << 16;

static CHANGES: [AtomicU32; NUMBERS] = [const { AtomicU32::new(0) }; NUMBERS];

/// The program is about to close or reassign the numbers from `first` to `last`. To be called before the system call, from
/// any context: it takes no lock.
pub fn fds_change(first: u32, last: u32) {
    if first > last {
        return;
    }
    let (from, to) = (first as usize, last as usize);
    let words = match to - from {
        0 => from % NUMBERS..from % NUMBERS + 1,
        _ if to < NUMBERS => from..to + 1,
        // Numbers above the limit share the words of those below.
        _ => 0..NUMBERS,
    };
    for count in &CHANGES[words] {
        count.fetch_add(1, SeqCst);
    }
}

/// A number, and how often it had been reassigned when this was created.
#[derive(Clone, Copy, Debug)]
pub struct FdIdentity {
    fd: Fd,
    changes: u32,
}

impl FdIdentity {
    /// Counts changes from now on. To be created before the first check of the file.
    pub fn of(fd: Fd) -> FdIdentity {
        FdIdentity { fd, changes: changes(fd) }
    }

    /// Whether the number refers to the file with this device number and inode, and has done so all the time.
    pub fn is_still(&self, sys: &dyn Syscalls, key: (u64, u64)) -> bool {
        sys.is_file(self.fd, key) && self.is_unchanged()
    }

    /// Whether the number was not reassigned since. To be checked last, of a number that refers to the right file: a number
    /// that was restored was counted before that.
    pub fn is_unchanged(&self) -> bool {
        changes(self.fd) == self.changes
    }
}

/// Shadow files have numbers that no call of the program changes.
fn changes(fd: Fd) -> u32 {
    if is_shadow(fd) { 0 } else { CHANGES[fd as usize % NUMBERS].load(SeqCst) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_separately_and_in_ranges() {
        // Numbers that no other test of this process uses.
        let [below, first, last, above] = [60_000, 60_001, 60_010, 60_011].map(FdIdentity::of);
        fds_change(60_001, 60_001);
        assert!(below.is_unchanged() && !first.is_unchanged() && last.is_unchanged());
        let first = FdIdentity::of(60_001);
        fds_change(60_001, 60_010);
        assert!(below.is_unchanged() && !first.is_unchanged() && !last.is_unchanged() && above.is_unchanged());
        fds_change(2, 1);
        fds_change(100_000, u32::MAX);
        assert!(!above.is_unchanged() && FdIdentity::of(-1).is_unchanged());
    }
}
