//! What the threads of a batch share: where pieces come from, where they go, and what failed.

use std::sync::{Arc, Mutex};

use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use crate::list::List;
use crate::outlet::Outlet;
use crate::ctx::BatchCtx;
use spinio_files::File;
use spinio_host::lock;
use spinio_stats::Watch;
use spinio_files::FdIdentity;

/// Bytes of an [`Item`] at most: longer pieces are cut, so that threads can share them.
pub(crate) const CUT: u64 = 256 << 10;

/// The outlet of memory that the CPU and the kernel can store to: none.
pub(crate) const HOST: u16 = u16::MAX;

/// A piece of a batch, or a part of one, that has to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// Which piece.
    pub(crate) index: u32,
    /// Which of [`Work::sources`].
    pub(crate) source: u16,
    /// Which of [`Work::outlets`], or [`HOST`].
    pub(crate) outlet: u16,
    /// Bytes, all of them before the end of the file; at least one.
    pub(crate) len: u32,
    /// Storage may DMA to its address.
    pub(crate) p2p: bool,
    /// Where it begins in its piece.
    pub(crate) within: u64,
    /// In the file.
    pub(crate) offset: u64,
    /// Where it goes.
    pub(crate) to: u64,
}

/// A file that pieces come from.
pub(crate) struct Source {
    pub(crate) fd: Fd,
    /// Taken before anything was asked of the number.
    pub(crate) number: FdIdentity,
    pub(crate) file: Arc<File>,
    pub(crate) size: u64,
}

/// A piece that did not arrive whole.
struct Failure {
    index: u32,
    /// Bytes before the gap.
    prefix: u64,
    /// Why; `None`: the file ended.
    errno: Option<Errno>,
}

/// A batch under way.
pub(crate) struct Work {
    pub(crate) ctx: Arc<BatchCtx>,
    pub(crate) watch: Watch,
    pub(crate) list: List,
    pub(crate) sources: Vec<Source>,
    pub(crate) outlets: Vec<Arc<Outlet>>,
    /// All items are of one file and go to one device.
    pub(crate) alike: bool,
    failures: Mutex<Vec<Failure>>,
}

impl Work {
    pub(crate) fn new(
        ctx: &Arc<BatchCtx>,
        watch: Watch,
        list: List,
        sources: Vec<Source>,
        outlets: Vec<Arc<Outlet>>,
        alike: bool,
    ) -> Work {
        Work { ctx: Arc::clone(ctx), watch, list, sources, outlets, alike, failures: Mutex::default() }
    }

    /// An item ended `got` bytes in.
    pub(crate) fn ended(&self, item: &Item, got: u64, errno: Option<Errno>) {
        lock(&self.failures).push(Failure { index: item.index, prefix: item.within + got, errno });
    }

    /// Puts what failed into the results; when every thread is done.
    pub(crate) fn settle(&self) {
        // Of several gaps in a piece the first counts, and at one place an error before the end of the file.
        let mut failures = std::mem::take(&mut *lock(&self.failures));
        failures.sort_by_key(|f| (f.index, f.prefix, f.errno.is_none()));
        failures.dedup_by_key(|f| f.index);
        for f in failures {
            let result = match f.errno {
                Some(errno) if f.prefix == 0 => -i64::from(errno.raw_os_error()),
                _ => f.prefix as i64,
            };
            self.list.set(f.index as usize, result);
        }
    }
}
