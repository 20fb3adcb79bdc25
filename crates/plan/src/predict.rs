//! The predicted time of a schedule, for `spinio explain` and for the tests.

use crate::constraints::queued_segment_time;
use crate::{Extent, Model, Objective, Residency, Route, Schedule, Segment};

/// Expected times in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Of each segment by itself; where sides overlap, without the latency that is paid once.
    pub segments: Vec<f64>,
    /// Of all bytes from storage.
    pub storage: f64,
    /// Of all bytes from the page cache.
    pub cache: f64,
    /// Of the request: the sum of both, or the slower of both.
    pub total: f64,
}

/// Predicts the time of a schedule that was made for these extents.
pub fn predict(objective: Objective, extents: &[Extent], schedule: &Schedule, model: &Model) -> Prediction {
    let overlaps = objective == Objective::Concurrent;
    let mut out = Prediction::default();
    let mut bytes = ExtentCursor { extents, at: 0 };
    let (mut any_storage, mut cache_latency) = (false, 0.0_f64);
    for segment in &schedule.segments {
        let (absent, dirty) = bytes.count_within(segment);
        let one = |route, len| {
            if overlaps { queued_segment_time(model, route, len) } else { model.cost(route).time(len) }
        };
        let mut time = one(segment.route, segment.len);
        if segment.route.from_cache() {
            // The Linux kernel reads them into the page cache first, without overlap.
            time += model.storage.time(absent);
            // A registration's own latency is in its share; its DMA starts like any other.
            let starts = if segment.route == Route::Dma { Route::Copy } else { segment.route };
            cache_latency = cache_latency.max(model.queue(starts).latency);
            out.cache += time;
        } else {
            time += dirty as f64 * model.writeback;
            any_storage = true;
            out.storage += time;
        }
        out.segments.push(time);
    }
    if overlaps {
        out.storage += if any_storage { model.storage_queue.latency } else { 0.0 };
        out.cache += cache_latency;
    }
    out.total = if overlaps { out.storage.max(out.cache) } else { out.storage + out.cache };
    out
}

/// Iterates over the extents in step with the segments.
struct ExtentCursor<'a> {
    extents: &'a [Extent],
    /// The offset of the first of them.
    at: u64,
}

impl ExtentCursor<'_> {
    /// Absent and dirty bytes of a segment; segments come in order.
    fn count_within(&mut self, segment: &Segment) -> (u64, u64) {
        let end = segment.offset + segment.len;
        let (mut absent, mut dirty) = (0, 0);
        while let Some(extent) = self.extents.first() {
            let extent_end = self.at + extent.len;
            let common = extent_end.min(end).saturating_sub(self.at.max(segment.offset));
            match extent.residency {
                Residency::Absent => absent += common,
                Residency::Dirty => dirty += common,
                Residency::Clean | Residency::Unknown => {}
            }
            if extent_end > end {
                break;
            }
            self.at = extent_end;
            self.extents = &self.extents[1..];
        }
        (absent, dirty)
    }
}
