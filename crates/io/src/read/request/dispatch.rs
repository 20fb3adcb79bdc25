//! The loops of the threads that work on a request, whom they wake, and the buffers that they lend.
//!
//! ```text
//!   caller ── lends empty buffers ──> shadow workers: storage      a worker that finds nothing to do leaves, and is woken
//!          <── gets filled ones ─────                              again when there is something
//! ```

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::ReadRequest;
use super::queue::WorkQueues;
use crate::policy::COPY_FASTER_THREADS;
use crate::read::engine::{Engine, RingPath};
use crate::read::plan_range::{PlannedRange, plan_range};
use crate::read::work::{Outcome, PlanRange, Role, Work};
use spinio_device::DeviceError;
use spinio_host::pool::{SHADOW_WORKERS, Task};
use spinio_host::{is_cancelled, lock};
use spinio_plan::Route;
use spinio_sys::{Errno, linux};
use spinio_transfer::Error;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer, Policy, Refusal, ShareGuard};

/// Buffers that the shadow workers have of one request at most.
const MAX_LENT: usize = 16;

/// How long the caller polls for a read of the ring before it naps: longer where the whole read is over soon.
const RING_SPIN: Duration = Duration::from_micros(100);
const SHORT_RING_SPIN: Duration = Duration::from_micros(1200);

/// How long a request waits for room in the ring.
const RING_ROOM_WAIT: Duration = Duration::from_millis(50);

/// The first nap between two looks at the ring, and the longest.
const RING_NAP: Range<Duration> = Duration::from_micros(20)..Duration::from_micros(500);

impl ReadRequest {
    /// Queues what was planned of the whole request, or all of it to be planned, and wakes workers.
    pub(crate) fn begin(self: &Arc<Self>, planned: Option<PlannedRange>) {
        match planned {
            Some(planned) => self.apply_plan(PlanRange { offset: 0, len: self.len, recheck: false }, Some(planned)),
            None => self.queue_ranges(),
        }
        self.wake_workers();
    }

