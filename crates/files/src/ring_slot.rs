//! The slots of a file in rings, from its first read of storage until it is forgotten: in the ring that all threads fill
//! (host/src/storage_ring.rs), and in those of threads that read it themselves (host/src/thread_rings.rs).
//!
//! ```text
//!   first read, of a thread ──> shadow worker: add_file(shadow descriptor) ──> later reads take the ring
//!   file dropped ──> shadow worker: remove_file, then close        no read holds the file any more
//! ```
//!
//! The descriptor in the slot is the shadow descriptor, which was checked when it was opened: the program cannot change
//! what the slot reads.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use spinio_host::lock;
use spinio_host::storage_ring::StorageRing;
use spinio_host::thread_rings::ThreadRing;
use spinio_sys::linux::Fd;
use spinio_sys::linux::fs_magic::{EXT4, XFS};

/// Where a file is in the ring.
#[derive(Default)]
pub(crate) struct RingSlot {
    /// `None`: there was no room.
    slot: OnceLock<Option<(Arc<StorageRing>, u32)>>,
    asked: AtomicBool,
    of_threads: Mutex<Vec<ThreadSlot>>,
}

/// A file in the ring of a thread; `None`: there was no room.
struct ThreadSlot {
    ring: Arc<ThreadRing>,
    slot: Option<u32>,
}

impl RingSlot {
    /// The ring and the slot.
    pub(crate) fn get(&self) -> Option<(Arc<StorageRing>, u32)> {
        self.slot.get()?.clone()
    }

    /// Whether the caller has to have a worker call [`RingSlot::register`]: true once.
    pub(crate) fn needs_registration(&self) -> bool {
        !self.asked.swap(true, Relaxed)
    }

    /// Puts a descriptor into the ring, on a shadow worker.
    pub(crate) fn register(&self, ring: Arc<StorageRing>, fd: Fd) {
        let slot = ring.add_file(fd);
        let _ = self.slot.set(slot.map(|slot| (ring, slot)));
    }

    /// The slot in the ring of a thread; the outer `None`: no thread has put it there yet.
    pub(crate) fn in_thread_ring(&self, ring: &ThreadRing) -> Option<Option<u32>> {
        lock(&self.of_threads).iter().find(|of| of.ring.number() == ring.number()).map(|of| of.slot)
    }

    /// Puts a descriptor into the ring of a thread, on a shadow worker while that thread waits.
    pub(crate) fn register_with_thread(&self, ring: Arc<ThreadRing>, fd: Fd) -> Option<u32> {
        let slot = ring.add_file(fd);
        lock(&self.of_threads).push(ThreadSlot { ring, slot });
        slot
    }

    /// Takes it out again, on a shadow worker, when no request has the file any more.
    pub(crate) fn release(&self) {
        if let Some((ring, slot)) = self.get() {
            ring.remove_file(slot);
        }
        for ThreadSlot { ring, slot } in lock(&self.of_threads).drain(..) {
            slot.into_iter().for_each(|slot| ring.remove_file(slot));
        }
    }
}

/// Whether the kernel issues direct reads of this file system itself. Of others (btrfs, overlayfs, FUSE, network file
/// systems) it leaves them to threads of its own, which a server that does not answer would occupy.
pub(crate) fn is_issued_at_once(file_system: u64) -> bool {
    const BLOCK_DEVICE: u64 = 0;
    matches!(file_system, EXT4 | XFS | BLOCK_DEVICE)
}
