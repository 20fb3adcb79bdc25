//! The methods that batches add to a runtime.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use spinio_device::Allocation;
use spinio_io::Runtime;
use spinio_sys::Errno;
use spinio_transfer::Error;

use crate::ctx::BatchCtx;
use crate::handle::BatchHandle;
use crate::op_list::{OpList, ReadArrays, ReadOp};
use crate::run::{BatchResult, resolve};

/// Batches of a runtime.
pub trait Batches {
    /// Reads all operations and waits for them; each has its result afterwards.
    fn batch(&self, ops: &mut [ReadOp]) -> Result<BatchResult, Error> {
        self.batch_with_allocations(ops, &[])
    }

    /// As [`Batches::batch`]; allocations that are already known are not looked up again.
    fn batch_with_allocations(&self, ops: &mut [ReadOp], known: &[Allocation]) -> Result<BatchResult, Error>;

    /// Many reads of one file. EINVAL if an array is shorter than the results.
    fn batch_file(&self, arrays: ReadArrays<'_>, known: &[Allocation]) -> Result<BatchResult, Error>;

    /// Begins a batch, ordered after what this thread has queued so far; the handle waits for it.
    ///
    /// # Safety
    /// Until [`BatchHandle::wait`] has returned the operations must stay valid, and no other thread may use them;
    /// descriptors must stay open and the memory allocated.
    unsafe fn submit(&self, ops: *mut [ReadOp]) -> Result<BatchHandle, Error>;
}

impl Batches for Runtime {
    fn batch_with_allocations(&self, ops: &mut [ReadOp], known: &[Allocation]) -> Result<BatchResult, Error> {
        Ok(resolve(&BatchCtx::of(self), OpList::from_ops(ops), known, None)?.run())
    }

    fn batch_file(&self, many: ReadArrays<'_>, known: &[Allocation]) -> Result<BatchResult, Error> {
        let list = OpList::from_arrays(many).ok_or(Error::kernel(Errno::INVAL, "read a batch", 0, 0))?;
        Ok(resolve(&BatchCtx::of(self), list, known, None)?.run())
    }

    unsafe fn submit(&self, ops: *mut [ReadOp]) -> Result<BatchHandle, Error> {
        // SAFETY: passed on to the caller.
        let list = OpList::from_ops(unsafe { &mut *ops });
        let ctx = BatchCtx::of(self);
        Ok(BatchHandle::new(&ctx, resolve(&ctx, list, &[], None)?))
    }
}
