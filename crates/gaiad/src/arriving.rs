//! The pages of a file whose bytes are on their way from device memory, by parts: a part is what one chunk brings.
//!
//! ```text
//!   file    │ part 7: there │ part 8: on its way │ part 9: on its way │ never handed over │
//!             READ, WRITE     wait for part 8                            READ, WRITE
//! ```
//!
//! What looks at bytes of pages, or frees their slots, waits for the parts that have one of these pages, and for no other. A
//! request of the Linux kernel does not wait here, but without a worker of the server (late.rs).
//! A part is the range from its first page to its last one, so that there are few.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock::lock;

/// The parts, by a number that no other part has.
#[derive(Debug, Default)]
pub(crate) struct Arriving {
    /// How many there are, so that files without one take no lock.
    count: AtomicUsize,
    parts: Mutex<Vec<(u64, Range<u64>)>>,
    changed: Condvar,
    waiting: AtomicUsize,
}

impl Arriving {
    /// The bytes of a part are on their way from now on.
    pub(crate) fn begin(&self, number: u64, pages: Range<u64>) {
        let mut parts = lock(&self.parts);
        parts.push((number, pages));
        self.count.store(parts.len(), SeqCst);
    }

    /// They are there.
    pub(crate) fn end(&self, number: u64) {
        let mut parts = lock(&self.parts);
        parts.retain(|(other, _)| *other != number);
        self.count.store(parts.len(), SeqCst);
        // What is counted later finds the part gone. To notify is a system call, whether or not something waits.
        if self.is_waited_for() {
            self.changed.notify_all();
        }
    }

    /// Whether there is a part.
    pub(crate) fn any(&self) -> bool {
        self.count.load(SeqCst) > 0
    }

    /// Whether there is a part with one of these pages.
    pub(crate) fn has(&self, pages: &Range<u64>) -> bool {
        self.any() && overlaps(&lock(&self.parts), pages)
    }

    /// Returns when there is none. With no lock that the end of a part needs, nor one that others need meanwhile.
    pub(crate) fn wait(&self, pages: &Range<u64>) {
        let _waits = self.count_waiting();
        let mut parts = lock(&self.parts);
        while overlaps(&parts, pages) {
            parts = self.changed.wait(parts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns when a part has ended, when there is none, or after this time.
    pub(crate) fn wait_for_change(&self, within: Duration) {
        let _waits = self.count_waiting();
        let parts = lock(&self.parts);
        if !parts.is_empty() {
            drop(self.changed.wait_timeout(parts, within).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Something waits until this is dropped.
    pub(crate) fn count_waiting(&self) -> Waits<'_> {
        self.waiting.fetch_add(1, SeqCst);
        Waits(self)
    }

    /// Whether something waits for a part.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }
}

/// Something that waits.
pub(crate) struct Waits<'a>(&'a Arriving);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, SeqCst);
    }
}

fn overlaps(parts: &[(u64, Range<u64>)], pages: &Range<u64>) -> bool {
    parts.iter().any(|(_, part)| part.start < pages.end && pages.start < part.end)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn pages_wait_for_the_parts_that_have_one_of_them() {
        let arriving = Arriving::default();
        assert!(!arriving.any() && !arriving.has(&(0..u64::MAX)));
        arriving.begin(1, 10..20);
        arriving.begin(2, 30..40);
        for (pages, wanted) in [
            (0..10, false),
            (0..11, true),
            (19..20, true),
            (20..30, false),
            (15..15, true),
            (39..u64::MAX, true),
            (40..41, false),
        ] {
            assert_eq!(arriving.has(&pages), wanted, "{pages:?}");
        }
        // These do not wait.
        arriving.wait(&(0..10));
        arriving.wait(&(20..30));
        std::thread::scope(|scope| {
            let (done, is_done) = mpsc::channel();
            let arriving = &arriving;
            scope.spawn(move || {
                arriving.wait(&(5..12));
                done.send(arriving.has(&(10..20))).unwrap();
            });
            arriving.end(2);
            assert!(is_done.try_recv().is_err(), "it waits for the other part");
            arriving.end(1);
            assert!(!is_done.recv().unwrap());
        });
        assert!(!arriving.any());
    }
}
