//! The routes a request may use, and why others are excluded.
//!
//! The caller sees the file, the device and the buffer; a planner sees only this.

use crate::{Model, Reason, Residency, Route};

/// The routes that are open for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteConstraints {
    /// File offset of the request's first byte: alignment is counted in the file.
    pub file_offset: u64,
    /// `copy` or `store`: always available.
    pub cache: Route,
    /// `dma`, and the least number of bytes in the page cache for which it is used.
    pub cache_large: Option<(Route, u64)>,
    /// `p2p` or `direct`; none if the file has no direct I/O.
    pub storage: Option<Route>,
    /// `p2p` moves only whole blocks of this size, which must not be 0: the remainder at either end takes
    /// the cache route. `direct` reads the whole blocks around the range and needs no cut.
    pub storage_align: u64,
    /// Why a faster storage route than `storage` was refused.
    pub refused: Option<Reason>,
    /// Why `dma` was refused.
    pub cache_refused: Option<Reason>,
}

impl RouteConstraints {
    /// Everything through the page cache.
    pub const fn cache_only(file_offset: u64, cache: Route) -> RouteConstraints {
        RouteConstraints {
            file_offset,
            cache,
            cache_large: None,
            storage: None,
            storage_align: 1,
            refused: None,
            cache_refused: None,
        }
    }

    /// The cache route for contiguous resident bytes.
    #[inline]
    pub(crate) fn resident_route(&self, bytes: u64) -> Route {
        match self.cache_large {
            Some((route, least)) if bytes >= least => route,
            _ => self.cache,
        }
    }

    /// The cache route for a run.
    #[inline]
    pub(crate) fn cache_route(&self, residency: Residency, bytes: u64) -> Route {
        // Registering pages that may be absent would wait for storage page by page.
        if residency.is_cached() { self.resident_route(bytes) } else { self.cache }
    }

    /// The cost of a run from the cache, one transfer after another.
    #[inline]
    pub(crate) fn serial_cache_time(&self, model: &Model, residency: Residency, bytes: u64) -> f64 {
        model.cost(self.cache_route(residency, bytes)).time(bytes)
    }

    /// The run's contribution to the cache's share, in flight with others.
    #[inline]
    pub(crate) fn queued_cache_time(&self, model: &Model, residency: Residency, bytes: u64) -> f64 {
        queued_segment_time(model, self.cache_route(residency, bytes), bytes)
    }
}

/// A segment's share of its side's time. Registrations do not overlap, so there each pays the latency.
#[inline]
pub(crate) fn queued_segment_time(model: &Model, route: Route, bytes: u64) -> f64 {
    let queue = model.queue(route);
    let latency = if route == Route::Dma { queue.latency } else { 0.0 };
    latency + queue.command_time(bytes)
}
