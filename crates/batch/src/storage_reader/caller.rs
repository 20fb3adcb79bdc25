//! The caller's part: supplies buffers, has shadow workers read the groups, and launches what they have read.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spinio_host::is_cancelled;
use spinio_host::panic_relay::PanicRelay;
use spinio_host::pool::{SHADOW_WORKERS, Task};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_transfer::bounce::{BUFFER_SIZE, BouncePool, Policy};

use super::queue::GroupInFlight;
use super::{DEPTH, StorageReader};
use crate::batch_readers::BatchReaders;
use crate::device_sink::{PackBuffer, SinkWriter};
use crate::state::Fragment;

/// The most groups in flight.
const MAX_GROUPS: usize = 16;

/// Groups that are ready when the ring is full: it takes one while the caller sends another.
const READY_GROUPS: usize = 2;

/// How often a caller that launches for readers looks whether its file system's share has room.
const LENDING_POLL: Duration = Duration::from_micros(50);

impl StorageReader {
    /// Wakes a shadow worker, or several if there is no ring, unless they are already at work.
    fn wake_workers(self: &Arc<Self>) {
        let count = if self.work.ctx.reader.files.workers().io_uring_denied.load(Relaxed) { SHADOW_WORKERS } else { 1 };
        let more = self.queue.claim_workers(count);
        if more > 0
            && let Some(shadow) = self.work.ctx.reader.files.shadow_workers()
        {
            shadow.for_key(self.share).submit(Arc::clone(self) as Arc<dyn Task>, more);
        }
    }

    /// Supplies buffers and sends completed ones, until all is done; returns the fragments that storage could not
    /// deliver. `readers`: readers that may have buffers of the pool meanwhile.
    pub(crate) fn finish(self: &Arc<Self>, readers: Option<&BatchReaders>) -> Vec<Fragment> {
        let mut buffers: Vec<Option<PackBuffer>> = (0..self.groups.len()).map(|_| None).collect();
        let mut relay = PanicRelay::default();
        let fallback = relay.catch(|| self.transfer(&mut buffers, readers));
        let not_begun = self.queue.close();
        // After a panic too: storage writes no memory of the program from here on.
        relay.catch(|| self.scope.join());
        // Only after a panic of the batch. A read of a shadow worker may still write if that worker panicked itself.
        let completed = self.queue.take_completed();
        for in_hand in not_begun.into_iter().chain(completed).filter(|in_hand| !in_hand.dma_unresolved) {
            if let Some(buffer) = self.take_buffer(&mut buffers, in_hand.group) {
                self.staging(in_hand.group).release(buffer.into_block());
            }
        }
        for group in 0..buffers.len() {
            if let Some(buffer) = self.take_buffer(&mut buffers, group) {
                self.staging(group).quarantine(buffer.into_block());
            }
        }
        relay.resume();
        fallback.unwrap_or_default()
    }

    /// The caller's part; `buffers` has those in flight.
    fn transfer(self: &Arc<Self>, buffers: &mut [Option<PackBuffer>], readers: Option<&BatchReaders>) -> Vec<Fragment> {
        let mut writers: Vec<Option<SinkWriter>> = self.work.sinks.iter().map(|_| None).collect();
        let mut fallback = Vec::new();
        let (mut next, mut in_flight, mut reads) = (0, 0, 0);
        self.queue.begin_filling();
        while next < self.groups.len() || in_flight > 0 {
            if next < self.groups.len() && self.is_cancelled() {
                self.cancel_from(next);
                next = self.groups.len();
            }
            let mut out_of_buffers = false;
            while next < self.groups.len() && in_flight < MAX_GROUPS && (reads < DEPTH as usize || self.needs_groups())
            {
                match self.acquire_buffer(next, in_flight, readers) {
                    Ok(Some(buffer)) => buffers[next] = buffer,
                    Ok(None) => {
                        out_of_buffers = true;
                        break;
                    }
                    Err(()) => {
                        self.fall_back(next, &mut fallback);
                        next += 1;
                        continue;
                    }
                }
                let base = buffers[next].as_ref().map_or(0, |p| p.ptr() as u64);
                let got = vec![0; self.groups.reads(next).len()];
                self.queue.push(GroupInFlight {
                    group: next,
                    base,
                    got,
                    dma_unresolved: false,
                    started: Instant::now(),
                });
                // At once: the first groups are read while the pool grows for the next.
                self.wake_workers();
                reads += self.groups.reads(next).len();
                next += 1;
                in_flight += 1;
            }
            self.queue.finish_filling();
            if in_flight == 0 {
                continue;
            }
            self.wake_workers();
            let more = next < self.groups.len() && in_flight < MAX_GROUPS && !out_of_buffers;
            let Some(group) = self.queue.next_completed(more) else {
                if self.scope.is_poisoned() {
                    // The groups of a worker that panicked never complete.
                    break;
                }
                continue;
            };
            in_flight -= 1;
            reads -= group.got.len();
            let buffer = self.take_buffer(buffers, group.group);
            self.deliver(group, buffer, &mut writers, &mut fallback);
        }
        writers.into_iter().flatten().for_each(SinkWriter::finish);
        fallback
    }

