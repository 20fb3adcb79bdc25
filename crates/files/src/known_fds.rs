//! Descriptors of which something is known that a read must know: the kernel is asked once for each open file instead of
//! once for each read.
//!
//! ```text
//!   read(fd) ── number and count of changes as when the kernel was asked? ── yes ──> read
//!                    │ no                                                             ▲
//!                    └──> fstat, or statfs ── it is so: stored ───────────────────────┘
//! ```
//!
//! | of | what | who must know |
//! |---|---|---|
//! | `prompt_fds` | reads end by themselves: a regular file with a size, or a block device | a read at the descriptor's own offset |
//! | `local_fds` | the file is on a disk of this machine, or in memory | a read during which handlers of signals wait; of a stream, its hint says so |
//!
//! The hooks of `close`, `dup2` and similar calls count the changes of a number (fd_identity.rs). So nothing is stored
//! where no hooks count.
//!
//! Known flaw: a number that was changed by a call without a hook (`fclose`, a raw system call) and is a pipe by now
//! counts as what it was. If its peer then sends nothing, the read that waits keeps one bounce buffer meanwhile; and one
//! that is now a file of a server has handlers wait for that server.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use spinio_sys::linux::Fd;

use crate::fd_identity::FdIdentity;

/// Numbers with separate entries; others share one, which only costs further questions.
const ENTRIES: usize = 256;

/// Hooks count the changes of descriptors in this process.
static CHANGES_ARE_COUNTED: AtomicBool = AtomicBool::new(false);

/// Hooks count the changes of descriptors from now on; before the first read into a device.
pub fn set_changes_counted() {
    CHANGES_ARE_COUNTED.store(true, Relaxed);
}

/// The descriptors that are known.
pub struct KnownFds {
    /// A number and its count of changes in one word, so that no thread sees one without the other; 0: none.
    entries: [AtomicU64; ENTRIES],
    enabled: bool,
}

impl Default for KnownFds {
    fn default() -> KnownFds {
        KnownFds::new(CHANGES_ARE_COUNTED.load(Relaxed))
    }
}

impl KnownFds {
    fn new(enabled: bool) -> KnownFds {
        KnownFds { entries: [const { AtomicU64::new(0) }; ENTRIES], enabled }
    }

    /// Whether it is so of this number. `ask`: asks the kernel.
    #[inline]
    pub fn is_known(&self, fd: Fd, ask: impl FnOnce() -> bool) -> bool {
        if !self.enabled {
            return ask();
        }
        let identity = FdIdentity::of(fd);
        let entry = &self.entries[fd as usize % ENTRIES];
        let Some(word) = identity.settled_word() else { return ask() };
        if entry.load(Relaxed) == word {
            return true;
        }
        let is_so = ask();
        if is_so && identity.is_unchanged() {
            entry.store(word, Relaxed);
        }
        is_so
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd_identity::FdChange;

    #[test]
    fn kernel_is_asked_once_for_each_open_file() {
        // A number that no other test of this process uses.
        let (known, number) = (KnownFds::new(true), 60_100);
        let ask = |answer: bool| {
            let mut asked = 0;
            let is_so = known.is_known(number, || {
                asked += 1;
                answer
            });
            assert!(is_so == answer || asked == 0);
            (is_so, asked)
        };
        assert_eq!((ask(false), ask(true), ask(false)), ((false, 1), (true, 1), (true, 0)));
        let change = FdChange::begin(60_100, 60_100);
        assert_eq!((ask(true), ask(false)), ((true, 1), (false, 1)), "nothing is stored during a change");
        drop(change);
        assert_eq!((ask(false), ask(true), ask(true)), ((false, 1), (true, 1), (true, 0)));
        // It shares the entry.
        assert!(known.is_known(number + ENTRIES as Fd, || true));
        assert_eq!((ask(false), ask(true)), ((false, 1), (true, 1)));
    }

    #[test]
    fn change_during_the_question_is_noticed() {
        let known = KnownFds::new(true);
        assert!(known.is_known(60_110, || {
            drop(FdChange::begin(60_110, 60_110));
            true
        }));
        assert!(!known.is_known(60_110, || false), "the answer was about the file before");
    }

    #[test]
    fn kernel_is_asked_each_time_where_nothing_counts() {
        let known = KnownFds::new(false);
        assert!(known.is_known(60_120, || true) && !known.is_known(60_120, || false));
    }
}
