//! How the bytes of files get into the memory of maps. The routes are SPIN's, in a higher layer, or a test's.

use spinio_device::{Device, DeviceAddr};
use spinio_sys::linux::Fd;

use crate::Result;

/// What opens files for maps: SPIN's reads, or a test's.
pub trait FileReader: Send + Sync {
    /// Opens the file of descriptor `fd` of thread `tid` of this process once more, to be read until the result is
    /// dropped.
    fn open(&self, tid: u32, fd: Fd) -> Result<Box<dyn OpenFile>>;
}

/// An open file.
pub trait OpenFile: Send + Sync {
    /// Reads bytes into memory of a device, after the work that this thread has queued; when it returns, they are there.
    /// Fewer than `len` only at the end of the file.
    fn read(&self, offset: u64, device: &'static dyn Device, to: DeviceAddr, len: u64) -> Result<u64>;

    /// Runs `body` on a thread of its own, where the descriptor that it gets is this file; its caller keeps this until the
    /// body has ended. `false`: there is no such thread.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce(Fd) + Send>) -> bool;
}
