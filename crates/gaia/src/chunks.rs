//! The device memory of a map: chunks in a range of addresses.
//!
//! ```text
//!   addresses   | chunk 0 | chunk 1 | nothing | chunk 3 | nothing | last, as long as needed |   for the life of the map
//! ```
//!
//! The table says which chunks are mapped, and when each was acquired last. A *hold* keeps chunks from being evicted while
//! a call uses them; after that, epochs do ([`crate::page_states`]).
//!
//! No device has access to a chunk that was just mapped. To grant that takes longer than to allocate and map it, ten times as
//! long where the driver has to clear memory that was just freed, and allocates nothing. So it is a step of its own, which copies between devices do while they run
//! ([`crate::overlapped_copies`]).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use spinio_device::{DeviceAddr, DeviceError, DeviceId, PAGE_BYTES, SharedMemory};
use spinio_host::lock;

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Chunks of a large map. To make 8 GiB accessible takes 4 ms on an H200 in chunks of 64 MiB, and 1.3 in chunks of 256; 17 to
/// 20 in any where memory was freed just before, which the driver clears first (benches/gaia/chunks.cu).
const LARGEST: u64 = 64 << 20;
/// Chunks of a map that is not larger than that.
const FEW: u64 = 16;
/// Chunks within the limit.
const IN_LIMIT: u64 = 8;

/// The memory.
pub(crate) struct Chunks {
    device: &'static dyn SharedMemory,
    start: DeviceAddr,
    /// Of the reservation.
    bytes: u64,
    /// Of each chunk but the last.
    size: u64,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    chunks: Vec<Chunk>,
    mapped_bytes: u64,
    evicted: u64,
}

#[derive(Clone, Default)]
struct Chunk {
    is_mapped: bool,
    holds: u32,
    /// The time of the last acquire, of the room's clock.
    used: u64,
    /// Devices that may access it until it is unmapped, its own among them.
    accessors: Vec<DeviceId>,
}

/// Chunks that are not evicted while this lives.
pub(crate) struct Hold {
    memory: Arc<Chunks>,
    chunks: Range<usize>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.memory.lock().chunks[self.chunks.clone()].iter_mut().for_each(|chunk| chunk.holds -= 1);
    }
}

