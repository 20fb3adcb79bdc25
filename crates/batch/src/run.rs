//! A batch from its operations to its results: resolved, and then each fragment on its route.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use std::sync::Arc;

use spinio_device::{Allocation, StreamId, StreamOrder, Target, WaitMode, thread_stream};
use spinio_plan::{Reason, Residency, Route};
use spinio_sys::Errno;

use crate::batch_readers::BatchReaders;
use crate::copy_engine::CopyEngine;
use crate::ctx::BatchCtx;
use crate::op_list::OpList;
use crate::pinned_gather::PinnedGather;
use crate::register_engine::RegisteredParts;
use crate::residency::FragmentResidency;
use crate::resolve::{P2pSample, Resolver};
use crate::state::{BatchState, Fragment, HOST_SINK};
use crate::storage_reader::StorageReader;
use crate::{partition, register_engine, residency};
use spinio_host::panic_relay::PanicRelay;
use spinio_stats::{Direction, RequestSpan};
use spinio_transfer::Error;

/// The result of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchResult {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Operations that failed: their results are negative.
    pub failed: usize,
}

/// A batch whose operations are resolved.
pub(crate) struct ResolvedBatch {
    pub(crate) work: Arc<BatchState>,
    fragments: Vec<Fragment>,
    /// Operations to be read one at a time, and their destinations.
    single_reads: Vec<(u32, Option<Target>)>,
    /// First byte of each allocation, its end, and its sink; sorted.
    ranges: Vec<(u64, u64, u16)>,
    samples: Vec<P2pSample>,
    /// The gather of pinned files, which ran while the batch was resolved.
    pinned: PinnedGather,
    known: Vec<Allocation>,
    /// Storage may DMA to the destinations of some fragments.
    p2p: bool,
    /// Bytes of all fragments.
    bytes: u64,
}

/// Resolves the operations, on the program's thread: this is the moment that determines their order on the device.
/// `retried`: the call that reads them again, because pinned pages were lost; without pinned pages then.
pub(crate) fn resolve(
    ctx: &Arc<BatchCtx>,
    ops: OpList,
    known: &[Allocation],
    retried: Option<RequestSpan>,
) -> Result<ResolvedBatch, Error> {
    if u32::try_from(ops.len()).is_err() {
        return Err(Error::kernel(Errno::INVAL, "read a batch", 0, 0));
    }
    let fd = if ops.len() > 0 { ops.get(0).fd } else { -1 };
    let span = retried.unwrap_or_else(|| ctx.reader.files.stats().begin(Direction::Batch, fd, None, 0));
    // Started by a thread of the program, whose fd table they share.
    ctx.reader.files.workers().batch_copy();
    let mut resolver = Resolver::new(ctx, ops, known, retried.is_none());
    resolver.resolve_all();
    let single_ops = std::mem::take(&mut resolver.single_reads);
    let single_reads = single_ops.into_iter().map(|i| (i, resolver.op_target(i as usize))).collect();
    let Resolver { sources, sinks, fragments, ranges, samples, pinned, uniform, p2p, bytes, .. } = resolver;
    if u32::try_from(fragments.len()).is_err() {
        return Err(Error::kernel(Errno::INVAL, "read a batch", 0, 0));
    }
    let watch = span.with_len(|| (0..ops.len()).map(|i| ops.get(i).len).fold(0, u64::saturating_add));
    let watch = match sinks.first() {
        Some(sink) => watch.with_device(sink.device),
        None => watch,
    };
    let places = ranges.values().map(|p| (p.start, p.end, p.sink)).collect();
    let (work, known) = (Arc::new(BatchState::new(ctx, watch, ops, sources, sinks, uniform)), known.to_vec());
    Ok(ResolvedBatch { work, fragments, single_reads, ranges: places, samples, pinned, known, p2p, bytes })
}

impl ResolvedBatch {
    /// Moves all bytes and waits. If that panics, no operation counts as read.
    pub(crate) fn run(self) -> BatchResult {
        let work = Arc::clone(&self.work);
        let mut relay = PanicRelay::default();
        let done = relay.catch(|| self.transfer());
        if done.is_none() {
            let (list, errno) = (work.ops, Errno::IO);
            (0..list.len()).for_each(|i| list.set(i, -i64::from(errno.raw_os_error())));
            work.ctx.reader.files.stats().end(&work.span, &Err(errno));
        }
        relay.resume();
        done.unwrap_or_default()
    }

