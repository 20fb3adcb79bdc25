//! The shadow worker's part: reads the groups, through a ring of its own or one read after another.

#![expect(unsafe_code, reason = "the kernel writes into buffers of the caller and into device memory")]

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use spinio_host::pool::Task;
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::Ring;

use super::queue::GroupInFlight;
use super::{DEPTH, StorageReader};

impl StorageReader {
    /// A group for the ring.
    fn next_for_ring(&self, ring: &mut Ring) -> Option<GroupInFlight> {
        let next = self.queue.take(ring.outstanding() == 0);
        // The first ones are in flight while the caller prepares others. An error is returned again when the ring is
        // waited for.
        if next.is_none() && ring.outstanding() > 0 && self.queue.is_filling() && ring.submit(0).is_ok() {
            return self.queue.take_while_filling();
        }
        next
    }

    /// Everything through one ring.
    fn run_uring(&self, mut ring: Ring) {
        let kernel = self.work.ctx.reader.files.sys();
        let mut in_flight: Vec<Option<(GroupInFlight, usize)>> = Vec::new();
        let mut pending: VecDeque<(usize, usize)> = VecDeque::new();
        loop {
            while ring.free_slots() > 0 {
                let Some((slot, which)) = pending.pop_front() else {
                    let Some(group) = self.next_for_ring(&mut ring) else { break };
                    let slot = in_flight.iter().position(Option::is_none).unwrap_or_else(|| {
                        in_flight.push(None);
                        in_flight.len() - 1
                    });
                    let count = group.got.len();
                    in_flight[slot] = Some((group, count));
                    pending.extend((0..count).map(|which| (slot, which)));
                    continue;
                };
                let Some((group, _)) = &in_flight[slot] else { continue };
                let read = &self.groups.reads(group.group)[which];
                let token = (slot as u64) << 32 | which as u64;
                let fd =
                    self.work.sources[read.source as usize].file.direct_fd.as_ref().map_or(-1, |shadow| shadow.get());
                let to = group.base.wrapping_add(read.dest) as *mut u8;
                // SAFETY: the buffer of the caller has space for the read, and is this worker's until the group is
                // complete; a P2P address is inside its allocation.
                if !unsafe { ring.read(fd, to, read.len, read.offset, token) } {
                    pending.push_front((slot, which));
                    break;
                }
            }
            if ring.outstanding() == 0 {
                // No group arrived while it waited: all are done.
                return;
            }
            if let Err(errno) = ring.submit(1) {
                // A shortage of memory passes.
                if !matches!(errno, Errno::AGAIN | Errno::BUSY | Errno::NOMEM) {
                    self.work.ctx.reader.files.workers().io_uring_denied.store(true, Relaxed);
                }
                let unresolved = !ring.drain();
                drop(ring);
                // Every group counts as not read.
                for (mut group, _) in in_flight.into_iter().flatten() {
                    group.got.fill(0);
                    group.dma_unresolved = unresolved;
                    self.queue.complete(group);
                }
                return self.run_sync();
            }
            while let Some((token, result)) = ring.next_completion() {
                let (slot, which) = ((token >> 32) as usize, token as u32 as usize);
                match kernel.on_completion(result) {
                    Err(Errno::INTR) => pending.push_back((slot, which)),
                    // EAGAIN too: a server that answers so could do it for ever. The page cache is read instead.
                    landed => {
                        let Some((group, reads_left)) = &mut in_flight[slot] else { continue };
                        group.got[which] = landed.unwrap_or(0) as u32;
                        *reads_left -= 1;
                        if *reads_left == 0
                            && let Some((group, _)) = in_flight[slot].take()
                        {
                            self.queue.complete(group);
                        }
                    }
                }
            }
        }
    }

    /// One read after another.
    fn run_sync(&self) {
        let kernel = self.work.ctx.reader.files.sys();
        while let Some(mut group) = self.queue.take(true) {
            let staged = self.groups.group(group.group).buffer_len > 0;
            let route = if staged { Route::Direct } else { Route::P2p };
            for (read, got) in self.groups.reads(group.group).iter().zip(&mut group.got) {
                let Ok(shadow) = &self.work.sources[read.source as usize].file.direct_fd else { continue };
                let to = group.base.wrapping_add(read.dest) as *mut u8;
                // SAFETY: as in `run_uring`.
                let n = unsafe { kernel.pread(route, shadow.get(), to, read.len as usize, read.offset, 0) };
                *got = n.unwrap_or(0) as u32;
            }
            self.queue.complete(group);
        }
    }
}

impl Task for StorageReader {
    fn execute(&self) {
        let Some(_scope) = self.scope.enter() else { return };
        let ctx = &self.work.ctx;
        if !ctx.reader.files.workers().io_uring_denied.load(Relaxed) {
            match ctx.reader.files.sys().new_io_uring(DEPTH) {
                Ok(ring) => return self.run_uring(ring),
                // Too little memory, or too many open files: that is temporary.
                Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN) => {}
                Err(_) => ctx.reader.files.workers().io_uring_denied.store(true, Relaxed),
            }
        }
        self.run_sync();
    }
}
