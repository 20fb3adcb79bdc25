//! The cost of each route here: a default, or measured.
//!
//! ```text
//!   $XDG_STATE_HOME/spinio/models/
//!       <storage>-<file system>-<device>     written by `spinio calibrate`
//!             │ read once per process, by a shadow worker, at the first large request that needs it
//!             ▼
//!   CostEntry: calibration or default ──> Model ──> planner
//! ```
//!
//! **The file** is looked up by the key of the measurement, never by a device number that changes from boot to boot. A
//! file that cannot be read, or is invalid, counts as absent: a program must not fail because of it, and `spinio
//! explain` prints which model it used.
//!
//! Known flaws: a calibration that is made while a process runs is read by the next process. Two file systems without a
//! block device of their own (NFS, overlay) of one kind share a file.

mod key;
mod store;

use std::sync::Arc;
use std::sync::Mutex;

use spinio_device::{Device, DeviceId};
use spinio_plan::{Calibration, Model, Route};

use crate::ctx::FilesCtx;
use crate::state::FileState;
use spinio_host::Settings;
use spinio_host::lock;
use spinio_host::pool::SHADOW_WORKERS;

pub use key::ModelKey;
pub use store::file_path;

/// The costs of one storage, file system and device.
pub struct CostEntry {
    key: ModelKey,
    calibration: Option<Calibration>,
}

/// The costs of all storages and devices in use.
pub struct CostModels {
    entries: Mutex<Vec<(RuntimeKey, Arc<CostEntry>)>>,
    /// The directory of calibrations; none: defaults only.
    directory: Option<String>,
}

/// Storage, file system, device; by numbers of this boot, which are not stable.
type RuntimeKey = (u64, u64, DeviceId);

impl CostModels {
    /// Nothing is known yet.
    pub fn new(settings: &Settings) -> CostModels {
        CostModels { entries: Mutex::default(), directory: settings.cost_model_dir.clone() }
    }

    /// The costs of a file and a device. Called on the program's thread, which may query the device's name.
    pub fn get(&self, ctx: &FilesCtx, file: &FileState, device: &'static dyn Device) -> Arc<CostEntry> {
        let key = (file.storage, file.file_system, device.id());
        if let Some((_, known)) = lock(&self.entries).iter().find(|(k, _)| *k == key) {
            return Arc::clone(known);
        }
        let (sys, dir) = (ctx.sys, self.directory.clone());
        let (storage, file_system, device) = (file.storage, file.file_system, key::device_name(device));
        let load = move || {
            let model_key = ModelKey::new(sys.storage_name(storage), file_system, device);
            let calibration = dir.and_then(|directory| store::load(&directory, &model_key));
            CostEntry { key: model_key, calibration }
        };
        // A shadow worker reads it: no descriptor of SPIN is ever in the program's table.
        let loaded = ctx.workers.shadow().and_then(|workers| workers.run_blocking(load));
        let entry = Arc::new(loaded.unwrap_or_else(|| CostEntry { key: ModelKey::default(), calibration: None }));
        lock(&self.entries).push((key, Arc::clone(&entry)));
        entry
    }
}

impl CostEntry {
    /// What it applies to.
    pub fn key(&self) -> &ModelKey {
        &self.key
    }

    /// The stored calibration in use, if there is one.
    pub fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// What each route costs. `storage`: the route on which this request reaches storage.
    pub fn model(&self, ctx: &FilesCtx, file: &FileState, storage: Route) -> Model {
        let mut model = default_model(ctx, file);
        if let Some(calibration) = &self.calibration {
            model = calibration.model(model, storage, ctx.workers.copy_threads().few());
        }
        model
    }

    /// As text, for users.
    pub fn describe(&self, file: &FileState) -> String {
        match &self.calibration {
            Some(c) => format!("calibrated {}", date(c.measured_at)),
            None if file.fast => "nvme (default, not calibrated)".to_owned(),
            None => "virtual disk (default, not calibrated)".to_owned(),
        }
    }
}

/// The default model where nothing was measured.
fn default_model(ctx: &FilesCtx, file: &FileState) -> Model {
    let mut model = if file.fast { Model::nvme() } else { Model::virtual_disk() };
    // A shadow worker waits for each command, so there are as many in flight as shadow workers.
    let queue = &mut model.storage_queue;
    queue.per_command = queue.per_command.max(queue.latency / SHADOW_WORKERS as f64);
    // One thread copies 6.3 GB/s out of the page cache; the link bounds them all.
    model.cache_queue.per_byte = 1e9 / (6.3e9 * ctx.workers.copy_threads().few() as f64).min(48e9);
    model
}

/// A time in seconds since 1970 as `2026-11-21`, in UTC.
pub fn date(seconds: u64) -> String {
    // Days since the 1st of March of the year 0, so that a leap day is the last of its year; 400 years are 146,097
    // days.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, year) } else { (month - 9, year + 1) };
    format!("{:04}-{month:02}-{of_month:02}", era * 400 + year)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(951_868_800), "2000-03-01");
        assert_eq!(date(1_795_305_599), "2026-11-21");
        assert_eq!(date(4_102_444_800), "2100-01-01");
    }
}
