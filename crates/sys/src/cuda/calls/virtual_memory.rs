//! Virtual memory management: addresses and memory apart, and memory that other processes can map.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{c_int, c_void};

use super::{Result, check};
use crate::cuda::CuError;
use crate::cuda::table::Driver;
use crate::cuda::types::{AccessDescription, AllocationProperties, Location};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: c_int = 1;

impl Driver {
    /// The UUID of a device.
    pub fn device_uuid(&self, device: i32) -> Result<[u8; 16]> {
        let mut uuid = [0u8; 16];
        // SAFETY: `uuid` has the size of a CUuuid and lives across the call.
        unsafe { cu!(self.device_uuid?(uuid.as_mut_ptr().cast(), device)) }.map(|()| uuid)
    }

    /// The least length of an exportable allocation on a device.
    pub fn allocation_granularity(&self, device: i32) -> Result<u64> {
        let (mut bytes, with) = (0usize, AllocationProperties::exportable(device));
        // SAFETY: both live across the call; 0 asks for the minimum.
        unsafe { cu!(self.allocation_granularity?(&mut bytes, &with, 0)) }.map(|()| bytes as u64)
    }

    /// Reserves addresses.
    pub fn reserve_addresses(&self, len: usize, alignment: usize) -> Result<u64> {
        let mut at = 0;
        // SAFETY: `at` lives across the call.
        unsafe { cu!(self.address_reserve?(&mut at, len, alignment, 0, 0)) }.map(|()| at)
    }

    /// Gives reserved addresses back.
    ///
    /// # Safety
    /// From [`Driver::reserve_addresses`], of this length, and nothing is mapped there.
    pub unsafe fn free_addresses(&self, at: u64, len: usize) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.address_free?(at, len)) }
    }

    /// Allocates memory of these properties without an address.
    pub fn create_allocation(&self, len: usize, with: AllocationProperties) -> Result<u64> {
        let mut handle = 0;
        // SAFETY: both live across the call.
        unsafe { cu!(self.allocation_create?(&mut handle, len, &with, 0)) }.map(|()| handle)
    }

    /// Gives a handle back; the memory lives as long as it is mapped, or another handle or descriptor of it exists.
    ///
    /// # Safety
    /// The handle must be alive.
    pub unsafe fn release_allocation(&self, handle: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.allocation_release?(handle)) }
    }

    /// A descriptor of an allocation.
    ///
    /// # Safety
    /// The handle must be alive, and exportable.
    pub unsafe fn export_allocation(&self, handle: u64) -> Result<i32> {
        let mut fd: c_int = -1;
        // SAFETY: `fd` lives across the call; the rest is passed on to the caller.
        unsafe { cu!(self.allocation_export?((&raw mut fd).cast(), handle, POSIX_FD, 0)) }.map(|()| fd)
    }

    /// A further handle of the allocation that is mapped at an address.
    pub fn retain_allocation(&self, at: u64) -> Result<u64> {
        let mut handle = 0;
        // SAFETY: `handle` lives across the call; the driver checks the address.
        unsafe { cu!(self.allocation_retain?(&mut handle, at as usize as *mut c_void)) }.map(|()| handle)
    }

    /// The allocation of a descriptor, which may be closed afterwards.
    pub fn import_allocation(&self, fd: i32) -> Result<u64> {
        let mut handle = 0;
        // SAFETY: `handle` lives across the call; the driver checks the descriptor, which it takes as a pointer's value.
        unsafe { cu!(self.allocation_import?(&mut handle, fd as usize as *mut c_void, POSIX_FD)) }.map(|()| handle)
    }

    /// Maps a whole allocation at reserved addresses, without access.
    ///
    /// # Safety
    /// The addresses must be reserved and not mapped, the handle alive and of `len` bytes.
    pub unsafe fn map_allocation(&self, at: u64, len: usize, handle: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.allocation_map?(at, len, 0, handle, 0)) }
    }

    /// Unmaps whole allocations.
    ///
    /// # Safety
    /// No work may use the addresses.
    pub unsafe fn unmap_allocation(&self, at: u64, len: usize) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.allocation_unmap?(at, len)) }
    }

    /// What a device may do at mapped addresses.
    ///
    /// # Safety
    /// The addresses must be those of whole mapped allocations.
    pub unsafe fn set_access(&self, at: u64, len: usize, device: i32, writable: bool) -> Result<()> {
        let access = AccessDescription { location: Location::device(device), flags: if writable { 3 } else { 1 } };
        // SAFETY: one description, which lives across the call; the rest is passed on to the caller.
        unsafe { cu!(self.set_access?(at, len, &access, 1)) }
    }
}