    fn transfer(mut self) -> BatchResult {
        let work = Arc::clone(&self.work);
        let ctx = &work.ctx;
        {
            let _request = ctx.reader.files.unpin().begin_request();
            let items = std::mem::take(&mut self.fragments);
            let items = self.wait_stream_order(items);
            let (mut cached, absent) = self.split_by_residency(items);
            let partitions = partition::partition(&work, &mut cached);
            let storage = (!absent.is_empty()).then(|| StorageReader::new(&work, absent));
            let copies =
                (!cached.is_empty()).then(|| CopyEngine::new(&work, cached, partitions.caller_only, Reason::Cached));
            let readers = copies.as_ref().and_then(BatchReaders::start);
            // Copy workers launch, too, which they cannot do while the caller registers.
            let start_workers = |yes: bool| {
                if let (Some(copies), None, true) = (&copies, &readers, yes) {
                    copies.wake_workers();
                }
            };
            start_workers(partitions.is_empty());
            // From here on workers may run.
            let mut relay = PanicRelay::default();
            let run_registration =
                || copies.as_ref().map(|copies| register_engine::run(copies, &partitions, readers.as_deref()));
            let registered = relay.catch(run_registration).flatten();
            start_workers(!partitions.is_empty() && !relay.has_panic());
            let mut fallback = Vec::new();
            if !relay.has_panic()
                && let Some(storage) = storage
            {
                if let Some(readers) = &readers {
                    readers.start_launcher();
                }
                fallback.extend(relay.catch(|| storage.finish(readers.as_deref())).unwrap_or_default());
            }
            if let (true, Some(copies)) = (relay.has_panic(), &copies) {
                copies.cancel_rest();
            }
            match (readers, copies) {
                (Some(readers), _) => fallback.extend(relay.catch(|| readers.finish()).unwrap_or_default()),
                (None, Some(copies)) => drop(relay.catch(|| copies.finish())),
                (None, None) => {}
            }
            fallback.extend(relay.catch(|| registered.map_or(Vec::new(), RegisteredParts::finish)).unwrap_or_default());
            relay.resume();
            if !fallback.is_empty() {
                let rest = CopyEngine::new(&work, fallback, 0, Reason::Fallback);
                rest.wake_workers();
                rest.finish();
            }
        }
        self.read_singles();
        let (started, stats) = (self.pinned.started, ctx.reader.files.stats());
        let report = |bytes| stats.record_piece(&work.span, Route::Gather, Reason::Pinned, 0, bytes, started);
        let pinned = std::mem::replace(&mut self.pinned, PinnedGather::new(false));
        if !pinned.finish(ctx, report)
            && let Ok(retry) = resolve(ctx, work.ops, &self.known, Some(work.span))
        {
            // A process may have written a pinned file meanwhile.
            return retry.transfer();
        }
        self.finish()
    }

    /// Writes of the CPU or of storage into a device are not ordered: work that was queued before has to be done.
    fn wait_stream_order(&mut self, mut items: Vec<Fragment>) -> Vec<Fragment> {
        let work = &self.work;
        for (sink_index, sink) in work.sinks.iter().enumerate() {
            let to_sink = |i: &Fragment| i.sink as usize == sink_index;
            if sink.device.capabilities().has_dma_engine && !(self.p2p && items.iter().any(|i| to_sink(i) && i.p2p)) {
                continue;
            }
            if let Err(e) = sink.wait_for_order() {
                sink.record_failure(e);
                items.retain(|i| !to_sink(i));
                self.bytes = items.iter().map(|i| u64::from(i.len)).sum();
            }
        }
        items
    }

