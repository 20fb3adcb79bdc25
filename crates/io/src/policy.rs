//! What a request may do, by the settings and by what else is under way.

use std::sync::Arc;

use spinio_device::AppStream;
use spinio_host::Settings;
use spinio_host::settings::Ordering;
use spinio_plan::{Reason, Route};
use spinio_transfer::DeferredUnpin;

/// Threads a request from which copying beats registering.
pub(crate) const COPY_FASTER_THREADS: usize = 8;

/// The settings of requests, and whether pages may be registered for one now.
pub struct RoutePolicy {
    routes: Vec<Route>,
    ordering: Ordering,
    /// Cached bytes from which the pages are registered instead of copied.
    pub dma_min: u64,
    unpin: Arc<DeferredUnpin>,
}

impl RoutePolicy {
    /// As the settings say.
    pub fn new(settings: &Settings, unpin: Arc<DeferredUnpin>) -> RoutePolicy {
        let (routes, ordering, dma_min) = (settings.routes.clone(), settings.ordering, settings.dma_min);
        RoutePolicy { routes, ordering, dma_min, unpin }
    }

    /// Whether a route may be used.
    pub fn allows(&self, route: Route) -> bool {
        self.routes.contains(&route)
    }

    /// Whether a small copy on this stream has to be done when its request returns.
    #[inline]
    pub fn must_wait(&self, app: AppStream) -> bool {
        app.is_capturing() || self.ordering == Ordering::Strict
    }

    /// Whether registering pages would pay now, for a request that so many threads copy for.
    pub fn may_register(&self, copy_threads: usize) -> Result<(), Reason> {
        if !self.allows(Route::Dma) {
            return Err(Reason::BySetting);
        }
        // The driver registers for one thread at a time, and copies of others wait meanwhile.
        if self.unpin.in_flight() > 1 {
            return Err(Reason::Concurrent);
        }
        // Registering moves about 36 GB/s in the long run, a copying thread 6: from here on copying is faster.
        if copy_threads >= COPY_FASTER_THREADS {
            return Err(Reason::ManyThreads);
        }
        if self.unpin.unpin_stalls() { Err(Reason::PinStalls) } else { Ok(()) }
    }
}
