//! The maps of this process, for programs that name them by address.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use spinio_device::{Device, DeviceId, PAGE_BYTES, StreamId};
use spinio_host::lock;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, fs_magic};

use crate::file_reader::FileReader;
use crate::{Access, Advice, Error, Info, Map, Result, StreamRelease, ranges};
use crate::{coherent, leased};

const PAGE: u64 = PAGE_BYTES as u64;

static MAPS: Mutex<Vec<Arc<FileMap>>> = Mutex::new(Vec::new());
/// The process that made them. In its forked child the lock may be held by a thread that is not there.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// A map of either kind.
#[derive(Debug)]
pub enum FileMap {
    /// Of a file below a GAIA mount.
    Mounted(Arc<Map>),
    /// Of another file, which no process writes.
    Leased(Box<leased::Map>),
    /// Of either, in place, on a device that accesses all memory of the process.
    Coherent(Box<coherent::Map>),
}

impl FileMap {
    fn new(
        fd: Fd,
        offset: u64,
        len: u64,
        access: Access,
        device: &'static dyn Device,
        reader: &'static dyn FileReader,
    ) -> Result<FileMap> {
        let file_system = linux::file_system_magic(fd).map_err(|e| Error::of(e, "query the descriptor"))?;
        if file_system == fs_magic::FUSE {
            return Map::with_reader(fd, offset, len, access, device, Some(reader))
                .map(|map| FileMap::Mounted(Arc::new(map)));
        }
        leased::Map::new(fd, offset, len, access, device, reader, leased::sockets())
            .map(|map| FileMap::Leased(Box::new(map)))
    }

