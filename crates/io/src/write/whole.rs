//! A write of a file in one call of the kernel.

use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::linux;

use super::gather::{Gathered, Into, Order};
use super::{Part, Result, Write, reason};

/// The most vectors that the kernel takes.
pub(super) const MOST_VECTORS: usize = 1024;

impl Write<'_> {
    /// Gathers everything, then writes it.
    pub(super) fn whole(&self) -> Result<usize> {
        let begun = Instant::now();
        let offset = self.at.unwrap_or(0);
        let order = Order::program(self.parts);
        let mut gathered = Gathered::begin(self.core, &order, self.parts, Into::Ring, offset)?;
        // Asked while the copies run.
        let (route, why) = self.route();
        gathered.wait(offset)?;
        let wrote = self.call(&gathered, route, self.at, 0)?;
        let why = reason(gathered.is_pinned(), why);
        self.core.stats().piece(&self.watch, route, why, 0, wrote as u64, begun);
        Ok(wrote)
    }

    /// What the kernel makes of staged bytes.
    pub(super) fn route(&self) -> (Route, Reason) {
        match self.core.kernel.flags(self.fd) {
            Ok(flags) if flags & linux::O_DIRECT as i32 != 0 => (Route::Direct, Reason::OwnDirect),
            _ => (self.cache_route(), Reason::IntoCache),
        }
    }

    /// The route into the page cache.
    pub(super) fn cache_route(&self) -> Route {
        let copies = self.parts.iter().any(|p| match p {
            Part::Device(from, _) => from.allocation.device.abilities().copies,
            Part::Host(..) => false,
        });
        if copies { Route::Copy } else { Route::Store }
    }

    /// One call of the kernel with what was gathered.
    pub(super) fn call(&self, gathered: &Gathered, route: Route, at: Option<u64>, done: usize) -> Result<usize> {
        let vectors = &gathered.vectors[..gathered.vectors.len().min(MOST_VECTORS)];
        // SAFETY: gathered memory is there until `gathered` goes; host parts are the program's, for the kernel to judge.
        unsafe { self.core.kernel.pwritev(route, self.fd, vectors, at, self.flags) }
            .map_err(|e| self.kernel_error(e, done))
    }
}
