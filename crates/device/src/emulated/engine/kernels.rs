//! The threads of GPU kernels and of host functions.
//!
//! ```text
//!   hand_over ─┬ host function ──> one thread, as the driver's: one function after another
//!              └ kernel ─────────> an idle thread, else a new one, else the first that becomes idle
//! ```
//!
//! A kernel may wait for another one, so a runnable kernel never waits for a thread while fewer than [`MAX_KERNELS`] run.
//! The engine's thread must not wait for the start of a thread: the first kernel thread starts the others.

#![expect(unsafe_code, reason = "calls of functions of the program")]

use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

use spinio_sys::linux::FdTableRoot;

use super::streams::EngineState;
use super::{Engine, Kernel, Result};
use crate::emulated::memory::Memory;

/// The most kernels at a time, as on CUDA devices.
const MAX_KERNELS: usize = 128;

impl Engine {
    /// Starts a kernel or host function that may run.
    pub(super) fn hand_over(&self, state: &mut EngineState, stream: usize, kernel: Kernel) {
        if kernel.maps_memory {
            state.kernels.push_back((stream, kernel));
            self.kernel_work.notify_all();
        } else {
            state.host_functions.push_back((stream, kernel));
            self.host_work.notify_one();
        }
    }

    /// The thread of host functions.
    pub(in crate::emulated) fn run_host_functions(&self) -> ! {
        let mut state = self.state();
        loop {
            let Some((at, kernel)) = state.host_functions.pop_front() else {
                state = self.host_work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            // SAFETY: the caller that launched it guarantees the function and its argument until it is done.
            unsafe { (kernel.function)(kernel.argument as *mut c_void) };
            state = self.state();
            self.end(&mut state, at, Ok(()));
        }
    }

    /// A thread that starts threads for GPU kernels.
    pub(in crate::emulated) fn start_kernel_threads(
        engine: &Arc<Engine>,
        memory: &Arc<Memory>,
        root: &FdTableRoot,
    ) -> ! {
        let mut state = engine.state();
        loop {
            if state.kernels.len() <= state.idle_kernel_threads || state.kernel_threads == MAX_KERNELS {
                state = engine.kernel_work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.kernel_threads += 1;
            state.idle_kernel_threads += 1;
            drop(state);
            let (engine_ref, memory_ref) = (Arc::clone(engine), Arc::clone(memory));
            let started = root.spawn("spinio-emu-kern", move || engine_ref.run_kernels(&memory_ref));
            state = engine.state();
            if !started {
                state.kernel_threads -= 1;
                state.idle_kernel_threads -= 1;
                // Those that exist run it later; without any it is tried again.
                let (lock, _) = engine
                    .kernel_work
                    .wait_timeout(state, std::time::Duration::from_millis(10))
                    .unwrap_or_else(PoisonError::into_inner);
                state = lock;
            }
        }
    }

    /// A thread of GPU kernels, which counts as idle already. The CPU can access the memory while a kernel runs.
    fn run_kernels(&self, memory: &Memory) -> ! {
        let mut state = self.state();
        loop {
            let Some((at, kernel)) = state.kernels.pop_front() else {
                state = self.kernel_work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.idle_kernel_threads -= 1;
            drop(state);
            let outcome = memory.grant_cpu_access().map(|open| {
                // SAFETY: the caller that launched it guarantees the function and its argument until it is done.
                unsafe { (kernel.function)(kernel.argument as *mut c_void) };
                drop(open);
            });
            state = self.state();
            state.idle_kernel_threads += 1;
            self.end(&mut state, at, outcome);
        }
    }

    /// The kernel or function at the head of a stream has ended.
    fn end(&self, state: &mut EngineState, stream: usize, outcome: Result<()>) {
        let queue = &mut state.streams[stream];
        queue.running = None;
        queue.done += 1;
        if let Err(error) = outcome {
            queue.failed.get_or_insert((queue.done, error));
        }
        self.progress.notify_all();
        self.work.notify_one();
    }
}
