//! The DMA engine: one thread that runs the copies of all streams, one more for host functions, and a thread for each
//! GPU kernel that runs.
//!
//! ```text
//!   stream 0  [c][k][c]───┐  waits for the program's streams, and they for it
//!   program   [c]         ├──> the oldest that may run ─┬ copy ─────────> engine ──────────> done
//!   internal  [c][follow] ┘  waits only for the         ├ host function > one thread ──────> done
//!                            fences it follows          └ kernel ───────> its own thread ──> done
//! ```
//!
//! A stream is a counter of enqueued and a counter of finished work, so a position in it is a number, and it is reached
//! once the second counter gets there (`streams.rs`). Source bytes are read when the copy runs, never when it is
//! enqueued: a buffer that is reused too early transfers the wrong bytes, as on a GPU.
//!
//! Time: a copy begins `latency` after it was enqueued or when the one before it ends, whichever is later, and ends
//! bytes / bandwidth after that; the next copy makes up for oversleeping.
//!
//! Kernels of different streams run side by side, as on a GPU: one may wait for another, for a copy on another stream, or
//! for the program. Their threads are started as they are needed, and stay. The kernel's own blocks run on threads of
//! the program (`device/include/spinio/emulation/grid.h`).
//!
//! A stop occupies its stream only, none of the threads: what ends it may copy and scan on other streams.
//!
//! Known flaws: a GPU copies in both directions at once, this engine does not; a copy longer than its bandwidth
//! allows happens at its beginning, not evenly over its time. At most [`MAX_KERNELS`] kernels run at a time.
//! A copy between two devices occupies the engine of its stream's device only.

#![expect(unsafe_code, reason = "driver calls and device memory")]

mod kernels;
mod streams;

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::streams::{Command, EngineState, Mark, Role, StreamState};
use super::config::Config;
use super::gather;
use super::memory::Memory;
use super::pins::Pins;
use crate::wait;
use crate::{DeviceError, ErrorKind};

type Result<T> = core::result::Result<T, DeviceError>;

/// The limit of internal streams.
const MAX_STREAMS: usize = 64;
/// The limit of fences.
const MAX_FENCES: usize = 4096;
/// Below this, waiting is spinning: a sleep would overshoot.
const SPIN_LIMIT: Duration = Duration::from_micros(120);

/// The kind of a command. Addresses, since the engine's thread owns none of the memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// From memory to memory.
    Bytes { dst: u64, src: u64, len: usize },
    /// From the memory of one device to that of another.
    Peer { dst: u64, src: u64, len: usize },
    /// From a pin.
    Pinned { dst: u64, pin: u64, offset: usize, len: usize },
    /// Entry by entry, from a list that is read when the command runs.
    Gather { list: u64, count: usize },
    /// A GPU kernel.
    Kernel(Kernel),
    /// A stop: its [`Stop`], boxed.
    Stop(u64),
}

/// What is called when a stream has come to a stop, with the number of the stream. It must not wait.
pub(super) type Stop = Box<dyn FnOnce(usize) + Send>;

/// A host function, called in stream order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) function: unsafe extern "C" fn(*mut c_void),
    pub(super) argument: u64,
    /// Whether the CPU may load and store in the device's memory meanwhile.
    pub(super) maps_memory: bool,
}

impl Operation {
    fn len(self) -> usize {
        match self {
            Operation::Bytes { len, .. } | Operation::Peer { len, .. } | Operation::Pinned { len, .. } => len,
            // SAFETY: the caller that enqueued the gather keeps the list until it is done.
            Operation::Gather { list, count } => unsafe { gather::total_bytes(list, count) },
            Operation::Kernel(_) | Operation::Stop(_) => 0,
        }
    }
}

/// The streams and the state that the engine's thread shares with all callers.
#[derive(Debug)]
pub(super) struct Engine {
    config: Config,
    state: Mutex<EngineState>,
    work: Condvar,
    kernel_work: Condvar,
    host_work: Condvar,
    progress: Condvar,
    /// The memory of other devices that this one's kernels access.
    peers: Mutex<Vec<Arc<Memory>>>,
}

impl Engine {
    pub(super) fn new(config: Config, ordinal: u32) -> Engine {
        let new = Condvar::new;
        let (state, peers) = (Mutex::new(EngineState::new(ordinal)), Mutex::default());
        Engine { config, state, work: new(), kernel_work: new(), host_work: new(), progress: new(), peers }
    }

    /// Kernels that start from now on may access the memory of another device; false: they may already.
    pub(super) fn add_peer(&self, memory: &Arc<Memory>) -> bool {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = !peers.iter().any(|peer| Arc::ptr_eq(peer, memory));
        if is_new {
            peers.push(Arc::clone(memory));
        }
        is_new
    }

