//! The device of a net for which the program names none.
//!
//! ```text
//!   a CUDA context is current on this thread, or an emulated GPU in use ──────────> that one
//!   SPINIO_EMULATED is set, or this process has no GPU ───────────────────────────> the emulated GPU
//!   there is a GPU: the program's kernels will run there, and not on an emulated one ──> ENODEV
//! ```
//!
//! Whether there is a GPU only the driver says (CUDA_VISIBLE_DEVICES may hide it), so it is loaded and initialised for the
//! question, as the program's first call of CUDA does; no context is made. A program whose context is current, or that has named a device,
//! does not come here.

use spinio_device::cuda::standalone::{self, GpuError};
use spinio_device::{Device, registry};
use spinio_host::settings::Settings;
use spinio_sys::Errno;
use spinio_sys::cuda::CuError;

use crate::{Error, Result};

/// The device in use; none: the emulated GPU. ENODEV: there is a GPU, and no context of it is current on this thread.
pub fn default_device() -> Result<Option<&'static dyn Device>> {
    let device = registry::current_device();
    if device.is_none() && Settings::of_process().emulated.is_none() && has_gpu() {
        let sentence = "There is a GPU, but no CUDA context is current on this thread: make one before, with cudaFree(0). For the \
                        emulated GPU name the device \"emulated\", or set SPINIO_EMULATED";
        return Err(Error::new(Errno::NODEV, sentence));
    }
    Ok(device)
}

fn has_gpu() -> bool {
    match standalone::count() {
        Ok(count) => count > 0,
        // A child of fork, whose parent uses the GPU.
        Err(GpuError::Driver(_, CuError::NOT_INITIALIZED)) => true,
        Err(_) => false,
    }
}
