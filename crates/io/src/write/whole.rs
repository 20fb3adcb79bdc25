//! A write of a file in one call of the kernel.

use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::gather::{Gathered, Into, Order};
use super::{Part, Result, Write, reason};

/// The most vectors that the kernel takes.
pub(super) const MOST_VECTORS: usize = 1024;

/// Who makes the call, and what becomes of the bytes.
#[derive(Clone, Copy)]
pub(super) struct Hand {
    /// A descriptor of the keepers; `None`: the program's own, on its own thread.
    pub(super) twin: Option<Fd>,
    pub(super) route: Route,
    pub(super) reason: Reason,
}

impl Write<'_> {
    /// Gathers everything, then writes it.
    pub(super) fn whole(&self, hand: Option<Hand>) -> Result<usize> {
        let begun = Instant::now();
        let offset = self.at.unwrap_or(0);
        let order = Order::program(self.parts);
        let mut gathered = Gathered::begin(self.ctx, &order, self.parts, Into::Ring, offset)?.fenced()?;
        // Asked while the copies run.
        let hand = hand.unwrap_or_else(|| self.own_hand());
        gathered.wait()?;
        let wrote = self.call(hand, &gathered.vectors, self.at).map_err(|e| self.kernel_error(e, 0))?;
        let why = reason(gathered.is_pinned(), hand.reason);
        self.ctx.files.stats().piece(&self.watch, hand.route, why, 0, wrote as u64, begun);
        Ok(wrote)
    }

    /// The program's own descriptor.
    pub(super) fn own_hand(&self) -> Hand {
        let (route, reason) = match self.ctx.files.sys().flags(self.fd) {
            Ok(flags) if flags & linux::O_DIRECT as i32 != 0 => (Route::Direct, Reason::OwnDirect),
            _ => (self.cache_route(), Reason::IntoCache),
        };
        Hand { twin: None, route, reason }
    }

    /// The route into the page cache.
    pub(super) fn cache_route(&self) -> Route {
        let copies = self.parts.iter().any(|p| match p {
            Part::Device(from, _) => from.allocation.device.abilities().copies,
            Part::Host(..) => false,
        });
        if copies { Route::Copy } else { Route::Store }
    }

    /// One call of the kernel.
    pub(super) fn call(
        &self,
        hand: Hand,
        vectors: &[[usize; 2]],
        at: Option<u64>,
    ) -> core::result::Result<usize, Errno> {
        let vectors = &vectors[..vectors.len().min(MOST_VECTORS)];
        let (kernel, route, flags) = (self.ctx.files.sys(), hand.route, self.flags);
        match hand.twin {
            // Gathering may have waited for the device for long, and another thread have closed the descriptor.
            None if !self.is_same_file() => Err(Errno::BADF),
            // SAFETY: gathered memory and device memory stay for the write; host parts are the program's, for the
            // kernel to judge.
            None => unsafe { kernel.pwritev(route, self.fd, vectors, at, flags) },
            Some(twin) => {
                let vectors = vectors.to_vec();
                // SAFETY: as above, since this thread waits for the answer.
                let write = move || unsafe { kernel.pwritev(route, twin, &vectors, at, flags) };
                self.ctx.files.shadow_workers().and_then(|keepers| keepers.call(write)).unwrap_or(Err(Errno::IO))
            }
        }
    }
}
