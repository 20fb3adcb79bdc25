//! A write of a file in a single system call.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::time::Instant;

use spinio_device::StreamOrder;
use spinio_files::share_key;
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::gather::{BufferSource, StagedWrite, devices};
use super::{Part, Result, WriteRequest, pinned_reason};

/// The most vectors that the kernel takes.
pub(super) const IOV_MAX: usize = 1024;

/// The descriptor, and so the thread, that writes; and the route and reason to record.
#[derive(Clone, Copy)]
pub(super) struct WriteVia {
    /// A shadow descriptor, for a shadow worker; `None`: the program's own, on its own thread.
    pub(super) shadow_fd: Option<Fd>,
    pub(super) route: Route,
    pub(super) reason: Reason,
}

impl WriteRequest<'_> {
    /// Gathers everything, then writes it.
    pub(super) fn write_once(&self, via: Option<WriteVia>) -> Result<usize> {
        let started = Instant::now();
        let offset = self.at.unwrap_or(0);
        let streams: Vec<_> = devices(self.parts).into_iter().map(StreamOrder::app).collect();
        let mut staged =
            StagedWrite::start(self.ctx, &streams, self.parts, BufferSource::Pool, offset)?.with_fences()?;
        // Queries the status flags while the copies run.
        let via = via.unwrap_or_else(|| self.via_app_fd());
        staged.wait()?;
        let wrote = self.write_vectors(via, &staged.vectors, self.at).map_err(|e| self.kernel_error(e, 0))?;
        let reason = pinned_reason(staged.is_pinned(), via.reason);
        self.ctx.files.stats().record_piece(&self.span, via.route, reason, 0, wrote as u64, started);
        Ok(wrote)
    }

    /// The program's own descriptor.
    pub(super) fn via_app_fd(&self) -> WriteVia {
        let (route, reason) = match self.ctx.files.sys().status_flags(self.fd) {
            Ok(flags) if flags & linux::O_DIRECT as i32 != 0 => (Route::Direct, Reason::AppODirect),
            _ => (self.cache_route(), Reason::IntoCache),
        };
        WriteVia { shadow_fd: None, route, reason }
    }

    /// The route into the page cache.
    pub(super) fn cache_route(&self) -> Route {
        let copies = self.parts.iter().any(|p| match p {
            Part::Device(from, _) => from.allocation.device.capabilities().has_dma_engine,
            Part::Host(..) => false,
        });
        if copies { Route::Copy } else { Route::Store }
    }

    /// A single system call.
    pub(super) fn write_vectors(
        &self,
        via: WriteVia,
        vectors: &[[usize; 2]],
        at: Option<u64>,
    ) -> core::result::Result<usize, Errno> {
        let vectors = &vectors[..vectors.len().min(IOV_MAX)];
        let (kernel, route, flags) = (self.ctx.files.sys(), via.route, self.flags);
        match via.shadow_fd {
            // Gathering may have waited long for the device; another thread may have closed the descriptor meanwhile.
            None if !self.verify_fd() => Err(Errno::BADF),
            // SAFETY: gathered memory and device memory stay for the write; host parts belong to the program, and the
            // kernel validates them.
            None => unsafe { kernel.pwritev(route, self.fd, vectors, at, flags) },
            Some(shadow_fd) => {
                let vectors = vectors.to_vec();
                // SAFETY: as above, since this thread waits for the result.
                let write = move || unsafe { kernel.pwritev(route, shadow_fd, &vectors, at, flags) };
                self.ctx
                    .files
                    .shadow_workers()
                    .and_then(|shadow| shadow.for_key(share_key(&self.stat)).run_blocking(write))
                    .unwrap_or(Err(Errno::IO))
            }
        }
    }
}
