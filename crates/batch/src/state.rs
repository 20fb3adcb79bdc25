//! State that the threads of a batch share: the sources of fragments, their destinations, and the failures.

use std::sync::{Arc, Mutex};

use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use crate::ctx::BatchCtx;
use crate::device_sink::DeviceSink;
use crate::op_list::OpList;
use spinio_files::FdIdentity;
use spinio_files::FileState;
use spinio_host::lock;
use spinio_stats::RequestSpan;

/// The most bytes of a [`Fragment`]: longer operations are split, so that threads can share them.
pub(crate) const MAX_FRAGMENT: u64 = 256 << 10;

/// The sink index of memory that the CPU and the Linux kernel can store to: none.
pub(crate) const HOST_SINK: u16 = u16::MAX;

/// An operation of a batch, or a part of one, that has to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    /// Which operation.
    pub(crate) op: u32,
    /// Which of [`BatchState::sources`].
    pub(crate) source: u16,
    /// Which of [`BatchState::sinks`], or [`HOST_SINK`].
    pub(crate) sink: u16,
    /// Bytes, all of them before the end of the file; at least one.
    pub(crate) len: u32,
    /// Storage may DMA to its address.
    pub(crate) p2p: bool,
    /// Its offset in its operation.
    pub(crate) offset_in_op: u64,
    /// Its offset in the file.
    pub(crate) offset: u64,
    /// Its destination.
    pub(crate) dest: u64,
}

/// A file that operations come from.
pub(crate) struct Source {
    pub(crate) fd: Fd,
    /// Taken before the first call with the descriptor.
    pub(crate) number: FdIdentity,
    pub(crate) file: Arc<FileState>,
    pub(crate) size: u64,
}

/// An operation that was read in part, or not at all.
struct Failure {
    op: u32,
    /// Bytes before the gap.
    prefix: u64,
    /// The cause; `None`: the file ended.
    errno: Option<Errno>,
}

/// A batch that is running.
pub(crate) struct BatchState {
    pub(crate) ctx: Arc<BatchCtx>,
    pub(crate) span: RequestSpan,
    pub(crate) ops: OpList,
    pub(crate) sources: Vec<Source>,
    pub(crate) sinks: Vec<Arc<DeviceSink>>,
    /// All fragments are of one file and one device.
    pub(crate) uniform: bool,
    failures: Mutex<Vec<Failure>>,
}

impl BatchState {
    pub(crate) fn new(
        ctx: &Arc<BatchCtx>,
        span: RequestSpan,
        ops: OpList,
        sources: Vec<Source>,
        sinks: Vec<Arc<DeviceSink>>,
        uniform: bool,
    ) -> BatchState {
        BatchState { ctx: Arc::clone(ctx), span, ops, sources, sinks, uniform, failures: Mutex::default() }
    }

    /// A fragment ended after `got` bytes.
    pub(crate) fn record_short(&self, fragment: &Fragment, got: u64, errno: Option<Errno>) {
        lock(&self.failures).push(Failure { op: fragment.op, prefix: fragment.offset_in_op + got, errno });
    }

    /// Writes failures into the results; when every thread is done.
    pub(crate) fn apply_failures(&self) {
        // Of several gaps in an operation the first one determines the result, and at one offset an error precedes the
        // end of the file.
        let mut failures = std::mem::take(&mut *lock(&self.failures));
        failures.sort_by_key(|f| (f.op, f.prefix, f.errno.is_none()));
        failures.dedup_by_key(|f| f.op);
        for f in failures {
            let result = match f.errno {
                Some(errno) if f.prefix == 0 => -i64::from(errno.raw_os_error()),
                _ => f.prefix as i64,
            };
            self.ops.set(f.op as usize, result);
        }
    }
}
