//! A thread with an unshared fd table that runs closures for callers, which wait for the result.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::sync::mpsc;

use spinio_sys::linux::FdTableRoot;

use crate::{DeviceError, ErrorKind};

type Job = Box<dyn FnOnce() + Send>;

/// The thread. Descriptors opened in its closures are in its own fd table.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: mpsc::Sender<Job>,
}

const WORKER_FAILED: DeviceError = DeviceError::new(ErrorKind::Driver, "worker thread of the emulated device");

impl Worker {
    pub(super) fn start(root: &FdTableRoot, name: &str) -> Result<Worker, DeviceError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let started = root.spawn(name, move || queue.into_iter().for_each(|job| job()));
        if started { Ok(Worker { jobs }) } else { Err(WORKER_FAILED) }
    }

    /// Runs a closure there and waits for its result.
    pub(super) fn run_blocking<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T, DeviceError> {
        let (answer, result) = mpsc::channel();
        let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
            let _ = answer.send(job());
        });
        // SAFETY: only the lifetime changes. The borrows of the closure outlive it, since this call returns only once
        // the closure has run or was dropped unrun: either way its sender is dropped, which ends the wait.
        let job = unsafe { core::mem::transmute::<Box<dyn FnOnce() + Send + '_>, Job>(job) };
        self.jobs.send(job).map_err(|_| WORKER_FAILED)?;
        result.recv().map_err(|_| WORKER_FAILED)
    }
}
