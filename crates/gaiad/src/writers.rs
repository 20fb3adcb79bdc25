//! Which files a program may have open for writing.
//!
//! When the last writer closes a file the kernel has written back its pages. Writers are counted in ordinary memory: a
//! server that replaces another one knows nothing of those that it did not see, so it takes every file for written.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::files::File;

/// Descriptors that are open for writing, by node.
#[derive(Debug)]
pub(crate) struct Writers {
    counts: Mutex<HashMap<u64, u32>>,
    /// No server was there before, so none is missing.
    complete: bool,
}

impl Writers {
    pub(crate) fn new(complete: bool) -> Writers {
        Writers { counts: Mutex::default(), complete }
    }

    /// A file was opened for writing.
    pub(crate) fn add(&self, node: u64) {
        *self.lock().entry(node).or_default() += 1;
    }

    /// It was closed, and the kernel has written back its pages. Whether other descriptors of it were counted.
    pub(crate) fn remove(&self, node: u64) -> bool {
        let mut counts = self.lock();
        if let Some(count) = counts.get_mut(&node) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&node);
            }
        }
        counts.contains_key(&node)
    }

    /// Whether the kernel may have dirty pages of the node.
    pub(crate) fn may_write(&self, node: u64) -> bool {
        self.any(&self.lock(), node)
    }

    /// Tells the clients of a file. To be called after each change, and after the file got a table: the last call
    /// tells what is.
    pub(crate) fn tell(&self, file: &File) {
        let counts = self.lock();
        file.tell_writers(self.any(&counts, file.node));
    }

    fn any(&self, counts: &HashMap<u64, u32>, node: u64) -> bool {
        !self.complete || counts.contains_key(&node)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, u32>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
