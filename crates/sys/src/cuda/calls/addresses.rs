//! Queries about an address.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::c_void;

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;
use crate::cuda::types::{Context, MemoryType, PointerInfo, pointer};

impl Driver {
    /// The number of the buffer that contains `addr`: it is never reused, so an unchanged number means that the
    /// very same allocation is still there.
    #[inline]
    pub fn buffer_id(&self, addr: u64) -> Result<u64> {
        let mut id = 0u64;
        // SAFETY: `id` has the size of this attribute and lives across the call; any address may be queried.
        unsafe { cu!(self.pointer_attribute((&raw mut id).cast(), pointer::BUFFER_ID, addr)) }.map(|()| id)
    }

    /// The attributes that decide the owner of an address. [`CuError::INVALID_VALUE`] where CUDA does not know it.
    pub fn pointer_info(&self, addr: u64) -> Result<PointerInfo> {
        const WHICH: [i32; 7] = [
            pointer::MEMORY_TYPE,
            pointer::CONTEXT,
            pointer::DEVICE_ORDINAL,
            pointer::RANGE_START_ADDR,
            pointer::RANGE_SIZE,
            pointer::IS_MANAGED,
            pointer::BUFFER_ID,
        ];
        let (mut kind, mut ordinal, mut managed) = (0u32, -1i32, 0u32);
        let (mut context, mut start, mut len, mut id) = (0usize, 0u64, 0usize, 0u64);
        let into: [*mut c_void; WHICH.len()] = [
            (&raw mut kind).cast(),
            (&raw mut context).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut len).cast(),
            (&raw mut managed).cast(),
            (&raw mut id).cast(),
        ];
        // SAFETY: there is one variable an attribute, each of that attribute's size, all alive across the call.
        unsafe { cu!(self.pointer_attributes(WHICH.len() as u32, WHICH.as_ptr(), into.as_ptr(), addr)) }?;
        let kind = match kind {
            0 => return Err(CuError::INVALID_VALUE),
            1 => MemoryType::Host,
            2 => MemoryType::Device,
            other => MemoryType::Other(other),
        };
        // IS_MANAGED is one byte wide in some drivers and an int in others; either way 0 means no.
        let managed = managed != 0;
        Ok(PointerInfo { kind, context: Context(context), ordinal, start, len: len as u64, managed, buffer_id: id })
    }

    /// The allocation that contains `addr`: first byte and length. Needs a current context.
    pub fn address_range(&self, addr: u64) -> Result<(u64, u64)> {
        let (mut start, mut len) = (0u64, 0usize);
        // SAFETY: both live across the call.
        unsafe { cu!(self.address_range(&mut start, &mut len, addr)) }.map(|()| (start, len as u64))
    }
}
