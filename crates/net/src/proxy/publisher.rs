//! The file of `spinio net`, and what stands in it. publish.rs writes it.

use spinio_host::Settings;
use spinio_ring::layout::EVENT_SETS;
use spinio_stats::{PublishedText, default_dirs};
use spinio_sys::linux;

use super::seen_wait::SeenWait;

/// What was published, and when.
#[derive(Debug)]
pub(super) struct Publisher {
    pub(super) file: Option<PublishedText>,
    /// Name of the device.
    pub(super) device: String,
    pub(super) due: u64,
    pub(super) text: String,
    /// Groups that wait for a set, as last seen.
    pub(super) sets: [SeenWait; EVENT_SETS as usize],
}

impl Publisher {
    /// On the proxy's thread, whose descriptor table has the file.
    pub(super) fn new(device: String) -> Publisher {
        let settings = Settings::of_process();
        let dirs = default_dirs(settings.runtime_dir.as_deref(), linux::geteuid());
        let file = if settings.stats.is_none() { PublishedText::create(&dirs, "net") } else { None };
        Publisher { file, device, due: 0, text: String::new(), sets: [SeenWait::default(); EVENT_SETS as usize] }
    }
}