    /// Works as the program's thread until everything has arrived; the bytes of the unbroken prefix. A panic is passed
    /// on when the workers have left: they write into memory of the program, through its descriptors.
    pub(crate) fn finish(self: &Arc<Self>) -> Result<u64, Error> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_caller()));
        let incomplete = self.bytes_left.load(Acquire) > 0;
        if incomplete {
            lock(&self.queues).closed = true;
            self.scope.close_and_wait();
        }
        let mut queues = lock(&self.queues);
        let WorkQueues { empty, filled, .. } = &mut *queues;
        // Filled ones only of a request that did not come to its end.
        for buffer in empty.drain(..).chain(filled.drain(..).map(|filled| filled.buffer)) {
            self.staging.release(buffer);
        }
        self.staging.end_lending(self.file.storage, std::mem::take(&mut queues.lent_out));
        drop(queues);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        let mut completion = lock(&self.completion);
        match completion.error.take() {
            _ if incomplete => Err(Error::kernel(Errno::IO, "read", self.offset, self.len)),
            Some(error) if completion.prefix_end == 0 => Err(error),
            _ => Ok(completion.prefix_end),
        }
    }

    fn run_caller(self: &Arc<Self>) {
        loop {
            let mut worker = Worker::new(self, Role::Caller);
            loop {
                if self.must_end() {
                    let pending = lock(&self.queues).drain_pending();
                    self.fail(pending, &Error::cancelled_error("read", self.offset, self.len));
                }
                if let Err(error) = self.lend_buffers() {
                    let pending = lock(&self.queues).storage.drain(..).map(|p| (p.offset, p.len)).collect();
                    self.fail(pending, &error);
                }
                if !worker.run_next() && !worker.wait_for_storage() {
                    break;
                }
            }
            worker.drain();
            if self.wait_for_work() {
                break;
            }
        }
    }

    /// Waits; true when everything arrived or a worker panicked, false when there is something the caller could do.
    fn wait_for_work(&self) -> bool {
        // A short read from storage is over in less time than it takes to fall asleep and wake twice.
        let spin = self.ctx.files.workers().spin();
        let spin_time = if self.len <= 4 << 20 { spin * 20 } else { spin };
        let can_survey = self.can_survey(Role::Caller);
        let has_work = || lock(&self.queues).has_work_for_caller(can_survey);
        let started = Instant::now();
        while started.elapsed() < spin_time {
            if self.bytes_left.load(Acquire) == 0 {
                return true;
            }
            if self.wake_flag.swap(false, Acquire) && has_work() {
                return false;
            }
            std::hint::spin_loop();
        }
        let mut completion = lock(&self.completion);
        loop {
            if completion.finished || self.scope.is_poisoned() {
                return true;
            }
            if has_work() {
                return false;
            }
            // The program's cancel poll may do anything, and workers must not wait for it. What came up meanwhile is
            // found by the next look at the queues.
            drop(completion);
            if self.must_end() && lock(&self.queues).has_pending() {
                return false;
            }
            completion = lock(&self.completion);
            if completion.finished || has_work() {
                continue;
            }
            completion.caller_sleeps = true;
            // The time limit only guards against a wake-up lost to a worker that died.
            completion = self
                .changed
                .wait_timeout(completion, Duration::from_millis(200))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            completion.caller_sleeps = false;
        }
    }

    /// Lets a signal end the process that has no handler, and asks the program whether the request shall end early. Its
    /// cancel poll may read too, and needs buffers that are not lent to this request.
    fn must_end(&self) -> bool {
        linux::deliver_default_signals();
        let enough = self.ctx.bounce.limit() >= 2 * (MAX_LENT * BUFFER_SIZE) as u64;
        enough && self.staging.can_lend(self.file.storage) && is_cancelled()
    }

    /// Lends buffers to the shadow workers, as long as there is something to fill them with, and wakes them. The first
    /// buffer is waited for.
    fn lend_buffers(self: &Arc<Self>) -> Result<(), Error> {
        loop {
            let lent_out = {
                let queues = lock(&self.queues);
                let can_lend = MAX_LENT - queues.lent_out.min(MAX_LENT);
                if queues.empty.len() >= queues.direct_pieces().min(can_lend) {
                    break;
                }
                queues.lent_out
            };
            if !self.staging.begin_lending(self.file.storage, lent_out == 0) {
                break;
            }
            let buffer = if lent_out == 0 {
                Some(self.staging.acquire())
            } else {
                self.staging.try_acquire(Policy::WithinLimit).transpose()
            };
            if !matches!(buffer, Some(Ok(_))) {
                self.staging.end_lending(self.file.storage, 1);
            }
            let Some(buffer) = buffer else { break };
            let buffer = buffer.map_err(|e| Error::device(e, "read", self.offset, self.len))?;
            let mut queues = lock(&self.queues);
            queues.lent_out += 1;
            queues.empty.push(buffer);
        }
        self.wake_shadow_workers();
        Ok(())
    }

    /// Takes an empty buffer back from the shadow workers, for another thread to fill.
    fn take_back(&self) -> Option<(BounceBuffer, ShareGuard<'_>)> {
        let mut queues = lock(&self.queues);
        let buffer = queues.empty.pop()?;
        self.count_returned(queues);
        Some((buffer, self.staging.lent_share(self.file.storage)))
    }

    /// Waits until a share of the buffers may be free, or a buffer of this request is filled: the thread that waits may be the
    /// only one that could copy it, and so free its share.
    fn wait_for_share(&self, refusal: Refusal) {
        let mut queues = lock(&self.queues);
        if !queues.filled.is_empty() {
            return;
        }
        queues.waiting_for_share += 1;
        drop(queues);
        self.staging.wait_for_share(refusal);
        lock(&self.queues).waiting_for_share -= 1;
    }

    /// Decides who reads storage for this request, once there is something to read.
    fn choose_storage_engine(&self) {
        if self.ring.get().is_some() || lock(&self.queues).storage.is_empty() {
            return;
        }
        let path = self.ring.get_or_init(|| {
            let (ring, slot) = self.ctx.files.ring_slot(&self.file).ok()?;
            Some(RingPath { ring, slot })
        });
        if path.is_some() {
            lock(&self.queues).read_by_ring(self.file.max_ring_read() as u64);
            // It may have looked before, and sleep.
            self.notify_caller();
        }
    }

    /// The ring, for a thread that reads storage through it.
    fn ring_path(&self, role: Role) -> Option<&RingPath> {
        if role == Role::Caller { self.ring.get()?.as_ref() } else { None }
    }

    /// Wakes the workers that can be of use now.
    pub(crate) fn wake_workers(self: &Arc<Self>) {
        self.choose_storage_engine();
        self.wake_shadow_workers();
        // Callers that read side by side keep the processors busy by themselves.
        let workers = self.ctx.files.workers();
        let busy = self.ctx.files.unpin().in_flight() > workers.copy_threads().few();
        // More than at first where the threads of a long request hardly wait for the device.
        let threads = match self.copy_threads {
            many if many >= COPY_FASTER_THREADS => many.max(workers.copy_threads().for_request(self.len)),
            few => few,
        };
        let free = if busy || !self.workers_share_fd { 0 } else { threads - 1 };
        let can_survey = self.can_survey(Role::CopyWorker);
        let (needed, more) = {
            let mut queues = lock(&self.queues);
            let needed = queues.copy_workers_needed(can_survey, &self.prefault).min(free);
            let more = needed.saturating_sub(queues.copy_workers);
            queues.copy_workers += more;
            (needed, more)
        };
        let Some(pool) = (needed > 0).then(|| workers.copy()).flatten() else { return };
        // Also without more work: a shadow worker, which may have handed it out, can start none.
        pool.ensure_copy_workers(threads - 1);
        if more > 0 {
            pool.submit(Arc::new(WorkerTask { request: Arc::downgrade(self), role: Role::CopyWorker }), more);
        }
    }

    fn wake_shadow_workers(self: &Arc<Self>) {
        let more = {
            let mut queues = lock(&self.queues);
            let wanted = queues.shadow_workers_needed(!self.can_survey(Role::Caller)).min(SHADOW_WORKERS);
            let more = wanted.saturating_sub(queues.shadow_workers);
            queues.shadow_workers += more;
            more
        };
        if more > 0
            && let Some(workers) = self.ctx.files.shadow_workers()
        {
            let task = Arc::new(WorkerTask { request: Arc::downgrade(self), role: Role::ShadowWorker });
            workers.for_key(self.file.storage).submit(task, more);
        }
    }
}

