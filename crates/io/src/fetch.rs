//! Out of the device again: for tools that compare, and for the C API's copies.

use spinio_device::Wait;

use crate::{Error, Runtime, Target};

impl Runtime {
    /// Copies device memory into host memory and waits, behind what this thread has queued before.
    pub fn fetch(&self, from: Target, into: &mut [u8]) -> Result<(), Error> {
        let device = from.allocation.device;
        let len = into.len() as u64;
        let fail = |e| Error::device(e, "copy out of the device", 0, len);
        if from.allocation.room(from.addr) < len {
            let outside = spinio_device::DeviceError::new(spinio_device::ErrorKind::BadAddress, "copy out");
            return Err(fail(outside));
        }
        let (queue, _) = device.program_queue();
        // SAFETY: `into` is borrowed until the drain below returns, and the range lies in one allocation.
        let copied = unsafe { device.copy_out(queue, into.as_mut_ptr(), from.addr, into.len()) };
        // A failed copy may have queued its first part: nothing may write to `into` after we return.
        let drained = device.drain(queue, Wait::Context);
        copied.and(drained).map_err(fail)
    }
}
