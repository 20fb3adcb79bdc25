//! Contexts: the current one, the identity of one, and the primary one of a device.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;
use crate::cuda::types::Context;

impl Driver {
    /// The context that is current on this thread; 0 for none.
    #[inline]
    pub fn current(&self) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call.
        unsafe { cu!(self.ctx_current(&mut context)) }.map(|()| Context(context))
    }

    /// Makes a context current, instead of the current one.
    ///
    /// # Safety
    /// The context must not have been freed by the driver.
    pub unsafe fn set_current(&self, context: Context) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.ctx_set_current(context.0)) }
    }

    /// Pushes a context, which becomes current.
    ///
    /// # Safety
    /// As [`Driver::set_current`].
    pub unsafe fn push(&self, context: Context) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.ctx_push(context.0)) }
    }

    /// Pops the topmost context.
    pub fn pop(&self) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call.
        unsafe { cu!(self.ctx_pop(&mut context)) }.map(|()| Context(context))
    }

    /// The device of the current context.
    pub fn current_device(&self) -> Result<i32> {
        let mut device = 0;
        // SAFETY: `device` lives across the call.
        unsafe { cu!(self.ctx_device(&mut device)) }.map(|()| device)
    }

    /// The flags of the current context, see [`crate::cuda::schedule`].
    pub fn current_flags(&self) -> Result<u32> {
        let mut flags = 0;
        // SAFETY: `flags` lives across the call.
        unsafe { cu!(self.ctx_flags(&mut flags)) }.map(|()| flags)
    }

    /// Waits for everything in the current context.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: no memory is involved.
        unsafe { cu!(self.ctx_synchronize()) }
    }

    /// A number that no other context of the process ever has, also not one at the same address after a reset.
    ///
    /// # Safety
    /// As [`Driver::set_current`].
    pub unsafe fn context_id(&self, context: Context) -> Result<u64> {
        let mut id = 0;
        // SAFETY: `id` lives across the call; the caller guarantees the context.
        unsafe { cu!(self.ctx_id(context.0, &mut id)) }.map(|()| id)
    }

    /// Whether the primary context of a device exists.
    pub fn primary_is_active(&self, device: i32) -> Result<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both live across the call.
        unsafe { cu!(self.primary_state(device, &mut flags, &mut active)) }.map(|()| active != 0)
    }

    /// The primary context of a device, created now if there is none; must be released once.
    pub fn primary_retain(&self, device: i32) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call.
        unsafe { cu!(self.primary_retain(&mut context, device)) }.map(|()| Context(context))
    }

    /// Releases one [`Driver::primary_retain`]; the last release destroys the context.
    ///
    /// # Safety
    /// The caller must have retained it.
    pub unsafe fn primary_release(&self, device: i32) -> Result<()> {
        // SAFETY: passed on to the caller.
        match unsafe { cu!(self.primary_release_v2?(device)) } {
            // SAFETY: as above; the same function under its older name.
            Err(CuError::NO_SUCH_FUNCTION) => unsafe { cu!(self.primary_release?(device)) },
            other => other,
        }
    }
}
