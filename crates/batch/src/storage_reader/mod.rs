//! Fragments that are not in the page cache: many reads of storage in flight.
//!
//! ```text
//!   fragments ──coalesce──> reads of whole units, each serving one or several fragments
//!                       │ packed into groups: the contents of one bounce buffer
//!   caller ── buffer ──>│
//!                    shadow worker: a ring with up to 128 reads in flight, O_DIRECT through the shadow descriptor
//!   caller <── filled ──┘
//!      └─ launch: each fragment to its destination
//! ```
//!
//! - `groups.rs`: which reads are made, and together.
//! - `caller.rs`: supplies buffers, launches filled ones.
//! - `worker.rs`: reads.
//! - `queue.rs`: groups on their way between the two.
//!
//! If storage may DMA into the device, an aligned read is made there directly (`p2p`), and needs no buffer.
//!
//! The first buffer is read into as soon as it is available, while the pool grows for the next. From then on no more
//! buffers are in use than keep the ring full, and the most recently used ones are taken first: storage writes faster
//! into memory that is in the processor's cache. Seen (virtio disk, 32 MiB of cache, 10000 reads of 64 KiB at this
//! depth): 122 to 126 ms through 8 to 14 MiB of memory in turn, 132 through 20, 154 through 32 and more.
//!
//! If the Linux kernel offers no ring, several shadow workers read one after another. A read that is short or fails is
//! repeated through the page cache, and then has the result of a plain `pread`.
//!
//! Known flaws:
//! - In a batch that is cached in part, storage reads begin when the caller has registered what is worth it: 20 ms per
//!   GiB.
//! - One ring is one thread, which submits about a million reads a second at most.
//! - If a seccomp filter is installed while reads are in flight and forbids waiting for them
//!   (`sys/src/linux/uring/ring.rs`), their buffers are lost, 32 MiB at most and once in a process's life. P2P reads in
//!   flight may still write when the batch returns: the same bytes again, unless the program uses that memory for
//!   something else at once.

mod caller;
mod groups;
mod queue;
mod worker;

use std::sync::Arc;

use spinio_host::shares::{MIXED, NO_SERVER, ShareKey};
use spinio_host::task_scope::TaskScope;

use self::groups::{GroupPacker, ReadGroups};
use self::queue::GroupQueue;
use crate::state::{BatchState, Fragment};

/// Reads in flight.
const DEPTH: u32 = 128;

/// Fragments to be read from storage.
pub(crate) struct StorageReader {
    work: Arc<BatchState>,
    groups: ReadGroups,
    queue: GroupQueue,
    scope: TaskScope,
    /// The share of the shadow workers that it takes.
    share: ShareKey,
}

impl StorageReader {
    /// Coalesces and packs. Fragments of one file and device are consecutive.
    pub(crate) fn new(work: &Arc<BatchState>, items: Vec<Fragment>) -> Arc<StorageReader> {
        let mut packer = GroupPacker::new(work, items.len());
        let mut share = NO_SERVER;
        for some in items.chunk_by(|a, b| (a.source, a.sink) == (b.source, b.sink)) {
            let key = work.sources[some[0].source as usize].file.storage;
            // Each combination of file systems has its share.
            share = if share == NO_SERVER || share == key { key } else { share | key | MIXED };
            packer.add(some);
        }
        let groups = packer.finish(items);
        let (queue, scope) = (GroupQueue::default(), TaskScope::new());
        Arc::new(StorageReader { work: Arc::clone(work), groups, queue, scope, share })
    }
}