    /// Whose memory it is in.
    pub fn device(&self) -> DeviceId {
        match self {
            FileMap::Mounted(map) => map.replica.device_id(),
            FileMap::Leased(map) => map.device.id(),
            FileMap::Coherent(map) => map.device.id(),
        }
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        match self {
            FileMap::Mounted(map) => map.address(),
            FileMap::Leased(map) => map.address(),
            FileMap::Coherent(map) => map.address(),
        }
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            FileMap::Mounted(map) => map.len(),
            FileMap::Leased(map) => map.bytes(),
            FileMap::Coherent(map) => map.bytes(),
        }
    }

    /// Makes `len` bytes from `offset` as new as the file is now, and begins an epoch; the bytes that are in the file.
    pub fn acquire(&self, offset: u64, len: u64, access: Access) -> Result<u64> {
        match self {
            FileMap::Mounted(map) => map.acquire(offset, len, access),
            FileMap::Leased(map) => map.acquire(offset, len, access),
            FileMap::Coherent(map) => map.acquire(offset, len, access),
        }
    }

    /// [`FileMap::acquire`] for writing, of bytes that the program will overwrite: see [`Map::overwrite`].
    pub fn overwrite(&self, offset: u64, len: u64) -> Result<u64> {
        match self {
            FileMap::Mounted(map) => map.overwrite(offset, len),
            FileMap::Leased(map) => map.acquire(offset, len, Access::Write),
            FileMap::Coherent(map) => map.acquire(offset, len, Access::Write),
        }
    }

    /// Publishes the stores to a range, and gives up what was read; the bytes that were published.
    pub fn release(&self, offset: u64, len: u64) -> Result<u64> {
        match self {
            FileMap::Mounted(map) => map.release(offset, len),
            FileMap::Leased(map) => map.release(offset, len).map(|()| 0),
            FileMap::Coherent(map) => map.release(offset, len).map(|()| 0),
        }
    }

    /// [`FileMap::release`], which may hand device memory over: see [`Map::release_handing_over`].
    pub fn release_handing_over(&self, offset: u64, len: u64) -> Result<u64> {
        match self {
            FileMap::Mounted(map) => map.release_handing_over(offset, len),
            FileMap::Leased(map) => map.release(offset, len).map(|()| 0),
            FileMap::Coherent(map) => map.release(offset, len).map(|()| 0),
        }
    }

    /// Gives up what was read; epochs for writing go on.
    pub fn end_reading(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.end_reading(offset, len),
            FileMap::Leased(map) => map.check_range(offset, len).map(drop),
            FileMap::Coherent(map) => map.end_reading(offset, len),
        }
    }

    /// A block begins that will acquire a range for reading: see [`Map::begin_block`]. Leased ones have nothing to lose.
    pub fn begin_block(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.begin_block(offset, len),
            FileMap::Leased(map) => map.check_range(offset, len).map(drop),
            FileMap::Coherent(map) => map.begin_block(offset, len),
        }
    }

    /// It has ended: see [`Map::end_block`].
    pub fn end_block(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.end_block(offset, len),
            FileMap::Leased(_) => self.end_reading(offset, len),
            FileMap::Coherent(map) => map.end_block(offset, len),
        }
    }

    /// [`FileMap::acquire`] in the order of a stream: see [`Map::acquire_async`].
    pub fn acquire_async(&self, offset: u64, len: u64, access: Access, stream: StreamId) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.acquire_async(offset, len, access, stream),
            FileMap::Leased(_) => Err(leased_in_stream_order()),
            FileMap::Coherent(map) => map.acquire_async(offset, len, access, stream),
        }
    }

    /// [`FileMap::overwrite`] in the order of a stream: see [`Map::overwrite_async`].
    pub fn overwrite_async(&self, offset: u64, len: u64, stream: StreamId) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.overwrite_async(offset, len, stream),
            FileMap::Leased(_) => Err(leased_in_stream_order()),
            FileMap::Coherent(map) => map.acquire_async(offset, len, Access::Write, stream),
        }
    }

    /// A release in the order of a stream: see [`Map::release_async`].
    pub fn release_async(&self, offset: u64, len: u64, release: StreamRelease) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.release_async(offset, len, release),
            FileMap::Leased(_) => Err(leased_in_stream_order()),
            FileMap::Coherent(map) => map.release_async(offset, len, release),
        }
    }

    /// Ends the epoch of the pages of `len` bytes from `offset` without a release: no one sees its stores.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.discard(offset, len),
            FileMap::Leased(map) => map.release(offset, len),
            FileMap::Coherent(map) => map.discard(offset, len),
        }
    }

    /// Returns when what was released of the range before the call is on storage.
    pub fn sync(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.sync(offset, len),
            FileMap::Leased(map) => map.check_range(offset, len).map(drop),
            FileMap::Coherent(map) => map.sync(offset, len),
        }
    }

    /// Says what the program will do with `len` bytes from `offset`; without effect on chunks that others use too.
    pub fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        match self {
            FileMap::Mounted(map) => map.advise(offset, len, advice),
            FileMap::Leased(map) => map.check_range(offset, len).map(drop),
            FileMap::Coherent(map) => map.advise(offset, len, advice),
        }
    }

    /// What the map has done.
    pub fn info(&self) -> Info {
        match self {
            FileMap::Mounted(map) => map.info(),
            FileMap::Leased(map) => map.info(),
            FileMap::Coherent(map) => map.info(),
        }
    }
}

/// Maps a range of a file; returns its device address. `reader`: what reads files into the device's memory.
pub fn map(
    fd: Fd,
    offset: u64,
    len: u64,
    access: Access,
    device: &'static dyn Device,
    reader: &'static dyn FileReader,
) -> Result<u64> {
    insert(|| FileMap::new(fd, offset, len, access, device, reader))
}

