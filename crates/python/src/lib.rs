//! The Python module `spinio`, its Rust half: whose memory is it, and the data path.
//!
//! ```text
//!   File.pread(array, offset)                     python/spinio/_file.py: an io.FileIO
//!        │
//!   buffer.rs   what memory does `array` mean?    tensor.rs     torch.Tensor
//!        │      address, bytes, writable,         interface.rs  __cuda_array_interface__, __array_interface__
//!        │      the stream it belongs to          dlpack.rs     __dlpack__
//!        │                                        pybuffer.rs   bytearray, memoryview, NumPy
//!        ▼
//!   transfer.rs ── host memory ──> the kernel's own call
//!   many.rs    └── a device's ──> spinio_runtime::client   both without the GIL
//!   hold.rs       files that stay registered
//!   nvmmu.rs      sessions of NVMMU
//! ```
//!
//! **Order on the device.** A small read is only queued when it returns, so it must be queued where the program's next
//! work on that array goes. That is the current stream of the framework which the array comes from, and the read is put
//! there: PyTorch is asked for it, the CUDA array interface names it, and so does the C table of DLPack. An object that
//! names no stream is read on the legacy default stream, and the call waits for the arrival. `set_stream` overrides.
//!
//! **Lifetimes.** While bytes move, the object is kept: a buffer view, a DLPack tensor or a reference. What it does not
//! protect against is what no framework does: to resize the storage in another thread meanwhile.
//!
//! **Signals.** Python runs their handlers where it is asked to, and `signals.rs` asks, a few times a second: so Ctrl-C ends
//! a long transfer of device memory.
//!
//! Known flaws: a write that is one call of the kernel (128 MiB, `SPINIO_BOUNCE_LIMIT`; host memory 2 GiB) sees Ctrl-C when it
//! is done.
//!
//! **One runtime.** Where `libspinio.so` is loaded already, its registry, pools and counters are used, and the ones that are
//! linked into this module stay asleep; `spinio_runtime` says how and when. Beside an older library there are two.

mod buffer;
mod dlpack;
mod emulated;
mod failure;
mod header;
mod hold;
mod interface;
mod many;
mod nvmmu;
mod pybuffer;
mod safetensors;
mod signals;
mod stats;
mod stream;
mod tensor;
mod transfer;

/// What `python/spinio` is built on; nothing here is for users.
#[pyo3::pymodule]
mod _spinio {
    #[pymodule_export]
    use crate::emulated::{Memory, Stream, configure, held, let_go};
    #[pymodule_export]
    use crate::header::{SafetensorsError, header_len, parse};
    #[pymodule_export]
    use crate::hold::{Mapped, hold, is_held, release};
    #[pymodule_export]
    use crate::many::read_many;
    #[pymodule_export]
    use crate::nvmmu::{Moves, OnItsWay};
    #[pymodule_export]
    use crate::stats::stats;
    #[pymodule_export]
    use crate::stream::{set_stream, stream};
    #[pymodule_export]
    use crate::transfer::{describe, read, write};

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