impl Chunks {
    /// Reserves addresses for pages. `None`: the device has no memory in chunks.
    pub(crate) fn reserve(
        device: &'static dyn SharedMemory,
        pages: usize,
        limit: Option<u64>,
    ) -> Result<Option<Chunks>> {
        let Ok(least) = device.chunk_granularity() else { return Ok(None) };
        let bytes = (pages as u64 * PAGE_BYTES as u64).next_multiple_of(least);
        let size = chunk_size(bytes, least, limit);
        let start = device.reserve(bytes).map_err(|e| Error::device(e, "reserve addresses for a map"))?;
        let count = bytes.div_ceil(size) as usize;
        let table = Mutex::new(Table { chunks: vec![Chunk::default(); count], ..Table::default() });
        Ok(Some(Chunks { device, start, bytes, size, table }))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// The device address of the first byte.
    pub(crate) fn start(&self) -> DeviceAddr {
        self.start
    }

    /// The chunks of pages.
    pub(crate) fn of_pages(&self, pages: &Range<usize>) -> Range<usize> {
        let in_chunk = self.size as usize / PAGE_BYTES;
        pages.start / in_chunk..pages.end.div_ceil(in_chunk)
    }

    /// The chunks that lie wholly in a range of pages of a map of `all` pages.
    pub(crate) fn inside(&self, pages: &Range<usize>, all: usize) -> Range<usize> {
        let in_chunk = self.size as usize / PAGE_BYTES;
        let start = pages.start.div_ceil(in_chunk);
        let end = if pages.end == all { all.div_ceil(in_chunk) } else { pages.end / in_chunk };
        start..end.max(start)
    }

    /// The pages of a chunk; those after the end of the map are of no use.
    pub(crate) fn pages(&self, chunk: usize) -> Range<usize> {
        let (first, len) = (chunk as u64 * self.size, self.len(chunk));
        first as usize / PAGE_BYTES..(first + len) as usize / PAGE_BYTES
    }

    /// Bytes of a chunk.
    pub(crate) fn len(&self, chunk: usize) -> u64 {
        self.size.min(self.bytes - chunk as u64 * self.size)
    }

    /// The device address of a chunk.
    pub(crate) fn address(&self, chunk: usize) -> DeviceAddr {
        self.start.offset(chunk as u64 * self.size)
    }

    /// The chunks of bytes from an address.
    pub(crate) fn covering(&self, address: DeviceAddr, len: usize) -> Range<usize> {
        let first = address.0 - self.start.0;
        (first / self.size) as usize..(first + len as u64).div_ceil(self.size) as usize
    }

    /// Holds chunks, whether or not they are mapped; they are acquired now.
    pub(crate) fn hold(self: &Arc<Chunks>, chunks: Range<usize>, now: u64) -> Hold {
        for chunk in &mut self.lock().chunks[chunks.clone()] {
            chunk.holds += 1;
            chunk.used = now;
        }
        Hold { memory: Arc::clone(self), chunks }
    }

    /// Holds a chunk if it is mapped, which does not count as an acquire.
    pub(crate) fn keep(self: &Arc<Chunks>, chunk: usize) -> Option<Hold> {
        let its = self.lock().chunks.get_mut(chunk).filter(|chunk| chunk.is_mapped).map(|chunk| chunk.holds += 1);
        its.map(|()| Hold { memory: Arc::clone(self), chunks: chunk..chunk + 1 })
    }

    /// They are acquired now.
    pub(crate) fn touch(&self, chunks: Range<usize>, now: u64) {
        self.lock().chunks[chunks].iter_mut().for_each(|chunk| chunk.used = now);
    }

    /// Chunks of a range that are not mapped.
    pub(crate) fn missing(&self, chunks: Range<usize>) -> Vec<usize> {
        let table = self.lock();
        chunks.filter(|chunk| !table.chunks[*chunk].is_mapped).collect()
    }

    /// The bytes of chunks.
    pub(crate) fn bytes_of(&self, chunks: impl IntoIterator<Item = usize>) -> u64 {
        chunks.into_iter().map(|chunk| self.len(chunk)).sum()
    }

    /// Maps chunks side by side that are not mapped, without access; how many: the device may have no memory for all.
    pub(crate) fn map(&self, chunks: Range<usize>) -> core::result::Result<usize, DeviceError> {
        let lens: Vec<u64> = chunks.clone().map(|chunk| self.len(chunk)).collect();
        let count = self.device.map_private_chunks(self.address(chunks.start), &lens)?;
        let mut table = self.lock();
        for chunk in &mut table.chunks[chunks.start..chunks.start + count] {
            chunk.is_mapped = true;
            chunk.accessors.clear();
        }
        table.mapped_bytes += lens[..count].iter().sum::<u64>();
        Ok(count)
    }

    /// Those of mapped chunks to which their device has no access yet.
    pub(crate) fn without_access(&self, chunks: Range<usize>) -> Vec<usize> {
        let (table, own) = (self.lock(), self.device.id());
        chunks.filter(|chunk| !table.chunks[*chunk].accessors.contains(&own)).collect()
    }

    /// Grants their device access to mapped chunks, which the caller holds.
    pub(crate) fn grant_access(&self, chunks: &[usize]) -> core::result::Result<(), DeviceError> {
        self.grant(self.device.id(), chunks, |at, len| self.device.protect_chunks(at, len, true))
    }

    /// Grants a device access to mapped chunks, which the caller holds. `call` does so for chunks side by side to which it has
    /// none yet, and is called again for no chunk before that is unmapped.
    pub(crate) fn grant<E>(
        &self,
        device: DeviceId,
        chunks: &[usize],
        mut call: impl FnMut(DeviceAddr, u64) -> core::result::Result<(), E>,
    ) -> core::result::Result<(), E> {
        let mut missing = chunks.to_vec();
        missing.sort_unstable();
        missing.dedup();
        let table = self.lock();
        missing.retain(|chunk| !table.chunks[*chunk].accessors.contains(&device));
        drop(table);
        for side_by_side in missing.chunk_by(|chunk, next| chunk + 1 == *next) {
            let run = side_by_side[0]..side_by_side[0] + side_by_side.len();
            call(self.address(run.start), self.bytes_of(run.clone()))?;
            self.lock().chunks[run].iter_mut().for_each(|chunk| chunk.accessors.push(device));
        }
        Ok(())
    }

    /// A descriptor of a chunk that is mapped, for another process.
    pub(crate) fn export(&self, chunk: usize) -> core::result::Result<OwnedFd, DeviceError> {
        self.device.export_private_chunk(self.address(chunk), self.len(chunk)).map(OwnedFd::from)
    }

    /// The identity of the device.
    pub(crate) fn device_uuid(&self) -> core::result::Result<[u8; 16], DeviceError> {
        self.device.uuid()
    }

    /// The chunks that are mapped and not held, with the time of their last acquire.
    pub(crate) fn idle(&self) -> Vec<(u64, usize)> {
        let table = self.lock();
        let idle = table.chunks.iter().enumerate().filter(|(_, chunk)| chunk.is_mapped && chunk.holds == 0);
        idle.map(|(number, chunk)| (chunk.used, number)).collect()
    }

    /// Takes a chunk out of use, to unmap it; false if it is held, or not mapped.
    pub(crate) fn take(&self, number: usize) -> bool {
        let chunk = &mut self.lock().chunks[number];
        let is_idle = chunk.is_mapped && chunk.holds == 0;
        chunk.is_mapped &= !is_idle;
        is_idle
    }

    /// Unmaps a chunk that was taken out of use; the bytes that are free now. What cannot be unmapped stays in use.
    pub(crate) fn unmap(&self, number: usize, is_eviction: bool) -> u64 {
        let len = self.len(number);
        let unmapped = self.device.unmap_chunk(self.address(number), len);
        let mut table = self.lock();
        if unmapped.is_err() {
            table.chunks[number].is_mapped = true;
            return 0;
        }
        table.mapped_bytes -= len;
        table.evicted += u64::from(is_eviction);
        len
    }

    /// Bytes of device memory, and how many chunks were evicted.
    pub(crate) fn usage(&self) -> (u64, u64) {
        let table = self.lock();
        (table.mapped_bytes, table.evicted)
    }

    /// Unmaps all chunks, and gives the addresses back, unless there is one that cannot be unmapped. No call uses them: what
    /// still holds some is a call that a lost device never ran.
    pub(crate) fn free(&self) -> u64 {
        let mut mapped = Vec::new();
        for (number, chunk) in self.lock().chunks.iter_mut().enumerate().filter(|(_, chunk)| chunk.is_mapped) {
            chunk.is_mapped = false;
            mapped.push(number);
        }
        let freed = mapped.into_iter().map(|chunk| self.unmap(chunk, false)).sum();
        if self.usage().0 == 0 {
            let _ = self.device.free_reservation(self.start, self.bytes);
        }
        freed
    }
}

/// Some chunks, so that a range that is used does not bring much else; but few, since each takes time.
fn chunk_size(bytes: u64, least: u64, limit: Option<u64>) -> u64 {
    let most = limit.map_or(LARGEST, |limit| LARGEST.min(limit / IN_LIMIT));
    let mut size = least;
    while size * FEW < bytes && size * 2 <= most {
        size *= 2;
    }
    size
}

#[cfg(test)]
mod tests {
    use spinio_device::Device;
    use spinio_device::emulated::{Config, Emulated};

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn chunks_of_large_maps_are_large_and_several_are_within_the_limit() {
        for (bytes, limit, wanted) in [
            (2, None, 2),
            (32, None, 2),
            (33, None, 4),
            (256, None, 16),
            (1024, None, 64),
            (1 << 20, None, 64),
            (256, Some(64), 8),
            (1 << 20, Some(100), 8),
            (1 << 20, Some(1), 2),
            (16, Some(1 << 20), 2),
        ] {
            let limit = limit.map(|limit: u64| limit * MIB);
            assert_eq!(chunk_size(bytes * MIB, 2 * MIB, limit), wanted * MIB, "{bytes} MiB, {limit:?}");
        }
    }