/// A thread at work on a request.
struct Worker<'a> {
    request: &'a Arc<ReadRequest>,
    role: Role,
    engine: Engine<'a>,
    /// There has been no room in the ring since then.
    no_room_since: Option<Instant>,
}

impl<'a> Worker<'a> {
    fn new(request: &'a Arc<ReadRequest>, role: Role) -> Worker<'a> {
        Worker { request, role, engine: Engine::new(&request.params, &request.prefault, role), no_room_since: None }
    }

    /// Does the next thing; false if there is none for this role.
    fn run_next(&mut self) -> bool {
        let request = self.request;
        let can_survey = request.can_survey(self.role);
        let path = request.ring_path(self.role);
        if path.is_some() && self.engine.poll_ring() {
            self.apply_outcomes();
        }
        let ticket = match path {
            Some(path) if lock(&request.queues).waits_for_ring() => self.engine.reserve(path),
            _ => None,
        };
        let work = lock(&request.queues).next(self.role, can_survey, ticket.is_some(), &request.prefault);
        let Some(work) = work else { return false };
        let started = Instant::now();
        match (work, path.zip(ticket)) {
            (Work::FillBuffer(piece, buffer), Some((path, ticket))) => {
                self.engine.start_direct(ticket, path.slot, piece, buffer);
                self.wake_ring(path);
            }
            (Work::Piece(piece), Some((path, ticket))) if piece.route == Route::P2p => {
                self.engine.start_p2p(ticket, path.slot, piece);
                self.wake_ring(path);
            }
            (work, _) => self.run(work, started),
        }
        self.apply_outcomes();
        true
    }

    fn run(&mut self, work: Work, started: Instant) {
        let request = self.request;
        match work {
            Work::Piece(piece) if matches!(piece.route, Route::Copy | Route::Gather) => match self.acquire_buffer() {
                Ok((buffer, share)) => self.engine.copy(piece, buffer, share, started),
                Err(e) => self.engine.fail_on_device(piece, e),
            },
            Work::Piece(piece) => self.engine.move_piece(piece, started),
            Work::FillBuffer(piece, buffer) => self.engine.direct(piece, buffer, started),
            Work::CopyToDevice(filled) => self.engine.copy_filled(filled),
            Work::Prefault(chunk) => self.engine.prefault_chunk(&chunk),
            Work::PlanRange(range) => {
                request.apply_plan(range, plan_range(request, self.role, range));
                request.wake_workers();
            }
        }
    }

    /// A read that was started just before the kernel thread fell asleep waits for a worker.
    fn wake_ring(&self, path: &RingPath) {
        self.request.ctx.files.workers().wake_ring(&path.ring);
    }

    /// Waits a moment, since reads of other requests have all the room in the ring; false if nothing waits for room. Their
    /// storage may hang: so workers take over after a while.
    fn wait_for_room(&mut self) -> bool {
        let request = self.request;
        if !lock(&request.queues).waits_for_ring() {
            return false;
        }
        if self.no_room_since.get_or_insert_with(Instant::now).elapsed() < RING_ROOM_WAIT {
            std::thread::sleep(RING_NAP.end);
            return true;
        }
        lock(&request.queues).by_ring = false;
        request.wake_shadow_workers();
        false
    }

    /// Waits until a read of the ring is over, or there is something else to do; false if there is nothing to wait for.
    fn wait_for_storage(&mut self) -> bool {
        let request = self.request;
        let Some(path) = request.ring_path(self.role) else { return false };
        if self.engine.reads_in_ring() == 0 {
            return self.wait_for_room();
        }
        self.no_room_since = None;
        let can_survey = request.can_survey(self.role);
        let spin_time = if request.len <= 4 << 20 { SHORT_RING_SPIN } else { RING_SPIN };
        let (begun, mut nap) = (Instant::now(), RING_NAP.start);
        let mut spin = path.ring.begin_spin();
        loop {
            if self.engine.poll_ring() {
                self.apply_outcomes();
                return true;
            }
            if request.wake_flag.swap(false, Acquire) && lock(&request.queues).has_work_for_caller(can_survey) {
                return true;
            }
            if spin.is_some() && begun.elapsed() < spin_time {
                std::hint::spin_loop();
                continue;
            }
            spin = None;
            self.wake_ring(path);
            if request.must_end() && lock(&request.queues).has_pending() {
                return true;
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(RING_NAP.end);
        }
    }

    /// A buffer to fill, of the share of the file system: a server may not answer, but a local disk does. While none is free
    /// this thread does what frees one: its own request may have them, filled or not.
    fn acquire_buffer(&mut self) -> Result<(BounceBuffer, Option<ShareGuard<'a>>), DeviceError> {
        let request = self.request;
        let (staging, needs_share) = (&request.staging, !request.file.is_local());
        let mut share = None;
        loop {
            let mut refused = None;
            if needs_share && share.is_none() {
                match staging.try_share(request.file.storage) {
                    Ok(one) => share = Some(one),
                    Err(refusal) => refused = Some(refusal),
                }
            }
            if refused.is_none()
                && let Some(buffer) = staging.try_acquire(Policy::WithinLimit)?
            {
                return Ok((buffer, share));
            }
            if let Some((buffer, lent)) = request.take_back() {
                return Ok((buffer, needs_share.then_some(lent)));
            }
            if self.engine.poll_ring() {
                self.apply_outcomes();
                continue;
            }
            let filled = lock(&request.queues).filled.pop_front();
            match (filled, refused) {
                (None, _) if self.engine.reads_in_ring() > 0 => std::thread::sleep(RING_NAP.start),
                (Some(filled), _) => {
                    self.engine.copy_filled(filled);
                    self.apply_outcomes();
                }
                (None, None) => self.engine.wait_for_buffer(),
                (None, Some(refusal)) => request.wait_for_share(refusal),
            }
        }
    }

    /// Waits for everything in flight.
    fn drain(&mut self) {
        self.engine.drain();
        self.apply_outcomes();
    }

    fn apply_outcomes(&mut self) {
        let (request, mut wake) = (self.request, false);
        for outcome in self.engine.outcomes() {
            wake |= matches!(outcome, Outcome::WakeWorkers | Outcome::Resurvey { .. });
            request.apply(outcome);
        }
        if wake {
            request.wake_workers();
        }
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        // Only after a panic there is anything left: copies that may still be stored, pages that may still be read.
        let _ = catch_unwind(AssertUnwindSafe(|| self.drain()));
    }
}

/// The part of a worker in a request. An entry stays in the queue while all workers wait for a server, and must not
/// keep the fences and descriptors of a request that is over.
struct WorkerTask {
    request: Weak<ReadRequest>,
    role: Role,
}

impl Task for WorkerTask {
    fn execute(&self) {
        let Some(request) = self.request.upgrade() else { return };
        let Some(_scope) = request.scope.enter() else { return };
        let mut worker = Worker::new(&request, self.role);
        while worker.run_next() {}
        worker.drain();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use spinio_files::cost::CostEntry;
    use spinio_plan::{Reason, Segment};
    use spinio_stats::Direction;
    use spinio_testkit::buffer::emulated;
    use spinio_testkit::{Buffer, Call, Effect, FaultySyscalls, eventually, file, with_deadline};

    use super::*;
    use crate::read::params::ReadParams;
    use crate::read::work::{FilledBuffer, Piece};
    use crate::{Runtime, Settings};

    const LEN: u64 = 4 << 20;

    /// Of a file that storage is to serve.
    fn request(runtime: &Runtime, file: &std::fs::File, buffer: &Buffer) -> Arc<ReadRequest> {
        let (ctx, fd, dest) = (runtime.reader(), file.as_raw_fd(), buffer.target(0));
        let state = ctx.files.get(fd, ctx.files.sys().fstat(fd).unwrap()).unwrap();
        let costs: Arc<CostEntry> = ctx.files.cost_entry(&state, dest.allocation.device);
        let request = ReadRequest::new(ReadParams {
            span: ctx.files.stats().begin(Direction::Read, fd, Some(0), LEN),
            file: state,
            staging: Arc::clone(ctx.bounce.sync(dest.allocation.device)),
            dest,
            fd,
            offset: 0,
            len: LEN,
            order: None,
            p2p: Ok(()),
            dma: Ok(()),
            copy_threads: 1,
            readahead_limit: 0,
            is_absent: false,
            costs,
            ctx: Arc::clone(ctx),
        });
        let reason = Reason::BySetting;
        request.queue_segments(&[Segment { offset: 0, len: LEN, route: Route::Direct, reason, refused: None }]);
        Arc::new(request)
    }

    #[test]
    fn caller_is_woken_when_a_copy_takes_the_last_buffer_back() {
        let directory = tempfile::tempdir().unwrap();
        let (file, buffer) =
            (file::create_filled(&directory.path().join("file"), LEN), Buffer::new(emulated(""), LEN as usize));
        let runtime = Runtime::new(Settings::default());
        let request = request(&runtime, &file, &buffer);
        for _ in 0..2 {
            assert!(request.staging.begin_lending(request.file.storage, false));
            let mut queues = lock(&request.queues);
            queues.empty.push(request.staging.acquire().unwrap());
            queues.lent_out += 1;
        }
        request.wake_flag.store(false, Relaxed);
        request.staging.release(request.take_back().unwrap().0);
        assert!(!request.wake_flag.load(Relaxed), "another buffer is lent");
        request.staging.release(request.take_back().unwrap().0);
        assert!(lock(&request.queues).is_starved() && request.wake_flag.load(Relaxed));
    }

    #[test]
    fn thread_that_waits_for_a_share_is_woken_to_copy_what_was_filled() {
        let directory = tempfile::tempdir().unwrap();
        let (file, buffer) =
            (file::create_filled(&directory.path().join("file"), LEN), Buffer::new(emulated(""), LEN as usize));
        let kernel = FaultySyscalls::new();
        // Then the file system is none that is known to be local.
        kernel.inject_always(Call::FileSystem, Effect::Fail(Errno::NOSYS));
        let runtime =
            Runtime::with_kernel(Settings { bounce_limit: 2 * BUFFER_SIZE as u64, ..Settings::default() }, kernel);
        let request = request(&runtime, &file, &buffer);
        let (staging, storage) = (&request.staging, request.file.storage);
        // As a shadow worker that fills the only buffer of the share.
        let lend = || {
            assert!(staging.begin_lending(storage, false));
            lock(&request.queues).lent_out += 1;
            staging.acquire().unwrap()
        };
        let piece = Piece { offset: 0, len: 0, route: Route::Direct, reason: Reason::BySetting, assumed_cached: false };
        let fill = |buffer| {
            let filled = FilledBuffer { piece, buffer, skip: 0, len: 0, started: Instant::now() };
            request.apply(Outcome::Filled(filled));
        };
        let lent = lend();
        with_deadline("a thread that waits for a share", || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut worker = Worker::new(&request, Role::CopyWorker);
                    let (buffer, share) = worker.acquire_buffer().unwrap();
                    assert!(share.is_some() && !staging.can_lend(storage));
                    staging.release(buffer);
                });
                eventually("it waits", || lock(&request.queues).waiting_for_share == 1);
                fill(lent);
            });
        });
        assert!(staging.can_lend(storage) && lock(&request.queues).waiting_for_share == 0);
        // The same without a race against the end of its wait.
        let lent = lend();
        let refusal = staging.try_share(storage).err().expect("all of the share is lent");
        assert!(!staging.wait_for_share(refusal), "nothing has changed");
        lock(&request.queues).waiting_for_share = 1;
        fill(lent);
        assert!(staging.wait_for_share(refusal));
    }
}
