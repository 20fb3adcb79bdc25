//! The bounce buffer pools of a runtime: two per device.
//!
//! One serves requests whose caller waits for them, so its buffers are released without the program. The other serves
//! requests that wait for a stream of the program: a stream may wait for the program, and the program for a read, so
//! buffers that are in use for long must not be taken from the pool of the other requests.

use std::sync::{Arc, Mutex};

use spinio_device::Device;
use spinio_host::lock;

use crate::bounce::BouncePool;

/// The pools of all devices.
pub struct BouncePools {
    limit: u64,
    sync: Mutex<Vec<Arc<BouncePool>>>,
    stream: Mutex<Vec<Arc<BouncePool>>>,
}

impl BouncePools {
    /// No pool yet; each may grow to `limit` bytes.
    pub fn new(limit: u64) -> BouncePools {
        BouncePools { limit, sync: Mutex::default(), stream: Mutex::default() }
    }

    /// The pool for requests whose caller waits.
    pub fn sync(&self, device: &'static dyn Device) -> Arc<BouncePool> {
        self.of(&self.sync, device)
    }

    /// The pool for requests that wait for a stream of the program.
    pub fn stream(&self, device: &'static dyn Device) -> Arc<BouncePool> {
        self.of(&self.stream, device)
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
        [&self.sync, &self.stream]
            .iter()
            .map(|pools| lock(pools).iter().map(|pool| pool.total_bytes()).sum::<u64>())
            .sum()
    }

    fn of(&self, pools: &Mutex<Vec<Arc<BouncePool>>>, device: &'static dyn Device) -> Arc<BouncePool> {
        let mut pools = lock(pools);
        // By object, not by number: after a device reset a new object stands for the same device.
        if let Some(found) = pools.iter().find(|pool| core::ptr::addr_eq(pool.device(), device)) {
            return Arc::clone(found);
        }
        let pool = Arc::new(BouncePool::new(device, self.limit));
        pools.push(Arc::clone(&pool));
        pool
    }
}