    #[test]
    fn access_to_a_chunk_is_granted_once_until_it_is_unmapped() {
        let device = Emulated::start(Config::parse("size=10M").unwrap()).unwrap();
        let memory = Arc::new(Chunks::reserve(device.shared_memory().unwrap(), 5 * 512, None).unwrap().unwrap());
        assert_eq!(memory.map(0..5), Ok(5));
        let [one, other] = [1, 2].map(|ordinal| DeviceId { ordinal, ..device.id() });
        let allowed = |device, chunks: &[usize]| {
            let mut runs = Vec::new();
            let allow = |at: DeviceAddr, len| {
                runs.push(((at.0 - memory.start().0) / MIB, len / MIB));
                Ok::<(), ()>(())
            };
            memory.grant(device, chunks, allow).unwrap();
            runs
        };
        assert_eq!(allowed(one, &[0, 1, 1, 3]), [(0, 4), (6, 2)]);
        assert_eq!((allowed(one, &[0, 1, 2, 3, 4]), allowed(one, &[3, 2])), (vec![(4, 2), (8, 2)], vec![]));
        assert_eq!(allowed(other, &[2]), [(4, 2)]);
        // What fails is tried again.
        assert_eq!(memory.grant(other, &[4], |_, _| Err(7)), Err(7));
        assert_eq!(allowed(other, &[4]), [(8, 2)]);
        // Another chunk at the address of one that was unmapped.
        assert!(memory.take(2) && memory.unmap(2, true) == 2 * MIB);
        assert_eq!(memory.map(2..3), Ok(1));
        assert_eq!((allowed(one, &[1, 2, 3]), allowed(other, &[2])), (vec![(4, 2)], vec![(4, 2)]));
        // The map's own device is one of them.
        assert_eq!(memory.without_access(1..5), [1, 2, 3, 4]);
        memory.grant_access(&[1, 2, 4]).unwrap();
        assert_eq!(memory.without_access(1..5), [3]);
        assert!(memory.take(3) && memory.unmap(3, true) == 2 * MIB);
        assert!(memory.grant_access(&[3]).is_err(), "it is not mapped");
        assert!(memory.take(2) && memory.unmap(2, true) == 2 * MIB);
        assert_eq!(memory.map(2..4), Ok(2));
        assert_eq!(memory.without_access(1..5), [2, 3]);
        assert_eq!(memory.free(), 10 * MIB);
    }