    /// A stream of the program, ordered with stream 0; it is never released.
    pub(super) fn new_app_stream(&self) -> u64 {
        let mut state = self.state();
        let at = state.open(Role::App);
        state.number_of(at)
    }

    /// A stream of the program that is ordered with no other; it is never released.
    pub(super) fn new_unordered_stream(&self) -> u64 {
        let mut state = self.state();
        let at = state.open(Role::AppUnordered);
        state.number_of(at)
    }

    /// A stream that is ordered with no other.
    pub(super) fn acquire_stream(&self) -> Result<u64> {
        let mut state = self.state();
        if state.streams_in_use() == MAX_STREAMS {
            return Err(DeviceError::new(ErrorKind::NoMemory, "acquiring a stream"));
        }
        let at = state.open(Role::Internal);
        Ok(state.number_of(at))
    }

    /// Releases an internal stream or one of the program. Work on it still runs.
    pub(super) fn release_stream(&self, stream: u64) {
        let mut state = self.state();
        let at = state.index_of(stream).ok();
        let queue = at.map(|at| &mut state.streams[at]).filter(|q| matches!(q.role, Role::Internal | Role::App));
        debug_assert!(queue.is_some(), "a stream was released that is not acquired");
        if let Some(queue) = queue {
            queue.role = Role::Idle;
        }
    }

    /// Enqueues a copy.
    pub(super) fn submit(&self, stream: u64, copy: Operation) -> Result<()> {
        self.push(stream, Some(copy), Vec::new())
    }

    /// Enqueues a stop, which [`Engine::go_on`] ends.
    pub(super) fn submit_stop(&self, stream: u64, stop: Stop) -> Result<()> {
        let stop = Box::into_raw(Box::new(stop));
        self.submit(stream, Operation::Stop(stop as u64)).inspect_err(|_| {
            // SAFETY: made above, and not enqueued.
            drop(unsafe { Box::from_raw(stop) });
        })
    }

    /// Ends the stop at which a stream is.
    pub(super) fn go_on(&self, stream: usize) {
        let mut state = self.state();
        let queue = &mut state.streams[stream];
        debug_assert!(queue.stopped, "the stream is not stopped");
        queue.stopped = false;
        queue.running = None;
        queue.done += 1;
        drop(state);
        self.progress.notify_all();
        self.work.notify_one();
    }

    /// Work enqueued from now on waits for the mark.
    pub(super) fn wait_mark(&self, stream: u64, mark: Mark) -> Result<()> {
        self.push(stream, None, vec![mark])
    }

