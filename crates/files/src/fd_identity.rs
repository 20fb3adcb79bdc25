//! Whether a descriptor number has referred to one file all the time.
//!
//! ```text
//!   of(fd) ── read by number ── is_still(file) ── read by number ── is_still(file)
//!                  └── dup2 of another file over the number, and back: fstat does not show that
//! ```
//!
//! Each system call looks its number up again, so a read that takes several could return bytes of two files. `fstat`
//! before and after finds a number that refers to another file *by then*. It does not find one that referred to another
//! file in between. So the hooks of `close`, `dup2` and similar calls count here how often a number was reassigned, and
//! data that was read while the count changed is read again.
//!
//! A change is counted before the system call and ends after it, because a read may begin between the count and the
//! call:
//!
//! ```text
//!   program   count, dup2(B)      count ─────────── dup2(A)
//!   reader                              of(fd), read: B     is_still(A)?   the count is the same, and the file is A
//! ```
//!
//! So the file is checked before the read too, after the count was noted: one change in progress can then take the file
//! away, and the change that restores it is counted. Two in progress could do both, and such a number is not trusted.
//!
//! A word holds how many changes have begun, and how many of them have not ended. It is in memory that Linux allocates
//! when its page is first used. Numbers from [`NUMBERS`] on share the words of others, which costs a second read if
//! both are in use.
//!
//! Linux frees a number at the beginning of `close`, which may then wait for a file server: meanwhile the number may be
//! that of another open file, with this one change in progress.
//!
//! Known flaw: calls without a hook are not counted: raw system calls, `fclose`, io_uring, a program without the hooks
//! (Python, or one that links the C API and is not preloaded). There a number that is reassigned and restored between
//! two checks, about 10 us to 1 ms apart, is not noticed. To close that gap too, the bytes would have to be read
//! through a private reference of the open file (`pidfd_getfd`) by threads with an unshared descriptor table, which
//! costs a hand-over for each request.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use spinio_sys::linux::{Fd, FileKey};

use spinio_host::syscalls::Syscalls;

use crate::shadow_file::is_shadow;

/// Numbers that are counted separately.
const NUMBERS: usize = 1 << 16;

/// Adds a change that has begun and not ended. The low 16 bits of a word count those that have not ended.
const BEGIN: u64 = (1 << 16) + 1;
const IN_PROGRESS: u64 = (1 << 16) - 1;

static CHANGES: [AtomicU64; NUMBERS] = [const { AtomicU64::new(0) }; NUMBERS];

/// A change of descriptor numbers by the program, from before the system call that closes or reassigns them until this
/// is dropped. May be created and dropped in any context: it takes no lock.
#[must_use]
pub struct FdChange {
    words: Range<usize>,
}

impl FdChange {
    /// Of the numbers from `first` to `last`.
    pub fn begin(first: u32, last: u32) -> FdChange {
        let (from, to) = (first as usize, last as usize);
        let words = match to.checked_sub(from) {
            None => 0..0,
            Some(0) => from % NUMBERS..from % NUMBERS + 1,
            // All numbers from `from` on: those above the limit are not known to be in use.
            Some(_) if from < NUMBERS => from..NUMBERS.min(to + 1),
            // They share the words of those below.
            Some(_) => 0..NUMBERS,
        };
        for word in &CHANGES[words.clone()] {
            word.fetch_add(BEGIN, SeqCst);
        }
        FdChange { words }
    }
}

impl Drop for FdChange {
    fn drop(&mut self) {
        for word in &CHANGES[self.words.clone()] {
            word.fetch_sub(1, SeqCst);
        }
    }
}

/// A number, and how often it had been reassigned when this was created.
#[derive(Clone, Copy, Debug)]
pub struct FdIdentity {
    fd: Fd,
    changes: u64,
}

impl FdIdentity {
    /// Counts changes from now on. The file is to be checked after this and before it is read.
    pub fn of(fd: Fd) -> FdIdentity {
        FdIdentity { fd, changes: changes(fd) }
    }

    /// Whether no change was in progress when this was created: then no change before the read goes unnoticed, and the
    /// file need not be checked before it.
    pub fn is_settled(&self) -> bool {
        self.changes & IN_PROGRESS == 0
    }

    /// Number and count in one word, not 0; `None` while a change is in progress, and for numbers without a count of
    /// their own.
    pub(crate) fn settled_word(&self) -> Option<u64> {
        let own = usize::try_from(self.fd).is_ok_and(|fd| fd < NUMBERS);
        (own && self.is_settled()).then_some((self.changes >> 16) << 17 | (self.fd as u64) << 1 | 1)
    }

    /// Whether the number refers to this file, and has done so all the time.
    pub fn is_still(&self, sys: &dyn Syscalls, key: FileKey) -> bool {
        sys.is_file(self.fd, key) && self.is_unchanged()
    }

