//! The link: the thread that owns the socket, the mounted file and the file below it.
//!
//! Device calls never run there: a driver's descriptors are in the program's table.

use std::os::fd::AsFd;
use std::sync::Arc;

use spinio_device::PAGE_BYTES;
use spinio_pagecache::messages::{
    self, Access, Fill, HandOver, MapKind, ReleaseId, ReleasePart, Reply, Request, Run, Stats,
};
use spinio_sys::linux::{self, Advice, Fd};
use spinio_sys::{Errno, injection_point};

use crate::connection::{Connection, unexpected};
use crate::mounted_file::MountedFile;
use crate::owned_fd::OwnedFd;
use crate::table_thread::TableThread;
use crate::window::Window;
use crate::{Error, Result};

/// What a map is of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) access: Access,
    /// The first page in the file.
    pub(crate) first: u64,
    pub(crate) pages: usize,
    /// How kernels load its pages.
    pub(crate) kind: MapKind,
}

impl Spec {
    /// Read from the mapping of the file, without a replica.
    pub(crate) fn is_in_place(&self) -> bool {
        self.kind != MapKind::Replica
    }
}

/// The thread.
pub(crate) type Link = TableThread<LinkState>;

/// What the thread owns.
pub(crate) struct LinkState {
    pub(crate) file: Box<dyn MountedFile>,
    pub(crate) spec: Spec,
    pub(crate) attached: Option<Attached>,
    /// How the file below the mount will be read, if the program has said so.
    pub(crate) order: Option<Advice>,
}

/// A connection that has said hello.
pub(crate) struct Attached {
    pub(crate) connection: Connection,
    pub(crate) backing: OwnedFd,
    pub(crate) window: Arc<Window>,
}

/// What the server has committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Committed {
    pub(crate) pages: u64,
    pub(crate) merged: u64,
    pub(crate) bytes: u64,
}

impl Link {
    /// Starts the thread; `open` runs there. An error of a call other than a refusal ends the connection, because
    /// this side does not know what the server thinks of the pages.
    pub(crate) fn start(
        spec: Spec,
        open: impl FnOnce() -> Result<Box<dyn MountedFile>> + Send + 'static,
    ) -> Result<Link> {
        TableThread::spawn(move || Ok(LinkState { file: open()?, spec, attached: None, order: None }))
    }
}

impl LinkState {
    fn attached(&mut self) -> Result<&mut Attached> {
        self.attached.as_mut().ok_or_else(Error::disconnected)
    }

    fn byte_range(&self, first: usize, pages: usize) -> (u64, u64) {
        let page = PAGE_BYTES as u64;
        ((self.spec.first + first as u64) * page, pages as u64 * page)
    }

    /// Hands what CPU programs have written to the range to the server.
    pub(crate) fn flush(&mut self, first: usize, pages: usize) -> Result<()> {
        let (offset, len) = self.byte_range(first, pages);
        self.file.flush(offset, len)?;
        injection_point!("client: CPU pages flushed");
        Ok(())
    }

    /// Has the Linux kernel write back pages of a release that CPU programs have changed too. The server has it drop them before
    /// the commit, and for that alone it would send one WRITE after the other, a page each; now there are many at a time,
    /// of up to 1 MiB, while the rest of the release goes on.
    fn start_flush(&mut self, runs: &[Run]) {
        for run in runs {
            let (offset, len) = self.byte_range(run.first as usize, run.count as usize);
            self.file.start_flush(offset, len);
        }
    }

    /// Has the server forget pages whose memory was taken away, whatever it takes them for.
    pub(crate) fn drop_evicted(&mut self, runs: &[Run]) -> Result<()> {
        runs.iter().try_for_each(|run| self.drop_pages(*run, false).and_then(|()| self.drop_pages(*run, true)))
    }

    /// The size as CPU programs see it. If it is larger than that of the file below the mount now, the last page is
    /// dirty: flushes the whole file, so that the server does not drop pages that are inside the file.
    pub(crate) fn sync_size(&mut self) -> Result<u64> {
        let below = rustix::fs::fstat(&self.attached()?.backing);
        let below = below.map_err(|e| Error::of(e, "query the size of the file below the mount"))?.st_size;
        self.sync_size_with(below as u64)
    }

    /// The same before a release. If it fails, nothing was asked of the server: the epoch goes on.
    pub(crate) fn sync_size_first(&mut self) -> Result<()> {
        self.attached()?;
        self.sync_size().map(drop).map_err(Error::into_refusal)
    }

    /// The same; `below` is the size of the file below the mount.
    pub(crate) fn sync_size_with(&mut self, below: u64) -> Result<u64> {
        let seen = self.file.size()?;
        if seen > below {
            self.file.flush(0, 0)?;
        }
        Ok(seen)
    }

