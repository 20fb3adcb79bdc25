//! The gather kernel: the source of its code, and its launch.
//!
//! ```text
//!   cached by an earlier process ── no ──> NVRTC, if available: compiled for this GPU, and cached
//!        │                                    │ no
//!        │                                 gather.ptx: the driver translates it
//!        ▼                                    ▼
//!   a module of this context ── once per context; destroyed with it
//! ```
//!
//! A cache entry is identified by the source, the GPU's architecture and the compiler's version, so nothing outdated is
//! ever loaded; an entry that does not load is compiled again. Launches go to internal streams, so no capture of the
//! program is invalidated.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::{CStr, CString, c_void};
use std::sync::mpsc;

use spinio_sys::cuda::{Compiler, CuError, Function, attribute};
use spinio_sys::linux::spawn_signals_blocked;

use super::device::Cuda;
use crate::{DeviceError, KernelStore, StreamId};

const SOURCE: &str = include_str!("gather.cu");
const PTX: &CStr = {
    const BYTES: &[u8] = concat!(include_str!("gather.ptx"), "\0").as_bytes();
    match CStr::from_bytes_with_nul(BYTES) {
        Ok(text) => text,
        Err(_) => panic!("gather.ptx contains a NUL"),
    }
};
const NAME: &CStr = c"spinio_gather";

/// Threads per block, as bounded in gather.cu, and fragments that one of its warps takes at a time.
const THREADS: u32 = 256;
const ENTRIES_PER_WARP: usize = 8;

/// The most blocks of one launch: several per multiprocessor of the largest GPU.
const MAX_BLOCKS: usize = 1056;

/// Stack size of the compiler's thread.
const COMPILER_STACK: usize = 16 << 20;

impl Cuda {
    /// The GPU kernel, loaded now if necessary.
    pub(super) fn load_or_compile(&self, store: &dyn KernelStore) -> Result<Function, DeviceError> {
        self.gather_kernel.load(self, "loading the gather kernel", |_| self.load(store))
    }

    fn load(&self, store: &dyn KernelStore) -> Result<Function, CuError> {
        let driver = self.driver;
        let architecture = |which| driver.device_attribute(self.ordinal, which);
        let (major, minor) =
            (architecture(attribute::COMPUTE_CAPABILITY_MAJOR)?, architecture(attribute::COMPUTE_CAPABILITY_MINOR)?);
        let architecture = format!("sm_{major}{minor}");
        // SAFETY: the image is either complete output of a compiler or SPIN's own PTX; a damaged cubin is caught by the
        // driver's own checks, and before it by SPIN's checksum.
        let load = |code: &[u8]| unsafe { driver.load_kernel(code, NAME) };
        if let Ok(compiler) = Compiler::open() {
            let (a, b) = compiler.version();
            let name = format!("gather-{:016x}-{architecture}-nvrtc{a}.{b}.cubin", hash(SOURCE.as_bytes()));
            let kept = store.load(&name).and_then(|kept| verify_checksum(&kept).map(<[u8]>::to_vec));
            if let Some(kept) = kept
                && let Ok(kernel) = load(&kept)
            {
                return Ok(kernel);
            }
            if let Some(made) = compile(compiler, &architecture)
                && let Ok(kernel) = load(&made)
            {
                store.store(&name, &with_checksum(&made));
                return Ok(kernel);
            }
        }
        load(PTX.to_bytes_with_nul())
    }

    /// The GPU kernel, loaded now if necessary, as it was compiled with this library.
    pub(super) fn load_embedded_gather(&self) -> Result<Function, DeviceError> {
        // SAFETY: SPIN's own PTX.
        let load = |driver: &spinio_sys::cuda::Driver| unsafe { driver.load_kernel(PTX.to_bytes_with_nul(), NAME) };
        self.gather_kernel.load(self, "loading the gather kernel", load)
    }

    /// Enqueues the GPU kernel. The context must be entered.
    ///
    /// # Safety
    /// As [`crate::Device::gather`]; `list` as the device sees it.
    pub(super) unsafe fn launch_gather(&self, stream: StreamId, list: u64, count: usize) -> Result<(), DeviceError> {
        let kernel = self.gather_kernel.get("gather: not prepared")?;
        let (mut list, mut pieces) = (list, u32::try_from(count).unwrap_or(u32::MAX));
        let warps = count.div_ceil(ENTRIES_PER_WARP);
        let blocks = warps.div_ceil((THREADS / 32) as usize).clamp(1, MAX_BLOCKS) as u32;
        let mut parameters: [*mut c_void; 2] = [(&raw mut list).cast(), (&raw mut pieces).cast()];
        // SAFETY: the GPU kernel belongs to this context, which is alive, as does the stream; it takes an address and a
        // number; the caller guarantees what it reads and writes.
        unsafe { self.driver.launch(kernel, blocks, THREADS, Cuda::raw_stream(stream), &mut parameters) }
            .map_err(|e| self.driver_error("cuLaunchKernel", e))
    }
}

/// On a thread with enough stack for a compiler.
fn compile(compiler: Compiler, architecture: &str) -> Option<Vec<u8>> {
    let source = CString::new(SOURCE).ok()?;
    let architecture = architecture.to_owned();
    let (answer, made) = mpsc::channel();
    let spawned = spawn_signals_blocked("spinio-nvrtc", COMPILER_STACK, move || {
        let _ = answer.send(compiler.compile(&source, &architecture).ok());
    });
    spawned.ok()?;
    made.recv().ok()?
}

/// FNV-1a.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

fn with_checksum(code: &[u8]) -> Vec<u8> {
    [&hash(code).to_le_bytes(), code].concat()
}

/// The code in a cache file, if its checksum matches.
fn verify_checksum(cached: &[u8]) -> Option<&[u8]> {
    let (sum, code) = cached.split_at_checked(8)?;
    (sum == hash(code).to_le_bytes() && !code.is_empty()).then_some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_code_with_bad_checksum_is_refused() {
        let kept = with_checksum(b"cubin");
        assert_eq!(verify_checksum(&kept), Some(&b"cubin"[..]));
        for damage in [&kept[..12], &kept[..8], &kept[..3], &[]] {
            assert_eq!(verify_checksum(damage), None);
        }
        let mut flipped = kept.clone();
        flipped[9] ^= 1;
        assert_eq!(verify_checksum(&flipped), None);
    }

    #[test]
    fn nvrtc_compiles_kernel_source() {
        let compiler = match Compiler::open() {
            Ok(compiler) => compiler,
            Err(e) => return eprintln!("skipped: {e}"),
        };
        let code = compile(compiler, "sm_90").expect("machine code");
        assert!(code.starts_with(b"\x7fELF") && code.len() > 1000);
    }

    #[test]
    fn embedded_ptx_matches_source() {
        let text = PTX.to_str().unwrap();
        assert!(text.contains(".entry spinio_gather(") && text.contains(".target sm_75"));
        let source = format!("// Source: {:016x},", hash(SOURCE.as_bytes()));
        assert!(
            text.contains(&source),
            "gather.cu has changed: rebuild gather.ptx as its first lines describe, with {source}"
        );
        assert!(SOURCE.contains("__launch_bounds__(256)") && THREADS == 256);
        assert!(SOURCE.contains(&format!("#define PIECES {ENTRIES_PER_WARP}u")));
    }
}
