//! The driver itself, and its devices.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;

impl Driver {
    /// `cuInit`. For SPIN's own programs, and to count GPUs.
    pub fn init(&self) -> Result<()> {
        // SAFETY: no memory is involved.
        unsafe { cu!(self.init(0)) }
    }

    /// Newest CUDA version that the driver supports: 13000 for 13.0.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: `version` lives across the call.
        unsafe { cu!(self.driver_version(&mut version)) }.map(|()| version)
    }

    /// Number of devices.
    pub fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: `count` lives across the call.
        unsafe { cu!(self.device_count(&mut count)) }.map(|()| count)
    }

    /// The device handle of an ordinal.
    pub fn device(&self, ordinal: i32) -> Result<i32> {
        let mut device = 0;
        // SAFETY: `device` lives across the call.
        unsafe { cu!(self.device_get(&mut device, ordinal)) }.map(|()| device)
    }

    /// Its name.
    pub fn device_name(&self, device: i32) -> Result<String> {
        let mut text = [0u8; 128];
        // SAFETY: `text` lives across the call and has the given length; the driver ends it with NUL.
        unsafe { cu!(self.device_name(text.as_mut_ptr().cast(), text.len() as i32, device)) }?;
        Ok(c_string(&text))
    }

    /// Its PCI address: `0000:04:00.0`.
    pub fn device_pci(&self, device: i32) -> Result<String> {
        let mut text = [0u8; 32];
        // SAFETY: as above.
        unsafe { cu!(self.device_pci(text.as_mut_ptr().cast(), text.len() as i32, device)) }?;
        Ok(c_string(&text))
    }

    /// Its memory in bytes.
    pub fn device_memory(&self, device: i32) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: `bytes` lives across the call.
        unsafe { cu!(self.device_memory(&mut bytes, device)) }.map(|()| bytes as u64)
    }

    /// Whether a device can access the memory of another one.
    pub fn can_access_peer(&self, device: i32, peer: i32) -> Result<bool> {
        let mut possible = 0;
        // SAFETY: `possible` lives across the call.
        unsafe { cu!(self.can_access_peer?(&mut possible, device, peer)) }.map(|()| possible != 0)
    }

    /// One of [`crate::cuda::attribute`].
    pub fn device_attribute(&self, device: i32, which: i32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` lives across the call.
        unsafe { cu!(self.device_attribute(&mut value, which, device)) }.map(|()| value)
    }
}

fn c_string(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
