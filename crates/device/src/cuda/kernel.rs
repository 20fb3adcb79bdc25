//! A GPU kernel of a context: loaded once, at its first use.
//!
//! Loading runs in relaxed capture mode, so no capture of the program is invalidated.
//!
//! Known flaw: with lazy loading the driver may wait for running GPU kernels at the first load.

use std::sync::{Mutex, OnceLock, PoisonError};

use spinio_sys::cuda::{CuError, Driver, Function};

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::{DeviceError, ErrorKind};

/// The kernel, after its first use.
#[derive(Debug, Default)]
pub(super) struct LazyKernel {
    loaded: OnceLock<Result<Function, CuError>>,
    loading: Mutex<()>,
}

impl LazyKernel {
    /// Whether it is loaded.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.loaded.get(), Some(Ok(_)))
    }

    /// Whether it could not be loaded.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.loaded.get(), Some(Err(_)))
    }

    /// The kernel, if it is loaded.
    pub(super) fn get(&self, operation: &'static str) -> Result<Function, DeviceError> {
        match self.loaded.get() {
            Some(Ok(kernel)) => Ok(*kernel),
            _ => Err(DeviceError::new(ErrorKind::Unsupported, operation)),
        }
    }

    /// The kernel, loaded now if necessary.
    pub(super) fn load(
        &self,
        cuda: &Cuda,
        operation: &'static str,
        load: impl FnOnce(&'static Driver) -> Result<Function, CuError>,
    ) -> Result<Function, DeviceError> {
        let failed = |e| cuda.driver_error(operation, e);
        if let Some(known) = self.loaded.get() {
            return known.map_err(failed);
        }
        // By one thread; concurrent callers wait only if they need the kernel at once too.
        let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = self.loaded.get() {
            return known.map_err(failed);
        }
        let _entered = cuda.enter()?;
        let _relaxed = RelaxedCapture::enter(cuda.driver);
        let made = load(cuda.driver);
        // A destroyed context does not count against the code.
        if !made.is_err_and(CuError::is_context_lost) {
            let _ = self.loaded.set(made);
        }
        made.map_err(failed)
    }
}
