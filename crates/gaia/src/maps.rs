//! The maps of this process, for programs that name them by address.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use spinio_device::Device;
use spinio_host::lock;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::{Access, Error, Map, Result};

static MAPS: Mutex<Vec<Arc<Map>>> = Mutex::new(Vec::new());
/// The process that made them. In its forked child the lock may be held by a thread that is not there.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Maps a range of a file; returns its device address.
pub fn map(fd: Fd, offset: u64, len: u64, access: Access, device: &'static dyn Device) -> Result<u64> {
    let own = PROCESS.compare_exchange(0, linux::getpid(), SeqCst, SeqCst).unwrap_or_else(|process| process);
    if own != 0 && own != linux::getpid() {
        return Err(Error::new(Errno::NOTSUP, "The parent of this process has made maps: execute a program first"));
    }
    let map = Arc::new(Map::new(fd, offset, len, access, device)?);
    let address = map.address();
    lock(&MAPS).push(map);
    Ok(address)
}

/// Unmaps it. Unreleased stores are dropped. GPU kernels that use the map must have finished.
pub fn unmap(address: u64) -> Result<()> {
    let mut maps = lock_own()?;
    let at = maps.iter().position(|map| map.address() == address);
    let at = at.ok_or_else(|| Error::new(Errno::INVAL, "No map begins at this address"))?;
    let removed = maps.swap_remove(at);
    drop(maps);
    drop(removed);
    Ok(())
}

/// Calls `body` with the map that contains an address, and the offset of the address in it.
pub fn with_map<T>(address: u64, body: impl FnOnce(&Map, u64) -> Result<T>) -> Result<T> {
    let contains = |map: &&Arc<Map>| address >= map.address() && address - map.address() < map.len();
    let found = lock_own()?.iter().find(contains).cloned();
    let map = found.ok_or_else(|| Error::new(Errno::INVAL, "There is no map at this address"))?;
    body(&map, address - map.address())
}

/// The maps, unless this is a forked child.
fn lock_own() -> Result<MutexGuard<'static, Vec<Arc<Map>>>> {
    match PROCESS.load(SeqCst) {
        process if process == 0 || process == linux::getpid() => Ok(lock(&MAPS)),
        _ => Err(Error::new(Errno::INVAL, "A forked child has no maps")),
    }
}
