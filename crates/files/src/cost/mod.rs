//! What each route costs here: a default, or what was measured, and how far today is from it.
//!
//! ```text
//!   $XDG_STATE_HOME/spinio/models/
//!       <storage>-<file system>-<device>     written by `spinio calibrate`
//!             │ read once a process, by a keeper, at the first large request that needs it
//!             ▼
//!   Known: calibration or default ──────────────> x factor a route ──> Model ──> planner
//!                                                      ▲
//!                     measured / predicted of a request┘ correction.rs in plan
//! ```
//!
//! **Which requests teach.** One whose time can be told to belong to one route: 1 MiB or more, planned at once, alone
//! in this process, not kept waiting by earlier work of the program, and with nothing rerouted; served by one
//! route, or by two sides of which one was expected to take twice as long as the other. A few atomics a request.
//!
//! **The file** is looked up by what it was measured on, never by a device number that changes from boot to boot.
//! One that cannot be read, or says nonsense, counts as none: a program must not fail because of it, and
//! `spinio explain` tells which model it used.
//!
//! Known flaws: a program that always reads from several threads at once teaches nothing. What is calibrated while a process runs is read by the next process. Two file systems without a
//! block device of their own (NFS, overlay) of one kind share a file.

mod key;
mod store;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use spinio_device::{Device, DeviceId};
use spinio_plan::{Calibration, Correction, Extent, Model, Objective, Route, Segment, predict};

use crate::ctx::FilesCtx;
use crate::state::FileState;
use spinio_host::Settings;
use spinio_host::lock;
use spinio_host::pool::SHADOW_WORKERS;

pub use key::ModelKey;
pub use spinio_host::settings::model_folder as folder;
pub use store::file_path;

/// Requests below this are all overhead, and teach nothing about a route.
pub const MIN_SAMPLE_BYTES: u64 = 1 << 20;

/// Schedules of several segments are predicted for one request in so many.
const SAMPLE_EVERY: u64 = 8;

/// The costs of one storage, file system and device.
pub struct CostEntry {
    key: ModelKey,
    calibration: Option<Calibration>,
    corrections: [AtomicU64; Route::ALL.len()],
    adaptive: bool,
    /// Requests of several segments that could be predicted.
    requests: AtomicU64,
}

/// The costs of all storages and devices in use.
pub struct CostModels {
    entries: Mutex<Vec<(RuntimeKey, Arc<CostEntry>)>>,
    /// Where calibrations are; none: defaults only.
    folder: Option<String>,
    /// Whether costs follow what is measured.
    correction: bool,
}

/// Storage, file system, device; by numbers of this boot, which are not stable.
type RuntimeKey = (u64, u64, DeviceId);

/// What a request is expected to take, and by which route.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutePrediction {
    route: Route,
    nanos: f64,
    begun: Instant,
}

impl CostModels {
    /// Nothing is known yet.
    pub fn new(settings: &Settings) -> CostModels {
        CostModels {
            entries: Mutex::default(),
            folder: settings.cost_model_dir.clone(),
            correction: settings.adaptive_costs,
        }
    }

