//! Device memory in chunks, which are mapped side by side in a range of addresses: those that several processes map,
//! named by a descriptor, and private ones.
//!
//! ```text
//!   process A   create_chunk ──> chunk ──> descriptor ── SCM_RIGHTS ──> process B   import_chunk ──> chunk
//!                                  │                                                                  │
//!               reserve ── map_chunk(address)                             reserve ── map_chunk(address, read-only)
//! ```
//!
//! A reservation is a range of addresses without memory; chunks are mapped side by side in it, so that a kernel sees one
//! contiguous range. The memory of a chunk lives as long as any process has it mapped, a handle of it, or its descriptor,
//! also a process that uses no device. A private chunk has no handle: its memory is freed when it is unmapped.
//!
//! On CUDA these are the functions of virtual memory management (cuMemCreate and what follows it); a chunk of the
//! emulated device is a memory file.
//!
//! A read-only mapping is enforced by the device, but who has the descriptor can map the chunk writable: it is a right to
//! the memory, to be given to processes of one user only.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::{Device, DeviceAddr, DeviceError};

/// The handle of a chunk in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk(pub u64);

/// A device whose memory can be mapped in chunks, and shared with other processes.
pub trait SharedMemory: Device {
    /// The least length of a chunk, in bytes; longer ones are multiples of it. On CUDA 2 MiB.
    fn chunk_granularity(&self) -> Result<u64, DeviceError>;

    /// 16 bytes that are the same for this device in every process, and for no other device: on CUDA its UUID.
    fn uuid(&self) -> Result<[u8; 16], DeviceError>;

    /// Reserves addresses for `len` bytes, a multiple of the granularity.
    fn reserve(&self, len: u64) -> Result<DeviceAddr, DeviceError>;

    /// Gives a reservation back, in which no chunk is mapped any more.
    fn free_reservation(&self, addr: DeviceAddr, len: u64) -> Result<(), DeviceError>;

    /// Allocates a chunk of zeros; the descriptor, in the caller's descriptor table, is for other processes.
    fn create_chunk(&self, len: u64) -> Result<(Chunk, OwnedFd), DeviceError>;

    /// The chunk of a descriptor in the caller's descriptor table, which may be closed afterwards.
    fn import_chunk(&self, fd: BorrowedFd<'_>, len: u64) -> Result<Chunk, DeviceError>;

    /// Maps a chunk into a reservation. Neither kernels nor copies may use it before [`SharedMemory::protect_chunks`].
    fn map_without_access(&self, addr: DeviceAddr, len: u64, chunk: Chunk) -> Result<(), DeviceError>;

    /// Maps a chunk into a reservation, accessible. Unless `writable`, stores of kernels and copies to it fail.
    fn map_chunk(&self, addr: DeviceAddr, len: u64, chunk: Chunk, writable: bool) -> Result<(), DeviceError> {
        self.map_without_access(addr, len, chunk)?;
        self.protect_chunks(addr, len, writable).inspect_err(|_| {
            let _ = self.unmap_chunk(addr, len);
        })
    }

    /// Allocates private chunks of these lengths and maps them side by side into a reservation. Their content is undefined,
    /// and neither kernels nor copies may use them before [`SharedMemory::protect_chunks`] has made them accessible: on CUDA
    /// that takes longer, so the caller may do it for some at a time. Returns how many it mapped: fewer if the
    /// device has no memory for more.
    fn map_private_chunks(&self, addr: DeviceAddr, lens: &[u64]) -> Result<usize, DeviceError>;

    /// A descriptor, in the caller's descriptor table, of a private chunk that is mapped at an address; its memory lives as
    /// long as that, also when it is unmapped here.
    fn export_private_chunk(&self, addr: DeviceAddr, len: u64) -> Result<OwnedFd, DeviceError>;

    /// Makes mapped chunks of `len` bytes in all accessible to this device, for loads or for stores too, whatever they were
    /// before. It waits for no work of the device.
    fn protect_chunks(&self, addr: DeviceAddr, len: u64, writable: bool) -> Result<(), DeviceError>;

    /// Unmaps one chunk, as it was mapped, after all work of the device that was queued before. An error leaves it
    /// mapped: that work cannot be waited for, as while a stream is captured.
    fn unmap_chunk(&self, addr: DeviceAddr, len: u64) -> Result<(), DeviceError>;

    /// Gives the handle back; mappings of the chunk stay.
    fn release_chunk(&self, chunk: Chunk) -> Result<(), DeviceError>;
}
