//! The parts of a runtime that a batch uses.

use std::sync::Arc;

use spinio_io::Runtime;
use spinio_io::ctx::Reader;
use spinio_transfer::KernelCache;

/// Handles for one batch.
pub(crate) struct BatchCtx {
    /// Reads, and the subsystems that they use.
    pub(crate) reader: Arc<Reader>,
    /// The directory of compiled GPU kernels; none: they are not stored.
    kernels: Option<String>,
}

impl BatchCtx {
    /// Of this runtime.
    pub(crate) fn of(runtime: &Runtime) -> Arc<BatchCtx> {
        Arc::new(BatchCtx {
            reader: Arc::clone(runtime.reader()),
            kernels: runtime.settings().kernel_cache_dir.clone(),
        })
    }

    /// Compiled GPU kernels, stored between processes.
    pub(crate) fn kernel_cache(&self) -> KernelCache<'_> {
        KernelCache { workers: self.reader.files.workers(), directory: self.kernels.as_deref() }
    }
}
