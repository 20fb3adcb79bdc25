//! Files in device memory.

use std::ffi::c_int;
use std::ptr::null;

use super::{Error, Stream, call_for_count, missing_report, table, with_report};
use crate::{GAIA_IN_PLACE, GAIA_OVERWRITE, GAIA_READ, GAIA_WRITE};
pub use spinio_gaia::Info;

/// Why a copy on another device could not be used for a map, the last time; `None` if it could.
pub fn peer_refusal(info: &Info) -> Option<&'static str> {
    spinio_gaia::PeerRefusal::of_number(info.peer_refused).map(|refusal| refusal.sentence())
}

/// A range of a file in device memory. It is unmapped when dropped; stores that were not released are dropped with it.
#[derive(Debug)]
pub struct Map {
    address: u64,
    len: u64,
    process: u32,
}

/// What an epoch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Load.
    Read,
    /// Load and store.
    Write,
    /// Store to all of the range: nothing is fetched.
    Overwrite,
}

impl Access {
    fn number(self) -> u32 {
        match self {
            Access::Read => GAIA_READ,
            Access::Write => GAIA_WRITE,
            Access::Overwrite => GAIA_OVERWRITE,
        }
    }
}

impl Map {
    /// Maps `len` bytes of a file on a device (`emulated`, `cuda:0`), or on the one in use. `in_place`: kernels read the
    /// Linux kernel's page cache.
    pub fn new(
        fd: c_int,
        offset: u64,
        len: u64,
        write: bool,
        in_place: bool,
        device: Option<&str>,
    ) -> Result<Map, Error> {
        let (name, name_len) = device.map_or((null(), 0), |name| (name.as_ptr(), name.len()));
        let access = if write { Access::Write } else { Access::Read }.number();
        let access = if in_place { access | GAIA_IN_PLACE } else { access };
        // SAFETY: null, or a string of `name_len` bytes.
        let map = |report| unsafe { (table().gaia_map)(fd, offset, len, access, name, name_len, report) };
        match with_report(map) {
            (0, report) => Err(report.unwrap_or_else(missing_report)),
            (address, _) => Ok(Map { address, len, process: std::process::id() }),
        }
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether this process mapped it, and is not a forked child of the one that did.
    pub fn is_own_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// Brings a range up to date, and begins an epoch; the bytes of the range that are in the file.
    pub fn acquire(&self, offset: u64, len: u64, access: Access) -> Result<u64, Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_acquire)(address, len, access.number(), report) })
    }

    /// Publishes the stores to a range, and ends its epoch; the bytes that were published.
    pub fn release(&self, offset: u64, len: u64) -> Result<u64, Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_release)(address, len, report) })
    }

    /// As [`Map::release`], and may hand device memory over: kernels must not use the range before its next acquire.
    pub fn release_handing_over(&self, offset: u64, len: u64) -> Result<u64, Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_release_handing_over)(address, len, report) })
    }

    /// As [`Map::acquire`], in the order of a stream, and without waiting.
    pub fn acquire_async(&self, offset: u64, len: u64, access: Access, stream: Stream) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        let access = access.number();
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_acquire_async)(address, len, access, stream.0, report) })
            .map(drop)
    }

    /// As [`Map::release`], in the order of a stream, and without waiting.
    pub fn release_async(&self, offset: u64, len: u64, stream: Stream) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_release_async)(address, len, stream.0, report) }).map(drop)
    }

    /// Drops the stores to a range, and ends its epoch.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_discard)(address, len, report) }).map(drop)
    }

    /// Gives up what was read of a range; epochs for writing go on.
    pub fn end_reading(&self, offset: u64, len: u64) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_end_reading)(address, len, report) }).map(drop)
    }

    /// A block begins that will acquire a range for reading: until its end no release, and no end of another block, lets the
    /// memory go.
    pub fn begin_block(&self, offset: u64, len: u64) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_begin_block)(address, len, report) }).map(drop)
    }

    /// It has ended: what was read is given up, except for what other blocks read.
    pub fn end_block(&self, offset: u64, len: u64) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_end_block)(address, len, report) }).map(drop)
    }

    /// Returns when what was released of a range is on storage.
    pub fn sync(&self, offset: u64, len: u64) -> Result<(), Error> {
        let address = self.address_of(offset, len)?;
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().gaia_sync)(address, len, report) }).map(drop)
    }

    /// The name of its device: `cuda:0`.
    pub fn device(&self) -> String {
        // SAFETY: takes numbers only.
        let named = with_report(|report| unsafe { (table().gaia_device)(self.address, report) });
        named.1.map_or_else(String::new, |report| report.text)
    }

    /// What it has done.
    pub fn info(&self) -> Result<Info, Error> {
        let mut info = Info::default();
        // SAFETY: there is room for it.
        call_for_count(|report| unsafe { (table().gaia_info)(self.address, &mut info, report) })?;
        Ok(info)
    }

    /// The address of a range. Past the end of the map could be another one.
    fn address_of(&self, offset: u64, len: u64) -> Result<u64, Error> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.len => Ok(self.address + offset),
            _ => {
                let text = format!("{len} bytes from {offset} are not a range of a map of {} bytes", self.len);
                Err(Error { errno: libc::EINVAL, text, path: None })
            }
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.is_own_process() {
            // SAFETY: takes numbers only.
            let _ = call_for_count(|report| unsafe { (table().gaia_unmap)(self.address, report) });
        }
    }
}
