//! One pinned file, and a use of its pins.

use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex};

use spinio_files::{FileState, Files};
use spinio_sys::linux::{Fd, FileKey};

use crate::pinned_pages::PinnedPages;
use crate::ref_gate::RefGate;
use crate::write_exclusion::WriteExclusion;

/// A pinned file.
pub(crate) struct PinnedFile {
    pub(crate) key: FileKey,
    /// A number of its own: the same file may be pinned again later.
    pub(crate) generation: u64,
    /// The descriptor that it was pinned with.
    pub(crate) fd: Fd,
    pub(crate) file: Arc<FileState>,
    pub(crate) size: u64,
    pub(crate) exclusion: WriteExclusion,
    /// The inotify watch that reports changes; 0: none.
    pub(crate) inotify_wd: AtomicI32,
    pub(crate) gate: RefGate<PinnedPages>,
    /// Pages are registered with one device at a time.
    pub(crate) pin_lock: Mutex<()>,
}

impl PinnedFile {
    /// The lease's descriptor, of the shadow table.
    pub(crate) fn lease(&self) -> Option<Fd> {
        match &self.exclusion {
            WriteExclusion::Lease(fd, _) => Some(fd.get()),
            _ => None,
        }
    }

    /// Unpins the pages if no thread uses them: the number of bytes. For a thread that may call the device.
    pub(crate) fn unpin_unused(&self) -> Option<u64> {
        let mut bytes = 0;
        for pages in self.gate.take_unused()? {
            bytes += pages.bytes();
            pages.unpin();
        }
        self.gate.set_unpinned();
        Some(bytes)
    }
}

/// A use of a file's pins: they stay until it is dropped.
pub struct PinGuard {
    file: Arc<PinnedFile>,
    /// The registered pages.
    pub pages: Arc<PinnedPages>,
    is_mapping: bool,
}

impl PinGuard {
    /// The caller has acquired the file's gate.
    pub(crate) fn new(file: Arc<PinnedFile>, pages: Arc<PinnedPages>) -> PinGuard {
        PinGuard { file, pages, is_mapping: false }
    }

    /// Length of the file.
    pub fn size(&self) -> u64 {
        self.file.size
    }

    /// Whether the bytes read so far are the file's. `fd`: a descriptor of it, of this thread.
    pub fn is_still_valid(&self, files: &Arc<Files>, fd: Fd) -> bool {
        self.file.exclusion.still_excluded(files, fd)
    }

    /// Counts as a mapping from now on.
    pub(crate) fn mark_mapping(&mut self) {
        self.is_mapping = true;
        self.file.gate.mark_mapping();
    }

    /// Whether the file is being unpinned.
    pub fn is_closing(&self) -> bool {
        self.file.gate.is_closing()
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        self.file.gate.release(self.is_mapping);
    }
}
