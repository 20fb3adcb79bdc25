//! What reads and writes need of a runtime; each its own.

use std::sync::Arc;

use spinio_files::Files;
use spinio_pinned::PinnedFiles;
use spinio_transfer::BouncePools;

use crate::policy::RoutePolicy;
use crate::read::WaitBuffers;

/// What a read needs.
pub struct Reader {
    /// The state beside files.
    pub files: Arc<Files>,
    /// Bounce buffers.
    pub bounce: Arc<BouncePools>,
    /// Pinned files.
    pub pinned: Arc<PinnedFiles>,
    /// What is allowed.
    pub policy: Arc<RoutePolicy>,
    /// Memory of reads that may wait without bound.
    pub(crate) wait_buffers: WaitBuffers,
}

/// What a write needs.
pub struct Writer {
    /// The state beside files.
    pub files: Arc<Files>,
    /// Bounce buffers.
    pub bounce: Arc<BouncePools>,
    /// What is allowed.
    pub policy: Arc<RoutePolicy>,
}