/// Maps a range of a file without memory of the device: its kernels use the Linux kernel's page cache. Returns the device
/// address. A device that accesses all memory of the process gets a coherent map; another one reads registered pages of
/// a file below a mount.
pub fn map_in_place(fd: Fd, offset: u64, len: u64, access: Access, device: &'static dyn Device) -> Result<u64> {
    if device.pageable_access().is_possible() {
        return insert(|| {
            coherent::Map::new(fd, offset, len, access, device).map(|map| FileMap::Coherent(Box::new(map)))
        });
    }
    if access == Access::Write {
        let sentence = format!(
            "Kernels of {} do not access all memory of the process (HMM): there a map in place is for reading only",
            device.id()
        );
        return Err(Error::new(Errno::INVAL, sentence));
    }
    insert(|| {
        let file_system = linux::file_system_magic(fd).map_err(|e| Error::of(e, "query the descriptor"))?;
        if file_system != fs_magic::FUSE {
            let sentence = "Only files below a GAIA mount are mapped in place; spinio_map does so with a pinned file";
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        Map::in_place(fd, offset, len, device).map(|map| FileMap::Mounted(Arc::new(map)))
    })
}

fn insert(make: impl FnOnce() -> Result<FileMap>) -> Result<u64> {
    let check = |process: u32| match process == 0 || process == linux::getpid() {
        true => Ok(()),
        false => Err(Error::new(Errno::NOTSUP, "The parent of this process has made maps: execute a program first")),
    };
    check(PROCESS.load(SeqCst))?;
    let map = Arc::new(make()?);
    // Not before: a process whose maps all failed may fork others that make some.
    check(PROCESS.compare_exchange(0, linux::getpid(), SeqCst, SeqCst).unwrap_or_else(|process| process))?;
    let address = map.address();
    let mut maps = lock(&MAPS);
    ranges::insert(address, end_of(&map));
    maps.push(map);
    Ok(address)
}

/// Unmaps it, after the calls in stream order that are queued on it. Unreleased stores are dropped. GPU kernels that use
/// the map must have finished.
pub fn unmap(address: u64) -> Result<()> {
    let mut maps = lock_own()?;
    let at = maps.iter().position(|map| map.address() == address);
    let at = at.ok_or_else(|| Error::new(Errno::INVAL, "No map begins at this address"))?;
    let removed = maps.swap_remove(at);
    // Before the device has the addresses back.
    ranges::remove(address);
    drop(maps);
    match &*removed {
        FileMap::Mounted(map) => map.wait_for_queued(),
        FileMap::Coherent(map) => map.wait_for_queued(),
        FileMap::Leased(_) => {}
    }
    drop(removed);
    Ok(())
}

/// Unmaps the map that is this range, in whole pages; `None` if the range touches no map of this process.
pub fn unmap_range(at: u64, len: u64) -> Option<Result<()>> {
    let end = at.saturating_add(len);
    let maps = lock_own().ok()?;
    let (start, map_end) =
        maps.iter().map(|map| (map.address(), end_of(map))).find(|(start, map_end)| at < *map_end && end > *start)?;
    drop(maps);
    if at != start || end.checked_next_multiple_of(PAGE) != Some(map_end) {
        return Some(Err(Error::new(Errno::INVAL, "A map is unmapped as a whole, and alone")));
    }
    Some(unmap(at))
}

fn leased_in_stream_order() -> Error {
    let sentence = "Files that are not below a GAIA mount are not acquired in stream order: use spinio_gaia_acquire";
    Error::new(Errno::NOTSUP, sentence)
}

/// The end of its last page.
fn end_of(map: &FileMap) -> u64 {
    map.address() + map.bytes().next_multiple_of(PAGE)
}

/// Calls `body` with the map that contains an address, and the offset of the address in it.
pub fn with_map<T>(address: u64, body: impl FnOnce(&FileMap, u64) -> Result<T>) -> Result<T> {
    let contains = |map: &&Arc<FileMap>| address >= map.address() && address - map.address() < map.bytes();
    let found = lock_own()?.iter().find(contains).cloned();
    let map = found.ok_or_else(|| Error::new(Errno::INVAL, "There is no map at this address"))?;
    body(&map, address - map.address())
}

/// The maps, unless this is a forked child.
fn lock_own() -> Result<MutexGuard<'static, Vec<Arc<FileMap>>>> {
    match PROCESS.load(SeqCst) {
        process if process == 0 || process == linux::getpid() => Ok(lock(&MAPS)),
        _ => Err(Error::new(Errno::INVAL, "A forked child has no maps")),
    }
}
