//! WRITEs whose bytes go to the file without the lock of its pages, so that those of a write-back run side by side.
//!
//! ```text
//!   lock ─ no page has to be looked at? ── yes: new versions, pages are on their way ─ unlock ─ pwrite ─ there
//!             └ no: merge, copy bases, pwrite ─ unlock            └ what looks at their bytes waits (arriving.rs)
//! ```
//!
//! The Linux kernel sends a WRITE for each run of dirty pages, up to 64 at a time. With the lock held over each pwrite the
//! threads that handle them slept and woke one after the other.
//!
//! Whoever waits for pages must not wait for ever: as long as something does, WRITEs keep the lock.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_pagecache::{self as pagecache, Backing as _, WriteFrom};

use crate::arriving::Arriving;
use crate::file_backing::FileBacking;
use crate::files::File;

/// Pages of a file that are overwritten now.
#[derive(Debug, Default)]
pub(crate) struct Overwrites {
    pages: Arriving,
    numbers: AtomicU64,
}

/// A WRITE without the lock, until this is dropped.
struct Overwrite<'a>(&'a Arriving, u64);

impl Overwrites {
    /// Whether one of these pages is being overwritten.
    pub(crate) fn has(&self, pages: &Range<u64>) -> bool {
        self.pages.has(pages)
    }

    /// Returns when none is. Without the lock of the file's pages.
    pub(crate) fn wait(&self, pages: &Range<u64>) {
        self.pages.wait(pages);
    }

    /// With the lock of the file's pages.
    fn begin(&self, pages: &Range<u64>) -> Overwrite<'_> {
        let number = self.numbers.fetch_add(1, Relaxed);
        self.pages.begin(number, pages.clone());
        Overwrite(&self.pages, number)
    }
}

impl Drop for Overwrite<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl File {
    /// A WRITE of these pages.
    pub(crate) fn write(
        &self,
        backing: FileBacking<'_>,
        pages: &Range<u64>,
        offset: u64,
        bytes: &[u8],
        from: WriteFrom,
    ) -> pagecache::Result<()> {
        let mut table = self.pages_to_change(pages);
        if self.overwrites().pages.is_waited_for() || !table.begin_overwrite(offset, bytes.len()) {
            return table.write(&backing, offset, bytes, from);
        }
        let _overwrite = self.overwrites().begin(pages);
        drop(table);
        Ok(backing.write(offset, bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::{Arc, mpsc};

    use spinio_fuse::Negotiated;
    use spinio_pagecache::{FilePages, KernelPages, PAGE, Slots};

    use super::*;
    use crate::slot_memory::PageSlots;
    use crate::state::StateMemory;

    #[test]
    fn overwritten_pages_are_waited_for_and_while_something_waits_the_lock_is_kept() {
        let negotiated = Negotiated { minor: 31, max_write: 4096, max_readahead: 0, flags: 0 };
        let memory = PageSlots::new(Arc::new(StateMemory::create(negotiated, 1 << 20).unwrap()));
        let slots = Slots::format(Arc::new(memory)).unwrap();
        let file = File::new(1, FilePages::new(slots, 1, KernelPages::None, 8 * PAGE as u64));
        let below = tempfile::tempfile().unwrap();
        let write = |page: u64, byte| {
            let (at, bytes) = (page * PAGE as u64, [byte; PAGE]);
            file.write(FileBacking(below.as_fd()), &(page..page + 1), at, &bytes, WriteFrom::PageCache).unwrap();
        };
        let without_lock = || file.overwrites().numbers.load(Relaxed);
        write(1, 1);
        assert_eq!(without_lock(), 1);
        let overwrite = file.overwrites().begin(&(2..3));
        // These do not wait.
        drop(file.pages_of(&(0..2)));
        drop(file.pages_of(&(3..8)));
        std::thread::scope(|scope| {
            let (done, is_done) = mpsc::channel();
            let file = &file;
            scope.spawn(move || {
                drop(file.pages_of(&(0..4)));
                done.send(()).unwrap();
            });
            spinio_testkit::eventually("a thread waits", || file.overwrites().pages.is_waited_for());
            write(5, 2);
            assert_eq!(without_lock(), 2, "the lock was kept");
            assert!(is_done.try_recv().is_err());
            drop(overwrite);
            is_done.recv().unwrap();
        });
        write(5, 3);
        assert_eq!(without_lock(), 3);
        let mut read = [0; 2];
        for (byte, page) in read.iter_mut().zip([1, 5]) {
            rustix::io::pread(&below, std::slice::from_mut(byte), page * PAGE as u64 + 7).unwrap();
        }
        assert_eq!(read, [1, 3]);
    }
}