    /// Whether the number still refers to the file of the first check, if it refers to it now. To be checked last.
    pub fn is_unchanged(&self) -> bool {
        self.changes & IN_PROGRESS <= 1 && !self.is_changed_since()
    }

    /// Whether a change has begun since this was created.
    fn is_changed_since(&self) -> bool {
        (changes(self.fd) ^ self.changes) & !IN_PROGRESS != 0
    }
}

/// A number and the file that it referred to when a request began, for requests that take several system calls and know
/// no [`FileState`](crate::FileState).
#[derive(Clone, Copy, Debug)]
pub struct SameFile {
    number: FdIdentity,
    /// `None`: `fstat` failed.
    file: Option<FileKey>,
}

impl SameFile {
    /// The file that a number refers to now.
    pub fn of(sys: &dyn Syscalls, fd: Fd) -> SameFile {
        // Counts first: a change between the two is noticed.
        let number = FdIdentity::of(fd);
        SameFile { number, file: file_of(sys, fd) }
    }

    /// The same, of a number whose file is known.
    pub fn known(fd: Fd, file: FileKey) -> SameFile {
        SameFile { number: FdIdentity::of(fd), file: Some(file) }
    }

    /// Whether the number refers to that file, and has done so all the time: one `fstat`.
    pub fn is_same(&self, sys: &dyn Syscalls) -> bool {
        file_of(sys, self.number.fd) == self.file && self.number.is_unchanged()
    }

    /// Whether the number refers to that file now, and no change has begun since. Unlike [`SameFile::is_same`], this is
    /// true of a number with two changes in progress too, which calls that a signal handler has left never end.
    pub fn refers_to_it_now(&self, sys: &dyn Syscalls) -> bool {
        file_of(sys, self.number.fd) == self.file && !self.number.is_changed_since()
    }
}

fn file_of(sys: &dyn Syscalls, fd: Fd) -> Option<FileKey> {
    sys.fstat(fd).ok().map(|stat| stat.key())
}

/// Shadow files have numbers that no call of the program changes.
fn changes(fd: Fd) -> u64 {
    if is_shadow(fd) { 0 } else { CHANGES[fd as usize % NUMBERS].load(SeqCst) }
}

/// Tests one at a time: a change of all numbers is one of those that another test looks at.
#[cfg(test)]
pub(crate) static TESTS: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::PoisonError;

    use spinio_host::syscalls::LinuxSyscalls;

    use super::*;

    #[test]
    fn numbers_are_counted_separately_and_in_ranges() {
        let _one = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
        // Numbers that no other test of this process uses.
        let [below, first, last, above] = [60_000, 60_001, 60_010, 60_011].map(FdIdentity::of);
        drop(FdChange::begin(60_001, 60_001));
        assert!(below.is_unchanged() && !first.is_unchanged() && last.is_unchanged());
        let first = FdIdentity::of(60_001);
        drop(FdChange::begin(60_001, 60_010));
        assert!(below.is_unchanged() && !first.is_unchanged() && !last.is_unchanged() && above.is_unchanged());
        drop(FdChange::begin(2, 1));
        drop(FdChange::begin(100_000, u32::MAX));
        assert!(!above.is_unchanged() && FdIdentity::of(-1).is_unchanged());
    }

    #[test]
    fn number_is_not_trusted_while_two_changes_are_in_progress() {
        let _one = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
        let first = FdChange::begin(60_020, 60_020);
        let during_one = FdIdentity::of(60_020);
        assert!(during_one.is_unchanged());
        let second = FdChange::begin(60_020, 60_020);
        let during_two = FdIdentity::of(60_020);
        assert!(!during_one.is_unchanged() && !during_two.is_unchanged());
        drop((first, second));
        assert!(!during_one.is_unchanged() && !during_two.is_unchanged() && FdIdentity::of(60_020).is_unchanged());
    }
    #[test]
    fn same_file_is_the_same_inode_without_a_change_in_between() {
        let _one = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let [ours, theirs] = files.each_ref().map(AsRawFd::as_raw_fd);
        let sys = &LinuxSyscalls;
        let (before, other) = (SameFile::of(sys, ours), SameFile::known(ours, sys.fstat(theirs).unwrap().key()));
        assert!(before.is_same(sys) && !other.is_same(sys));
        drop(FdChange::begin(ours as u32, ours as u32));
        assert!(!before.is_same(sys) && SameFile::of(sys, ours).is_same(sys));
        assert!(!before.refers_to_it_now(sys));
        // Changes that never end.
        for _ in 0..2 {
            std::mem::forget(FdChange::begin(ours as u32, ours as u32));
        }
        let during = SameFile::of(sys, ours);
        assert!(!during.is_same(sys) && during.refers_to_it_now(sys) && !other.refers_to_it_now(sys));
        drop(FdChange::begin(ours as u32, ours as u32));
        assert!(!during.refers_to_it_now(sys));
    }
}
