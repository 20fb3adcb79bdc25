//! The gather of the emulated device: the DMA thread does the work of the GPU kernel.
//!
//! The list and the bytes it names are read when the gather runs, not when it is enqueued: a buffer that is reused too
//! early transfers the wrong bytes. An entry outside an allocation fails the stream, as a faulting GPU kernel does.
//!
//! A pin has no address here, so its view is a number with the highest bit set: the pin's handle and the offset in it.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use crate::emulated::engine::copy_bytes;
use crate::emulated::memory::{Direction, Memory};
use crate::emulated::pins::{MAX_PIN, Pins};
use crate::{DeviceAddr, DeviceError, GatherEntry};

const PINNED: u64 = 1 << 63;
const SHIFT: u32 = MAX_PIN.trailing_zeros() + 1;

/// The address of a pin's first byte for a gather.
pub(super) fn device_ptr_of(handle: u64) -> u64 {
    PINNED | handle << SHIFT
}

/// Bytes of a list.
///
/// # Safety
/// It must have `count` entries.
pub(super) unsafe fn total_bytes(list: u64, count: usize) -> usize {
    // SAFETY: guaranteed by the caller; the last reader of the list is this thread.
    let pieces = unsafe { core::slice::from_raw_parts(list as *const GatherEntry, count) };
    pieces.iter().map(|p| p.len as usize).sum()
}

/// Copies entry by entry; after a failed entry the rest is skipped.
///
/// # Safety
/// The list must have `count` entries, and the memory they name must stay valid until this returns.
pub(super) unsafe fn run_gather(list: u64, count: usize, memory: &Memory, pins: &Pins) -> Result<(), DeviceError> {
    for at in 0..count {
        // SAFETY: inside the list.
        let GatherEntry { src: from, dst: to, len } = unsafe { (list as *const GatherEntry).add(at).read() };
        let len = len as usize;
        if len == 0 {
            continue;
        }
        let dst = memory.engine_addr(DeviceAddr(to), len, Direction::Store, "gather")?;
        if from & PINNED == 0 {
            // SAFETY: the caller guarantees the source; the destination is in an allocation, which is mapped.
            unsafe { copy_bytes(dst, from, len) };
            continue;
        }
        let (handle, offset) = ((from & !PINNED) >> SHIFT, (from & ((1 << SHIFT) - 1)) as usize);
        // SAFETY: as above.
        unsafe { pins.read(handle, offset, dst as *mut u8, len) }?;
    }
    Ok(())
}