    fn push(&self, stream: u64, copy: Option<Operation>, mut after: Vec<Mark>) -> Result<()> {
        let mut state = self.state();
        let at = state.index_of(stream)?;
        let waits_for = match state.streams[at].role {
            Role::Default => Some(Role::App),
            Role::App => Some(Role::Default),
            _ => None,
        };
        let others = state.streams.iter().enumerate().filter(|(_, q)| Some(q.role) == waits_for && q.done < q.queued);
        after.extend(others.map(|(queue, q)| Mark { stream: queue, seq: q.queued }));
        state.order += 1;
        let order = state.order;
        let latency = if copy.is_some() { self.config.latency } else { Duration::ZERO };
        let queue = &mut state.streams[at];
        queue.queued += 1;
        queue.pending.push_back(Command { order, not_before: Instant::now() + latency, after, copy });
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// The present end of a stream.
    pub(super) fn mark(&self, stream: u64) -> Result<Mark> {
        let state = self.state();
        let queue = state.index_of(stream)?;
        Ok(Mark { stream: queue, seq: state.streams[queue].queued })
    }

    /// A fence at the present end of a stream.
    pub(super) fn fence(&self, stream: u64) -> Result<u64> {
        let mark = self.mark(stream)?;
        let mut state = self.state();
        let at = match state.fences.iter().position(Option::is_none) {
            Some(at) => at,
            None if state.fences.len() < MAX_FENCES => {
                state.fences.push(None);
                state.fences.len() - 1
            }
            None => return Err(DeviceError::new(ErrorKind::NoMemory, "fence")),
        };
        state.fences[at] = Some(mark);
        state.fences_in_use += 1;
        Ok(at as u64)
    }

    /// The position of a fence.
    pub(super) fn fence_mark(&self, fence: u64) -> Result<Mark> {
        let unknown = DeviceError::new(ErrorKind::BadAddress, "fence");
        self.state().fences.get(fence as usize).copied().flatten().ok_or(unknown)
    }

    /// Releases a fence.
    pub(super) fn release_fence(&self, fence: u64) {
        let mut state = self.state();
        let mark = state.fences.get_mut(fence as usize).and_then(Option::take);
        debug_assert!(mark.is_some(), "a fence was released twice");
        state.fences_in_use -= usize::from(mark.is_some());
    }

    /// Whether a mark is reached, and whether work before it failed.
    pub(super) fn query(&self, mark: Mark) -> Result<bool> {
        let mut state = self.state();
        if state.reached(mark) { state.take_error(mark).map(|()| true) } else { Ok(false) }
    }

    /// Waits for a mark.
    pub(super) fn wait(&self, mark: Mark) -> Result<()> {
        let mut state = self.state();
        while !state.reached(mark) {
            state = wait::sleep(&self.progress, state);
        }
        state.take_error(mark)
    }

    /// Waits for all work enqueued so far, failed or not.
    pub(super) fn synchronize_all(&self) {
        let mut state = self.state();
        let order = state.order;
        let earlier = |q: &StreamState| {
            q.running.is_some_and(|o| o <= order) || q.pending.front().is_some_and(|c| c.order <= order)
        };
        while state.busy || state.streams.iter().any(earlier) {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No copy and no GPU kernel starts any more; the running one has ended when this returns. A stop may go on.
    pub(super) fn pause(&self) {
        let mut state = self.state();
        state.pauses += 1;
        while state.busy || state.streams.iter().any(|q| q.running.is_some() && !q.stopped) {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Undoes one [`Engine::pause`].
    pub(super) fn resume(&self) {
        let mut state = self.state();
        debug_assert!(state.pauses > 0, "resume without pause");
        state.pauses = state.pauses.saturating_sub(1);
        drop(state);
        self.work.notify_all();
    }

    /// Acquired streams and fences.
    pub(super) fn in_use(&self) -> (usize, usize) {
        let state = self.state();
        (state.streams_in_use(), state.fences_in_use)
    }

    /// The thread that copies; its fd table is that of the pins.
    pub(super) fn run(&self, memory: &Memory, pins: &Pins) -> ! {
        // The end of the last copy by the engine's own clock.
        let mut clock = Instant::now();
        let mut state = self.state();
        loop {
            let Some(at) = state.next_ready() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(command) = state.streams[at].pending.pop_front() else { continue };
            if let Some(Operation::Kernel(kernel)) = command.copy {
                state.streams[at].running = Some(command.order);
                self.hand_over(&mut state, at, kernel);
                continue;
            }
            if let Some(Operation::Stop(stop)) = command.copy {
                state.streams[at].running = Some(command.order);
                state.streams[at].stopped = true;
                drop(state);
                // SAFETY: from `submit_stop`, and taken out of the queue once.
                let stop = unsafe { Box::from_raw(stop as *mut Stop) };
                stop(at);
                state = self.state();
                continue;
            }
            let mut outcome = Ok(());
            if let Some(copy) = command.copy {
                state.busy = true;
                drop(state);
                let begin = clock.max(command.not_before);
                sleep_until(begin);
                let len = copy.len();
                // SAFETY: the caller that enqueued the copy guarantees its memory until it is done.
                outcome = unsafe { execute(copy, memory, pins) };
                clock = begin
                    + match copy {
                        Operation::Peer { .. } => self.config.peer_transfer(len),
                        _ => self.config.transfer(len),
                    };
                sleep_until(clock);
                state = self.state();
                state.busy = false;
            }
            let queue = &mut state.streams[at];
            queue.done += 1;
            if let Err(error) = outcome {
                queue.failed.get_or_insert((queue.done, error));
            }
            self.progress.notify_all();
        }
    }

    fn state(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sleeps, then spins for the last part.
fn sleep_until(when: Instant) {
    loop {
        let remaining = when.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return;
        }
        if remaining > SPIN_LIMIT {
            std::thread::sleep(remaining - SPIN_LIMIT / 2);
        } else {
            std::thread::yield_now();
        }
    }
}

/// # Safety
/// The addresses of the copy must be valid until this returns.
unsafe fn execute(copy: Operation, memory: &Memory, pins: &Pins) -> Result<()> {
    match copy {
        Operation::Bytes { dst, src, len } | Operation::Peer { dst, src, len } => {
            // SAFETY: guaranteed by the caller.
            unsafe { copy_bytes(dst, src, len) };
            Ok(())
        }
        // SAFETY: guaranteed by the caller.
        Operation::Gather { list, count } => unsafe { gather::run_gather(list, count, memory, pins) },
        Operation::Kernel(_) | Operation::Stop(_) => {
            Err(DeviceError::new(ErrorKind::Unsupported, "kernel on the copying thread"))
        }
        // SAFETY: guaranteed by the caller.
        Operation::Pinned { dst, pin, offset, len } => unsafe { pins.read(pin, offset, dst as *mut u8, len) },
    }
}

/// One instruction, not a Rust copy, since other threads and processes may change the source meanwhile.
///
/// # Safety
/// Both must be valid for `len` bytes until this returns.
pub(super) unsafe fn copy_bytes(dst: u64, src: u64, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rdi") dst => _,
            inout("rsi") src => _,
            inout("rcx") len => _,
            options(nostack, preserves_flags),
        );
    }
}
