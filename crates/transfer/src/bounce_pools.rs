//! The bounce buffer pools of a runtime: two per device.
//!
//! One serves requests whose caller waits for them, so its buffers are released without the program. The other serves
//! requests that wait for a stream of the program: a stream may wait for the program, and the program for a read, so
//! buffers that are in use for long must not be taken from the pool of the other requests.
//!
//! ```text
//!   first ──> pool of a device ──> pool of another ──> none yet: the next device that asks gets one here
//! ```
//!
//! Pools are added and never removed, so they are found without a lock and without counting references: a read of 4 KiB
//! would feel both.

use std::iter;
use std::sync::{Arc, OnceLock};

use spinio_device::Device;

use crate::bounce::BouncePool;

/// The pools of all devices.
pub struct BouncePools {
    limit: u64,
    sync: PoolList,
    stream: PoolList,
}

/// The pools of one kind, in the order in which their devices came.
#[derive(Default)]
struct PoolList(OnceLock<Box<Node>>);

struct Node {
    pool: Arc<BouncePool>,
    rest: PoolList,
}

impl PoolList {
    fn of(&self, device: &'static dyn Device, limit: u64) -> &Arc<BouncePool> {
        let mut list = self;
        loop {
            let node = list.0.get_or_init(|| {
                Box::new(Node { pool: Arc::new(BouncePool::new(device, limit)), rest: PoolList::default() })
            });
            // By object, not by number: after a device reset a new object stands for the same device.
            if core::ptr::addr_eq(node.pool.device(), device) {
                return &node.pool;
            }
            list = &node.rest;
        }
    }

    fn pools(&self) -> impl Iterator<Item = &Arc<BouncePool>> {
        iter::successors(self.0.get(), |node| node.rest.0.get()).map(|node| &node.pool)
    }
}

impl BouncePools {
    /// No pool yet; each may grow to `limit` bytes.
    pub fn new(limit: u64) -> BouncePools {
        BouncePools { limit, sync: PoolList::default(), stream: PoolList::default() }
    }

    /// The pool for requests whose caller waits.
    pub fn sync(&self, device: &'static dyn Device) -> &Arc<BouncePool> {
        self.sync.of(device, self.limit)
    }

    /// The pool for requests that wait for a stream of the program.
    pub fn stream(&self, device: &'static dyn Device) -> &Arc<BouncePool> {
        self.stream.of(device, self.limit)
    }

    /// The limit of one pool in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes of both pools of a device.
    pub fn bytes_of(&self, device: &'static dyn Device) -> u64 {
        self.sync(device).total_bytes() + self.stream(device).total_bytes()
    }

    /// Bytes of all pools.
    pub fn bytes(&self) -> u64 {
        self.sync.pools().chain(self.stream.pools()).map(|pool| pool.total_bytes()).sum()
    }
}