    /// Whether the batch is to end early. The poll may read too, and must find buffers that this batch does not have.
    fn is_cancelled(&self) -> bool {
        let enough = self.work.ctx.reader.bounce.limit() >= 2 * (MAX_GROUPS * BUFFER_SIZE) as u64;
        enough && self.work.sinks.iter().all(|sink| sink.staging.can_lend(self.share)) && is_cancelled()
    }

    /// Groups from this one on are not begun.
    fn cancel_from(&self, from: usize) {
        for item in (from..self.groups.len()).flat_map(|group| self.groups.fragments_in(group)) {
            self.work.record_short(item, 0, Some(Errno::INTR));
        }
    }

    /// A buffer for a group: `Ok(None)`: not at the moment. The inner `None`: it needs none.
    fn acquire_buffer(
        &self,
        group: usize,
        in_flight: usize,
        readers: Option<&BatchReaders>,
    ) -> Result<Option<Option<PackBuffer>>, ()> {
        let group = self.groups.group(group);
        if group.buffer_len == 0 {
            return Ok(Some(None));
        }
        let sink = &self.work.sinks[group.sink as usize];
        let staging = &sink.staging;
        // The server may never answer: others must find buffers then.
        if !staging.begin_lending(self.share, false) {
            if in_flight > 0 {
                return Ok(None);
            }
            match readers {
                // Perhaps no other thread sends the buffers that they have filled, for which other batches wait.
                Some(readers) => {
                    while !staging.begin_lending(self.share, false) {
                        readers.pump();
                        std::thread::sleep(LENDING_POLL);
                    }
                }
                None => drop(staging.begin_lending(self.share, true)),
            }
        }
        let block = match staging.try_acquire(Policy::WithinLimit) {
            Ok(None) if in_flight == 0 => match readers {
                Some(readers) if readers.uses_sink(group.sink) => readers.acquire_block().map(Some),
                Some(readers) => readers.acquire_other(staging).map(Some),
                None => staging.acquire().map(Some),
            },
            other => other,
        };
        if !matches!(block, Ok(Some(_))) {
            staging.end_lending(self.share, 1);
        }
        match block {
            Ok(Some(block)) => {
                let mut buffer = PackBuffer::new(sink, block);
                buffer.reserve(group.buffer_len);
                Ok(Some(Some(buffer)))
            }
            Ok(None) => Ok(None),
            Err(_) => Err(()),
        }
    }

    /// A buffer in flight comes back: it is this batch's alone from here on.
    fn take_buffer(&self, buffers: &mut [Option<PackBuffer>], group: usize) -> Option<PackBuffer> {
        let buffer = buffers[group].take()?;
        self.staging(group).end_lending(self.share, 1);
        Some(buffer)
    }

    /// Groups that are ready while there are more.
    fn queue_ahead(&self) -> usize {
        // Without a ring each group keeps a shadow worker busy.
        if self.work.ctx.reader.files.workers().io_uring_denied.load(Relaxed) { MAX_GROUPS } else { READY_GROUPS }
    }

    /// Whether shadow workers could soon be without a group.
    fn needs_groups(&self) -> bool {
        self.queue.ready() < self.queue_ahead()
    }

    /// The pool that the buffer of a group comes from.
    fn staging(&self, group: usize) -> &BouncePool {
        &self.work.sinks[self.groups.group(group).sink as usize].staging
    }

    fn fall_back(&self, group: usize, fallback: &mut Vec<Fragment>) {
        fallback.extend(self.groups.fragments_in(group).copied());
    }

    fn deliver(
        &self,
        group: GroupInFlight,
        buffer: Option<PackBuffer>,
        writers: &mut [Option<SinkWriter>],
        fallback: &mut Vec<Fragment>,
    ) {
        let sink = self.groups.group(group.group).sink;
        let stats = self.work.ctx.reader.files.stats();
        let reads = self.groups.reads(group.group).iter().zip(&group.got);
        let Some(mut page) = buffer else {
            for (read, &got) in reads {
                if got == read.len {
                    let bytes = u64::from(got);
                    stats.record_piece(&self.work.span, Route::P2p, Reason::Absent, 0, bytes, group.started);
                } else {
                    fallback.extend(self.groups.fragments_of(read).copied());
                }
            }
            return;
        };
        let device_sink = &self.work.sinks[sink as usize];
        if group.dma_unresolved {
            device_sink.staging.quarantine(page.into_block());
            return self.fall_back(group.group, fallback);
        }
        let mut bytes = 0;
        for (read, &got) in reads {
            for item in self.groups.fragments_of(read) {
                let skip = item.offset - read.offset;
                if skip + u64::from(item.len) <= u64::from(got) {
                    page.push_within((read.dest + skip) as usize, item.len as usize, item.dest);
                    bytes += u64::from(item.len);
                } else {
                    fallback.push(*item);
                }
            }
        }
        let writer = writers[sink as usize].get_or_insert_with(|| SinkWriter::new(device_sink));
        match writer.send(page) {
            Ok(()) => stats.record_piece(&self.work.span, Route::Direct, Reason::Absent, 0, bytes, group.started),
            Err(_) => self.fall_back(group.group, fallback),
        }
    }
}
