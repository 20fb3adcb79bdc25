//! The Rust half of the Python module `spinio`: finding the memory of an object, and the data path.
//!
//! ```text
//!   File.pread(array, offset)                     python/spinio/_file.py: an io.FileIO
//!        │
//!   buffer.rs   the memory of `array`             tensor.rs     torch.Tensor
//!        │      address, bytes, writable,         interface.rs  __cuda_array_interface__, __array_interface__
//!        │      the stream it belongs to          dlpack.rs     __dlpack__
//!        │                                        pybuffer.rs   bytearray, memoryview, NumPy (view.rs)
//!        │                                        described.rs  what each of them returns
//!        ▼
//!   transfer.rs ── host memory ──> the kernel's own call
//!   many.rs    └── a device's ──> spinio_runtime::client   both without the GIL
//!   pinned.rs     pinned files
//!   nvmmu.rs      sessions of NVMMU
//!   gaia.rs       maps of files in device memory
//!   net.rs        sockets of kernels
//! ```
//!
//! **Order on the device.** A small read is only queued when it returns, so it must be queued on the stream of the
//! program's next work on that array. That is the current stream of the framework that the array comes from: PyTorch is
//! queried for it, the CUDA array interface has it, and so does the C table of DLPack. An object that gives no stream
//! is read on the legacy default stream, and the call waits until the bytes have arrived. `set_stream` overrides this.
//!
//! **Lifetimes.** During a transfer the object is kept alive: by a buffer view, a DLPack tensor or a reference. As in
//! every framework, resizing the storage in another thread meanwhile is not prevented.
//!
//! **Signals.** Python runs signal handlers only when it is called to check for them. `signals.rs` does that a few
//! times per second, so Ctrl-C ends a long transfer of device memory.
//!
//! Known flaws: a write that is a single system call (128 MiB, `SPINIO_BOUNCE_LIMIT`; host memory 2 GiB) sees Ctrl-C
//! when it is complete.
//!
//! **One runtime.** If `libspinio.so` is already loaded, its registry, pools and counters are used, and those that are
//! linked into this module stay unused; see `spinio_runtime`. With an older library there are two runtimes.

mod buffer;
mod described;
mod device_memory;
mod dlpack;
mod emulated;
mod failure;
mod gaia;
mod header;
mod interface;
mod many;
mod net;
mod nvmmu;
mod pinned;
mod pybuffer;
mod safetensors;
mod signals;
mod stats;
mod stream;
mod tensor;
mod transfer;
mod view;

/// The base of `python/spinio`; not for users.
#[pyo3::pymodule]
mod _spinio {
    #[pymodule_export]
    use crate::emulated::{Memory, Stream, configure, pause, resume};
    #[pymodule_export]
    use crate::gaia::GaiaMap;
    #[pymodule_export]
    use crate::header::{SafetensorsError, header_len, parse};
    #[pymodule_export]
    use crate::many::read_many;
    #[pymodule_export]
    use crate::net::Net;
    #[pymodule_export]
    use crate::nvmmu::{AsyncMove, Moves};
    #[pymodule_export]
    use crate::pinned::{DeviceMapping, is_pinned, pin_file, unpin_file};
    #[pymodule_export]
    use crate::stats::stats;
    #[pymodule_export]
    use crate::stream::{set_stream, stream};
    #[pymodule_export]
    use crate::transfer::{describe, read, read_full, write, write_full};

    #[pymodule_init]
    fn init(_module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        crate::buffer::record_pid();
        spinio_runtime::client::table();
        Ok(())
    }

    /// The version of the crate.
    #[expect(non_upper_case_globals, reason = "it is an attribute of a Python module")]
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