    /// Pages to bring to the device: from the file, or from the window, where their bytes are; and the size of the file
    /// below the mount.
    pub(crate) fn fill(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<(Vec<Fill>, u64)> {
        let pages = self.spec.pages as u64;
        let attached = self.attached()?;
        let (fills, size) = match attached.connection.call(encode)? {
            Reply::Fills { fills, size } => (fills.iter().collect::<Vec<_>>(), size),
            other => return Err(unexpected(&other)),
        };
        if fills.iter().any(|fill| fill.run.first + u64::from(fill.run.count) > pages) {
            return Err(Error::new(Errno::PROTO, "The GAIA server sent pages outside the map"));
        }
        Ok((fills, size))
    }

    /// Reads pages of the file below the mount into the stage, one after the other.
    pub(crate) fn read_into_stage(&mut self, runs: &[Run]) -> Result<()> {
        let first = self.spec.first;
        let attached = self.attached()?;
        let mut at = 0;
        for run in runs {
            read_pages(&attached.backing, first, *run, &attached.window, at)?;
            at += run.count as usize * PAGE_BYTES;
        }
        Ok(())
    }

    /// Sends a part of a release, whose pages are in the stage, after the answer for the part before.
    pub(crate) fn release_part(&mut self, part: ReleasePart, runs: &[Run]) -> Result<()> {
        self.start_flush(runs);
        self.attached()?.connection.send_part(|out| messages::release(out, part, runs))
    }

    /// Forgets the release whose parts were sent.
    pub(crate) fn end_parts(&mut self) -> Result<()> {
        self.attached()?.connection.end_parts()
    }

    /// Sends the last part of a release, and waits until its pages are visible to CPU programs.
    pub(crate) fn release(&mut self, part: ReleasePart, runs: &[Run]) -> Result<Committed> {
        self.start_flush(runs);
        let connection = &mut self.attached()?.connection;
        let committed = match connection.call(|out| messages::release(out, part, runs))? {
            Reply::Committed { pages, merged, bytes } => Committed { pages, merged, bytes },
            other => return Err(unexpected(&other)),
        };
        if committed.pages > 0 {
            injection_point!("client: release committed");
            self.touch();
        }
        Ok(committed)
    }

    /// Hands chunks over that have the pages of a release: their descriptors are in the table of thread `tid`.
    pub(crate) fn hand_over(&mut self, part: HandOver, runs: &[Run], tid: u32, fds: &[Fd]) -> Result<Committed> {
        let failed = |e| Error::of(e, "duplicate the descriptor of a chunk").into_refusal();
        let own = fds.iter().map(|fd| linux::dup_from_thread(tid, *fd).map(OwnedFd::new).map_err(failed));
        let own: Vec<OwnedFd> = own.collect::<Result<_>>()?;
        let borrowed: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        // It may flush what CPU programs have written.
        self.sync_size_first()?;
        self.start_flush(runs);
        let connection = &mut self.attached()?.connection;
        match connection.call_with(|out| messages::hand_over(out, part, runs), &borrowed)? {
            Reply::Committed { pages, merged, bytes } => {
                self.touch();
                Ok(Committed { pages, merged, bytes })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Sets the time. A release is committed whether or not that is possible.
    pub(crate) fn touch(&mut self) {
        let _ = self.file.touch();
    }

    /// Has the server forget pages of the replica: those in epochs for writing, or the others.
    pub(crate) fn drop_pages(&mut self, run: Run, open: bool) -> Result<()> {
        let request = Request::Drop { first: run.first, pages: run.count, open };
        match self.attached()?.connection.call(|out| request.encode(out))? {
            Reply::Dropped => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Lends a chunk, whose descriptor is in the table of thread `tid`.
    pub(crate) fn lend(&mut self, request: Request<'_>, tid: u32, fd: Fd) -> Result<()> {
        let failed = |e| Error::of(e, "duplicate the descriptor of a chunk").into_refusal();
        let fd = linux::dup_from_thread(tid, fd).map(OwnedFd::new).map_err(failed)?;
        match self.attached()?.connection.call_with(|out| request.encode(out), &[fd.as_fd()])? {
            Reply::Lent => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Passes advice about the file below the mount on to the Linux kernel.
    pub(crate) fn advise(&mut self, first: usize, pages: usize, advice: Advice) -> Result<()> {
        let (offset, len) = self.byte_range(first, pages);
        if matches!(advice, Advice::Sequential | Advice::Random) {
            self.order = Some(advice);
        }
        let failed = |e| Error::of(e, "advise the Linux kernel");
        linux::fadvise(self.attached()?.backing.get(), offset, len, advice).map_err(failed)
    }

    /// Whether the release was committed, by this server or one before it.
    pub(crate) fn was_committed(&mut self, id: ReleaseId) -> Result<bool> {
        match self.attached()?.connection.call(|out| Request::Was { id }.encode(out))? {
            Reply::Was { committed } => Ok(committed),
            other => Err(unexpected(&other)),
        }
    }

    /// Counters of the file.
    pub(crate) fn stats(&mut self) -> Result<Stats> {
        match self.attached()?.connection.call(|out| Request::Stats.encode(out))? {
            Reply::Stats(stats) => Ok(stats),
            other => Err(unexpected(&other)),
        }
    }
}

/// Reads pages of the file into the stage, from byte `at`; zeros past its end.
fn read_pages(backing: &OwnedFd, map_first: u64, run: Run, window: &Window, at: usize) -> Result<()> {
    let len = run.count as usize * PAGE_BYTES;
    let mut done = 0;
    while done < len {
        let offset = (map_first + run.first) * PAGE_BYTES as u64 + done as u64;
        match window.read_file(backing, at + done, len - done, offset) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(Error::of(e, "read the file below the mount")),
        }
    }
    window.zero_stage(at + done, len - done);
    Ok(())
}