    /// Cached and absent fragments.
    fn split_by_residency(&self, mut items: Vec<Fragment>) -> (Vec<Fragment>, Vec<Fragment>) {
        let work = &self.work;
        let ctx = &work.ctx;
        let direct = ctx.reader.policy.allows(Route::Direct);
        let reachable = self.p2p_pairs();
        // From here on those of one file and device are consecutive.
        let key = |i: &Fragment| (i.source, i.sink);
        if !work.uniform && !items.is_sorted_by_key(key) {
            items.sort_by_key(key);
        }
        let mut found: Vec<FragmentResidency> = work.sources.iter().map(|_| FragmentResidency::Cached).collect();
        let mut rest = &items[..];
        while let Some(Fragment { source: which, .. }) = rest.first() {
            let here =
                |end: &dyn Fn(&Fragment) -> bool| if work.uniform { rest.len() } else { rest.partition_point(end) };
            let (some, tail) = rest.split_at(here(&|i| i.source == *which));
            rest = tail;
            // Those that go to host memory come last.
            let device_fragments = &some[..some.partition_point(|i| i.sink != HOST_SINK)];
            if direct || reachable.iter().any(|&(source, _)| source == *which) {
                found[*which as usize] = residency::survey(ctx, &work.sources[*which as usize], device_fragments);
            }
        }
        let stats = ctx.reader.files.stats();
        if found.iter().all(|w| matches!(w, FragmentResidency::Cached)) {
            stats.residency_probed(Residency::Clean, self.bytes);
            return (items, Vec::new());
        }
        let copies: Vec<bool> = work.sinks.iter().map(|o| o.device.capabilities().has_dma_engine).collect();
        let mut absent = Vec::new();
        items.retain_mut(|item| {
            item.p2p &= reachable.contains(&(item.source, item.sink));
            let staged = item.sink != HOST_SINK && direct && copies[item.sink as usize];
            let is_absent = (staged || item.p2p) && found[item.source as usize].is_absent(item);
            if is_absent {
                absent.push(*item);
            }
            !is_absent
        });
        let absent_bytes = absent.iter().map(|i| u64::from(i.len)).sum();
        stats.residency_probed(Residency::Clean, self.bytes - absent_bytes);
        stats.residency_probed(Residency::Absent, absent_bytes);
        (items, absent)
    }

    /// Whether the storage of each file may DMA into each device.
    fn p2p_pairs(&self) -> Vec<(u16, u16)> {
        let can_p2p = |s: &&P2pSample| {
            let (work, capturing) = (&self.work, !self.work.sinks[s.sink as usize].is_ordered());
            work.ctx.reader.p2p(&work.sources[s.source as usize].file, s.dest, s.offset, s.len, capturing).is_ok()
        };
        self.samples.iter().filter(can_p2p).map(|s| (s.source, s.sink)).collect()
    }

    /// Operations that are read one at a time.
    fn read_singles(&mut self) {
        let ctx = &self.work.ctx;
        let list = self.work.ops;
        if thread_stream() == StreamId::PER_THREAD {
            // The number names another stream on the thread that runs the batch: what the program had queued is waited for.
            for sink in &self.work.sinks {
                if let Err(e) = sink.wait_for_order() {
                    sink.record_failure(e);
                }
            }
        }
        for (i, to) in &self.single_reads {
            let op = list.get(*i as usize);
            let len = usize::try_from(op.len).unwrap_or(usize::MAX);
            let offset = i64::try_from(op.offset).map_err(|_| Errno::INVAL);
            let got = offset.and_then(|_| match to {
                Some(to) => ctx.reader.read(op.fd, Some(op.offset), *to, len).map_err(|e| e.kind.errno()),
                // SAFETY: host memory, which the Linux kernel validates.
                None => unsafe {
                    ctx.reader.files.sys().pread(Route::Copy, op.fd, op.address as *mut u8, len, op.offset, 0)
                },
            });
            list.set(*i as usize, got.map_or_else(|errno| -i64::from(errno.raw_os_error()), |n| n as i64));
        }
        // Small ones are only queued when they return.
        let devices = self.single_reads.iter().filter_map(|(_, to)| to.as_ref().map(|t| t.allocation.device));
        let mut drained: Vec<*const ()> = Vec::new();
        for device in devices {
            let ptr = core::ptr::from_ref(device).cast::<()>();
            if !drained.contains(&ptr) {
                drained.push(ptr);
                let _ = StreamOrder::app(device).synchronize(WaitMode::Context);
            }
        }
    }

    fn finish(self) -> BatchResult {
        let work = &self.work;
        let list = work.ops;
        work.apply_failures();
        for (which, outlet) in work.sinks.iter().enumerate() {
            let Some(error) = outlet.failure() else { continue };
            let result = -i64::from(Error::device(error, "copy", 0, 0).kind.errno().raw_os_error());
            let in_sink = |at: u64| {
                let before = self.ranges.partition_point(|p| p.0 <= at);
                self.ranges[..before].last().is_some_and(|p| p.2 as usize == which && at < p.1)
            };
            for i in 0..list.len() {
                if list.result(i) > 0 && in_sink(list.get(i).address) {
                    list.set(i, result);
                }
            }
        }
        let mut done = BatchResult::default();
        for i in 0..list.len() {
            match u64::try_from(list.result(i)) {
                Ok(bytes) => done.bytes += bytes,
                Err(_) => done.failed += 1,
            }
        }
        let stats = work.ctx.reader.files.stats();
        stats.end(&work.span, &Ok(done.bytes as usize));
        work.ctx.reader.files.ctx.stats_region.update_gauges();
        done
    }
}