    #[test]
    fn chunk_is_taken_when_it_is_mapped_and_not_held() {
        let device = Emulated::start(Config::parse("size=8M").unwrap()).unwrap();
        let pages = 3 * 512 + 1;
        let memory = Arc::new(Chunks::reserve(device.shared_memory().unwrap(), pages, None).unwrap().unwrap());
        assert_eq!((memory.of_pages(&(511..513)), memory.inside(&(1..pages), pages)), (0..2, 1..4));
        assert_eq!((memory.inside(&(0..1535), pages), memory.inside(&(1..511), pages)), (0..2, 1..1));
        assert_eq!((memory.pages(3), memory.bytes_of(0..4)), (1536..2048, 8 * MIB));
        let hold = memory.hold(0..2, 5);
        assert_eq!((memory.missing(0..4), memory.take(0)), (vec![0, 1, 2, 3], false));
        assert_eq!(memory.map(0..3), Ok(3));
        assert_eq!((memory.missing(0..4), memory.idle(), memory.usage()), (vec![3], vec![(0, 2)], (6 * MIB, 0)));
        drop(hold);
        assert_eq!(memory.idle(), [(5, 0), (5, 1), (0, 2)]);
        assert!(memory.take(1) && !memory.take(1) && memory.missing(0..2) == [1]);
        assert_eq!((memory.unmap(1, true), memory.usage()), (2 * MIB, (4 * MIB, 1)));
        assert_eq!(memory.map(1..2), Ok(1));
        let _hold = memory.hold(0..1, 6);
        assert_eq!(memory.free(), 6 * MIB);
        assert_eq!(device.resources_in_use(), Default::default());
    }
}
