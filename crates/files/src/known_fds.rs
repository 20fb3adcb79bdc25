//! Descriptors whose reads end by themselves: of regular files with a size, and of block devices. A small read at the
//! descriptor's own offset must know, and asks the kernel once for each open file instead of once for each read.
//!
//! ```text
//!   read(fd) ── number and count of changes as when the kernel was asked? ── yes ──> read
//!                    │ no                                                             ▲
//!                    └──> fstat ── regular with a size, or block device: stored ──────┘
//! ```
//!
//! The hooks of `close`, `dup2` and similar calls count the changes of a number (fd_identity.rs). So nothing is stored
//! where no hooks count.
//!
//! Known flaw: a number that was changed by a call without a hook (`fclose`, a raw system call) and is a pipe by now
//! counts as what it was. If its peer then sends nothing, the read that waits keeps one bounce buffer meanwhile.

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
pub struct PromptFds {
    /// A number and its count of changes in one word, so that no thread sees one without the other; 0: none.
    entries: [AtomicU64; ENTRIES],
    enabled: bool,
}

impl Default for PromptFds {
    fn default() -> PromptFds {
        PromptFds::new(CHANGES_ARE_COUNTED.load(Relaxed))
    }
}

impl PromptFds {
    fn new(enabled: bool) -> PromptFds {
        PromptFds { entries: [const { AtomicU64::new(0) }; ENTRIES], enabled }
    }

    /// Whether reads of this number end by themselves. `ask`: asks the kernel.
    #[inline]
    pub fn is_prompt(&self, fd: Fd, ask: impl FnOnce() -> bool) -> bool {
        if !self.enabled {
            return ask();
        }
        let identity = FdIdentity::of(fd);
        let entry = &self.entries[fd as usize % ENTRIES];
        let Some(word) = identity.settled_word() else { return ask() };
        if entry.load(Relaxed) == word {
            return true;
        }
        let prompt = ask();
        if prompt && identity.is_unchanged() {
            entry.store(word, Relaxed);
        }
        prompt
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd_identity::FdChange;

    #[test]
    fn kernel_is_asked_once_for_each_open_file() {
        // A number that no other test of this process uses.
        let (known, number) = (PromptFds::new(true), 60_100);
        let ask = |answer: bool| {
            let mut asked = 0;
            let prompt = known.is_prompt(number, || {
                asked += 1;
                answer
            });
            assert!(prompt == answer || asked == 0);
            (prompt, asked)
        };
        assert_eq!((ask(false), ask(true), ask(false)), ((false, 1), (true, 1), (true, 0)));
        let change = FdChange::begin(60_100, 60_100);
        assert_eq!((ask(true), ask(false)), ((true, 1), (false, 1)), "nothing is stored during a change");
        drop(change);
        assert_eq!((ask(false), ask(true), ask(true)), ((false, 1), (true, 1), (true, 0)));
        // It shares the entry.
        assert!(known.is_prompt(number + ENTRIES as Fd, || true));
        assert_eq!((ask(false), ask(true)), ((false, 1), (true, 1)));
    }

    #[test]
    fn change_during_the_question_is_noticed() {
        let known = PromptFds::new(true);
        assert!(known.is_prompt(60_110, || {
            drop(FdChange::begin(60_110, 60_110));
            true
        }));
        assert!(!known.is_prompt(60_110, || false), "the answer was about the file before");
    }

    #[test]
    fn kernel_is_asked_each_time_where_nothing_counts() {
        let known = PromptFds::new(false);
        assert!(known.is_prompt(60_120, || true) && !known.is_prompt(60_120, || false));
    }
}