    /// The costs of a file and a device. Called on the program's thread, which may query the device's name.
    pub fn get(&self, ctx: &FilesCtx, file: &FileState, device: &'static dyn Device) -> Arc<CostEntry> {
        let key = (file.storage, file.file_system, device.id());
        if let Some((_, known)) = lock(&self.entries).iter().find(|(k, _)| *k == key) {
            return Arc::clone(known);
        }
        let (sys, dir) = (ctx.sys, self.folder.clone());
        let (storage, file_system, device) = (file.storage, file.file_system, key::device_name(device));
        let load = move || {
            let model_key = ModelKey::new(sys.storage_name(storage), file_system, device);
            let calibration = dir.and_then(|folder| store::load(&folder, &model_key));
            CostEntry {
                key: model_key,
                calibration,
                corrections: Default::default(),
                adaptive: false,
                requests: AtomicU64::new(0),
            }
        };
        // A shadow worker reads it: no descriptor of ours is ever in the program's table.
        let loaded = ctx.workers.shadow().and_then(|workers| workers.run_blocking(load));
        let mut entry = loaded.unwrap_or_else(|| CostEntry {
            key: ModelKey::default(),
            calibration: None,
            corrections: Default::default(),
            adaptive: false,
            requests: AtomicU64::new(0),
        });
        entry.adaptive = self.correction;
        let entry = Arc::new(entry);
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

    /// The model without what was learnt since. `storage`: the route on which this request reaches storage.
    pub fn baseline(&self, ctx: &FilesCtx, file: &FileState, storage: Route) -> Model {
        let mut model = default_model(ctx, file);
        if let Some(calibration) = &self.calibration {
            model = calibration.model(model, storage, ctx.workers.copy_threads());
        }
        model
    }

    /// What each route costs now.
    pub fn model(&self, ctx: &FilesCtx, file: &FileState, storage: Route) -> Model {
        let mut model = self.baseline(ctx, file, storage);
        for route in [Route::Copy, Route::Dma, Route::Store, storage] {
            let factor = self.factor(route);
            if factor != 1.0 {
                model.scale(route, factor);
            }
        }
        model
    }

    /// How much slower than the model a route was found to be.
    pub fn factor(&self, route: Route) -> f64 {
        if self.adaptive { Correction::from_bits(self.corrections[route as usize].load(Relaxed)).factor() } else { 1.0 }
    }

    /// In words, for people.
    pub fn describe(&self, file: &FileState) -> String {
        let mut text = match &self.calibration {
            Some(c) => format!("calibrated {}", date(c.measured_at)),
            None if file.fast => "nvme (default, not calibrated)".to_owned(),
            None => "virtual disk (default, not calibrated)".to_owned(),
        };
        for route in Route::ALL {
            let factor = self.factor(route);
            if factor != 1.0 {
                text += &format!(", {route} x {factor:.1} as measured since");
            }
        }
        text
    }

    /// What a plan for a whole request is expected to take, if one route is to blame for it.
    pub fn predict_request(
        &self,
        ctx: &FilesCtx,
        file: &FileState,
        extents: &[Extent],
        plan: &[Segment],
    ) -> Option<RoutePrediction> {
        let longest = plan.iter().max_by_key(|s| s.len)?;
        if !self.adaptive || (plan.len() > 1 && !self.requests.fetch_add(1, Relaxed).is_multiple_of(SAMPLE_EVERY)) {
            return None;
        }
        let storage = plan.iter().find(|s| !s.route.from_cache()).map_or(Route::Direct, |s| s.route);
        // Against the model without its factors, which are what is to be learnt.
        let model = self.baseline(ctx, file, storage);
        let prediction = predict(Objective::Concurrent, extents, &plan.to_vec().into(), &model);
        let (slower, faster) = if prediction.cache > prediction.storage {
            (prediction.cache, prediction.storage)
        } else {
            (prediction.storage, prediction.cache)
        };
        let on_slower_side = |s: &&Segment| s.route.from_cache() == (prediction.cache > prediction.storage);
        let single_route = plan.iter().filter(on_slower_side).all(|s| s.route == longest.route);
        (single_route && slower >= 2.0 * faster && on_slower_side(&longest)).then(|| RoutePrediction {
            route: longest.route,
            nanos: prediction.total,
            begun: Instant::now(),
        })
    }

    /// A request that was expected to take so long has ended.
    pub fn observe(&self, prediction: RoutePrediction) {
        let measured = prediction.begun.elapsed().as_nanos() as f64;
        for route in Route::ALL {
            let kept = &self.corrections[route as usize];
            let bits = kept.load(Relaxed);
            let now = Correction::from_bits(bits);
            let next = if route == prediction.route { now.sample(prediction.nanos, measured) } else { now.decay() };
            // A sample lost to another thread is no loss.
            if next.to_bits() != bits {
                kept.store(next.to_bits(), Relaxed);
            }
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
    model.cache_queue.per_byte = 1e9 / (6.3e9 * ctx.workers.copy_threads() as f64).min(48e9);
    model
}

/// A time in seconds since 1970 as `2026-11-21`, in UTC.
pub fn date(seconds: u64) -> String {
    // Days since the 1st of March of the year 0, so that a leap day is the last of its year; 400 years are 146,097 days.
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
