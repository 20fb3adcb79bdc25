//! Replicas of file pages in the memory of a GPU.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::{CStr, c_void};

use spinio_sys::cuda::Function;

use super::device::Cuda;
use crate::fingerprint::{Fingerprint, PAGE_BYTES};
use crate::{DeviceAddr, DeviceError, ErrorKind, GatherEntry, KernelCopy, Piece, ReplicaMemory, StreamId};

const PTX: &CStr = {
    const BYTES: &[u8] = concat!(include_str!("fingerprint.ptx"), "\0").as_bytes();
    match CStr::from_bytes_with_nul(BYTES) {
        Ok(text) => text,
        Err(_) => panic!("fingerprint.ptx contains a NUL"),
    }
};
const NAME: &CStr = c"spinio_fingerprint";

const PAGE: u64 = PAGE_BYTES as u64;

/// Threads per block, as bounded in fingerprint.cu; a warp takes a page.
const THREADS: u32 = 256;
/// The most blocks of one launch: several per multiprocessor of the largest GPU.
const MAX_BLOCKS: u64 = 2112;

impl Cuda {
    fn load_fingerprint_kernel(&self) -> Result<Function, DeviceError> {
        // SAFETY: SPIN's own PTX, which ends in NUL.
        let load = |driver: &spinio_sys::cuda::Driver| unsafe { driver.load_kernel(PTX.to_bytes_with_nul(), NAME) };
        self.fingerprint_kernel.load(self, "loading the fingerprint kernel", load)
    }

    /// Loads what works beside stops. The context must not be entered.
    pub(super) fn load_kernels_beside_stops(&self) -> Result<(), DeviceError> {
        self.load_fingerprint_kernel().and_then(|_| self.load_embedded_gather()).map(drop)
    }

    /// Enqueues the kernel. The context must be entered.
    ///
    /// # Safety
    /// There must be `count` pages at `addr`, and room for their fingerprints at `slot`, until the stream is synchronized.
    unsafe fn launch_fingerprints(
        &self,
        kernel: Function,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        slot: u64,
    ) -> Result<(), DeviceError> {
        let (mut pages, mut number, mut slots) = (addr.0, count as u64, slot);
        let blocks = number.div_ceil(u64::from(THREADS / 32)).clamp(1, MAX_BLOCKS) as u32;
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut pages).cast(), (&raw mut number).cast(), (&raw mut slots).cast()];
        // SAFETY: the GPU kernel belongs to this context, which is alive, as does the stream; it takes two addresses and
        // a number between them; the rest is guaranteed by the caller.
        unsafe { self.driver.launch(kernel, blocks, THREADS, Cuda::raw_stream(stream), &mut parameters) }
            .map_err(|e| self.driver_error("cuLaunchKernel", e))
    }
}

impl ReplicaMemory for Cuda {
    fn alloc_replica(&self, len: u64) -> Result<DeviceAddr, DeviceError> {
        if len == 0 || !len.is_multiple_of(PAGE) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "replica of a part of a page"));
        }
        // Now, while no kernel of the program runs that waits for a release.
        self.load_fingerprint_kernel()?;
        let no_memory = DeviceError::new(ErrorKind::NoMemory, "replica");
        let len = usize::try_from(len).map_err(|_| no_memory)?;
        let _entered = self.enter()?;
        let at = self.driver.alloc(len).map_err(|e| self.driver_error("cuMemAlloc", e))?;
        Ok(DeviceAddr(at))
    }

    fn free_replica(&self, addr: DeviceAddr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        // SAFETY: from `alloc_replica`, and the caller does not use it any more.
        unsafe { self.driver.free(addr.0) }.map_err(|e| self.driver_error("cuMemFree", e))
    }

    /// A launch and the copy of its result take about 10 us, in which the kernel scans 18 MB.
    fn scan_gap(&self) -> u64 {
        4096
    }

    unsafe fn fingerprint_pages(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        slots: DeviceAddr,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let kernel = self.load_fingerprint_kernel()?;
        let _entered = self.enter()?;
        // SAFETY: the pages and the slots are the caller's, and stay until the stream is synchronized.
        unsafe { self.launch_fingerprints(kernel, stream, addr, count, slots.0) }?;
        // SAFETY: as above; the caller has room for `count` fingerprints.
        unsafe { self.driver.copy_out(out.cast(), slots.0, count * size_of::<Fingerprint>(), Cuda::raw_stream(stream)) }
            .map_err(|e| self.driver_error("cuMemcpyDtoHAsync", e))
    }

    unsafe fn copy_beside_stops(&self, stream: StreamId, copy: KernelCopy) -> Result<(), DeviceError> {
        let host = crate::Device::device_ptr(self, copy.host)?;
        let (src, dst) = if copy.into_device { (host, copy.device.0) } else { (copy.device.0, host) };
        let mut count = 0;
        for at in (0..copy.len).step_by(KernelCopy::PIECE) {
            let len = (copy.len - at).min(KernelCopy::PIECE) as u64;
            // SAFETY: the list has room, and nothing else uses it.
            unsafe { copy.list.add(count).write(GatherEntry { src: src + at as u64, dst: dst + at as u64, len }) };
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        unsafe { crate::Device::gather(self, stream, copy.list, count) }
    }

    fn prepare_pieces(&self) -> Result<(), DeviceError> {
        self.load_embedded_gather().map(drop)
    }

    unsafe fn copy_pieces(
        &self,
        stream: StreamId,
        into_device: bool,
        pieces: &[Piece],
        list: *mut GatherEntry,
    ) -> Result<(), DeviceError> {
        // SAFETY: guaranteed by the caller.
        unsafe { Piece::list(self, into_device, pieces, list) }?;
        if pieces.is_empty() {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        unsafe { crate::Device::gather(self, stream, list, pieces.len()) }
    }

    unsafe fn fingerprint_pages_beside_stops(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let kernel = self.load_fingerprint_kernel()?;
        let slot = crate::Device::device_ptr(self, out.cast())?;
        let _entered = self.enter()?;
        // SAFETY: the pages are the caller's, as is `out`, which the device may store to.
        unsafe { self.launch_fingerprints(kernel, stream, addr, count, slot) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_ptx_matches_source() {
        const SOURCE: &str = include_str!("fingerprint.cu");
        let text = PTX.to_str().unwrap();
        assert!(text.contains(".entry spinio_fingerprint(") && text.contains(".target sm_75"));
        let source = format!("// Source: {:016x},", super::super::gather::hash(SOURCE.as_bytes()));
        assert!(
            text.contains(&source),
            "fingerprint.cu has changed: rebuild fingerprint.ptx as its first lines describe, with {source}"
        );
        assert!(SOURCE.contains("__launch_bounds__(256)") && THREADS == 256);
    }
}
