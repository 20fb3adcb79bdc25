//! Reserved addresses, and the chunks that are mapped there.
//!
//! ```text
//!   device addresses   [ reservation: chunk | chunk | nothing ][ reservation ] ...      never CPU access but in kernels
//!                            │ same bytes
//!   the engine's view  [                                                      ]
//!   chunk = memory file: its descriptor is in the worker's table, other processes map it too
//! ```
//!
//! Both ranges, the *window*, are reserved at the first use: one entry in the table of device ranges serves all
//! reservations. While a kernel runs, chunks are accessible to the CPU as far as they are to the device: a kernel that stores to
//! a read-only one traps.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use spinio_sys::linux::{
    self, Fd, MADV_DONTDUMP, MADV_DONTFORK, MAP_ANONYMOUS, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED,
    PROT_NONE, PROT_READ,
};

use super::first_fit::FirstFit;
use super::memory::{Direction, POISON};
use crate::host_memory::{READ_WRITE, system_error};
use crate::{Chunk, DeviceAddr, DeviceError, ErrorKind};

type Result<T> = core::result::Result<T, DeviceError>;

/// The least chunk, as on CUDA.
pub(super) const GRANULARITY: u64 = 2 << 20;

/// Addresses for reservations.
const WINDOW: u64 = 1 << 38;

/// Addresses without memory.
const RESERVED: u32 = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/// The window's two views, once they are reserved.
#[derive(Clone, Copy, Debug)]
struct Window {
    base: u64,
    alias: u64,
}

/// What kernels and copies of the device may do with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Access {
    /// Nothing yet.
    None,
    Loads,
    Stores,
}

impl Access {
    fn new(writable: bool) -> Access {
        if writable { Access::Stores } else { Access::Loads }
    }

    fn allows(self, direction: Direction) -> bool {
        match direction {
            Direction::Load => self >= Access::Loads,
            Direction::Store => self >= Access::Stores,
        }
    }
}

#[derive(Clone, Debug)]
struct MappedChunk {
    len: u64,
    access: Access,
    /// Of a private chunk, in the worker's table.
    private: Option<Fd>,
    /// The numbers of other devices that may load it here.
    loaders: Vec<u32>,
}

impl MappedChunk {
    fn new(len: u64, private: Option<Fd>) -> MappedChunk {
        MappedChunk { len, access: Access::None, private, loaders: Vec::new() }
    }
}

#[derive(Debug, Default)]
struct State {
    reserved: FirstFit,
    /// By offset in the window.
    mapped: BTreeMap<u64, MappedChunk>,
    /// Descriptors in the worker's table.
    handles: BTreeMap<u64, (Fd, u64)>,
    last_handle: u64,
    /// Kernels are running.
    cpu_access: bool,
}

/// All chunks of a device.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    window: OnceLock<Window>,
    state: Mutex<State>,
}

const BAD: ErrorKind = ErrorKind::BadAddress;

impl Chunks {
    /// Whether the address is in the window.
    pub(super) fn reserves(&self, addr: DeviceAddr) -> bool {
        self.window.get().is_some_and(|w| addr.0.wrapping_sub(w.base) < WINDOW)
    }

    /// Reserves `len` bytes; `publish` gets the window when it is new.
    pub(super) fn reserve(&self, len: u64, publish: impl FnOnce(DeviceAddr, u64) -> Result<()>) -> Result<DeviceAddr> {
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "reservation of a part of a chunk"));
        }
        let full = DeviceError::new(ErrorKind::NoMemory, "reservation");
        let mut state = self.lock();
        let window = match self.window.get() {
            Some(window) => *window,
            None => {
                let window = reserve_window()?;
                publish(DeviceAddr(window.base), WINDOW)?;
                let _ = self.window.set(window);
                window
            }
        };
        let at = state.reserved.alloc(0..WINDOW, len).ok_or(full)?;
        Ok(DeviceAddr(window.base + at))
    }

    pub(super) fn free_reservation(&self, addr: DeviceAddr, len: u64) -> Result<()> {
        let unknown = DeviceError::new(BAD, "end of a reservation");
        let (at, _) = self.locate(addr).ok_or(unknown)?;
        let mut state = self.lock();
        if state.reserved.find(at) != Some((at, len)) {
            return Err(unknown);
        }
        if state.mapped.range(at..at + len).next().is_some() {
            return Err(DeviceError::new(ErrorKind::Unsupported, "end of a reservation with chunks"));
        }
        state.reserved.free(at);
        Ok(())
    }

    /// A handle for a descriptor in the worker's table.
    pub(super) fn add_handle(&self, fd: Fd, len: u64) -> Chunk {
        let mut state = self.lock();
        state.last_handle += 1;
        let handle = state.last_handle;
        state.handles.insert(handle, (fd, len));
        Chunk(handle)
    }

    /// Removes it; the descriptor is the caller's now.
    pub(super) fn remove_handle(&self, chunk: Chunk) -> Result<Fd> {
        let removed = self.lock().handles.remove(&chunk.0);
        removed.map(|(fd, _)| fd).ok_or(DeviceError::new(BAD, "release of a chunk"))
    }

    /// Maps a chunk, without access; for the worker, whose table has the descriptor.
    pub(super) fn map(&self, addr: DeviceAddr, len: u64, chunk: Chunk) -> Result<()> {
        let outside = DeviceError::new(BAD, "mapping of a chunk");
        let (at, window) = self.locate(addr).ok_or(outside)?;
        let mut state = self.lock();
        let (fd, _) = *state.handles.get(&chunk.0).filter(|(_, whole)| *whole == len).ok_or(outside)?;
        window.map(&mut state, at, MappedChunk::new(len, None), fd)
    }

    /// Maps a memory file that has no handle, without access; for the worker, whose table has it until it is unmapped.
    pub(super) fn map_private(&self, addr: DeviceAddr, len: u64, fd: Fd) -> Result<()> {
        let (at, window) = self.locate(addr).ok_or(DeviceError::new(BAD, "mapping of a chunk"))?;
        window.map(&mut self.lock(), at, MappedChunk::new(len, Some(fd)), fd)?;
        // SAFETY: mapped above, and used by nothing yet.
        unsafe { core::ptr::write_bytes((window.alias + at) as *mut u8, POISON, len as usize) };
        Ok(())
    }

    /// The memory file of a private chunk, in the worker's table.
    pub(super) fn private_fd(&self, addr: DeviceAddr, len: u64) -> Result<Fd> {
        let unknown = DeviceError::new(BAD, "export of a chunk");
        let (at, _) = self.locate(addr).ok_or(unknown)?;
        let state = self.lock();
        state.mapped.get(&at).filter(|chunk| chunk.len == len).and_then(|chunk| chunk.private).ok_or(unknown)
    }

    /// Bytes of private chunks.
    pub(super) fn private_bytes(&self) -> u64 {
        self.lock().mapped.values().filter(|chunk| chunk.private.is_some()).map(|chunk| chunk.len).sum()
    }

    /// Changes what kernels and copies may do with the chunks of a range.
    pub(super) fn protect(&self, addr: DeviceAddr, len: u64, writable: bool) -> Result<()> {
        let outside = DeviceError::new(BAD, "protection of chunks");
        let (at, window) = self.locate(addr).ok_or(outside)?;
        let mut state = self.lock();
        if !state.covers(at, len) {
            return Err(outside);
        }
        let access = Access::new(writable);
        state.mapped.range_mut(at..at + len).for_each(|(_, chunk)| chunk.access = access);
        window.protect(at, len, state.kernel_protection(access))
    }

    /// Lets another device load chunks of a range, side by side, until each is unmapped.
    pub(super) fn allow_loads(&self, addr: DeviceAddr, len: u64, device: u32) -> Result<()> {
        let outside = DeviceError::new(BAD, "access to chunks");
        let (at, _) = self.locate(addr).ok_or(outside)?;
        let mut state = self.lock();
        if !state.covers(at, len) {
            return Err(outside);
        }
        state.mapped.range_mut(at..at + len).for_each(|(_, chunk)| {
            if !chunk.loaders.contains(&device) {
                chunk.loaders.push(device);
            }
        });
        Ok(())
    }

    /// Whether another device may load a range.
    pub(super) fn may_load(&self, addr: DeviceAddr, len: u64, device: u32) -> bool {
        let Some((at, _)) = self.locate(addr) else { return false };
        let state = self.lock();
        let Some((&first, _)) = state.mapped.range(..=at).next_back() else { return false };
        state.mapped.range(first..at + len.max(1)).all(|(_, chunk)| chunk.loaders.contains(&device))
    }

    /// Unmaps a chunk; the memory file of a private one is the caller's now.
    pub(super) fn unmap(&self, addr: DeviceAddr, len: u64) -> Result<Option<Fd>> {
        let unknown = DeviceError::new(BAD, "unmapping of a chunk");
        let (at, window) = self.locate(addr).ok_or(unknown)?;
        let mut state = self.lock();
        if state.mapped.get(&at).is_none_or(|chunk| chunk.len != len) {
            return Err(unknown);
        }
        let private = state.mapped.remove(&at).and_then(|chunk| chunk.private);
        window.clear(at, len);
        Ok(private)
    }

    /// The range of mapped chunks, side by side, that contains an address.
    pub(super) fn find(&self, addr: DeviceAddr) -> Option<(DeviceAddr, u64)> {
        let (at, window) = self.locate(addr)?;
        let state = self.lock();
        let (limit, room) = state.reserved.find(at)?;
        let mut around = state.mapped.range(..=at).rev().take_while(|(start, _)| **start >= limit);
        let (&(mut first), chunk) = around.next()?;
        let mut end = first + chunk.len;
        if end <= at {
            return None;
        }
        for (&start, chunk) in around {
            if start + chunk.len != first {
                break;
            }
            first = start;
        }
        for (&start, chunk) in state.mapped.range(end..limit + room) {
            if start != end {
                break;
            }
            end += chunk.len;
        }
        Some((DeviceAddr(window.base + first), end - first))
    }

    /// The engine's address of a range that lies in mapped chunks.
    pub(super) fn engine_addr(&self, addr: DeviceAddr, len: usize, direction: Direction) -> Option<u64> {
        let (at, window) = self.locate(addr)?;
        let end = at.checked_add(len as u64)?;
        let state = self.lock();
        let (&start, first) = state.mapped.range(..=at).next_back()?;
        let mut covered = start;
        for (&start, chunk) in std::iter::once((&start, first)).chain(state.mapped.range(start + 1..end.max(start + 1)))
        {
            if start != covered || !chunk.access.allows(direction) {
                return None;
            }
            covered = start + chunk.len;
        }
        (end <= covered).then_some(window.alias + at)
    }

    /// The first kernel begins.
    pub(super) fn grant_cpu_access(&self) -> Result<()> {
        let mut state = self.lock();
        state.cpu_access = true;
        let Some(window) = self.window.get() else { return Ok(()) };
        let protect =
            |(&at, chunk): (&u64, &MappedChunk)| window.protect(at, chunk.len, state.kernel_protection(chunk.access));
        state.mapped.iter().try_for_each(protect)
    }

    /// The last one has ended.
    pub(super) fn revoke_cpu_access(&self) {
        let mut state = self.lock();
        state.cpu_access = false;
        if let Some(window) = self.window.get() {
            for (&at, chunk) in &state.mapped {
                let _ = window.protect(at, chunk.len, PROT_NONE);
            }
        }
    }

    /// Handles, mappings and reservations.
    pub(super) fn in_use(&self) -> usize {
        let state = self.lock();
        state.handles.len() + state.mapped.len() + state.reserved.count()
    }

    fn locate(&self, addr: DeviceAddr) -> Option<(u64, Window)> {
        let window = *self.window.get()?;
        let at = addr.0.checked_sub(window.base).filter(|&at| at < WINDOW)?;
        Some((at, window))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether a range is whole chunks, side by side.
    fn covers(&self, at: u64, len: u64) -> bool {
        let mut end = at;
        for (&start, chunk) in self.mapped.range(at..at + len) {
            if start != end {
                return false;
            }
            end += chunk.len;
        }
        end == at + len
    }

    /// What the CPU may do, now, with a chunk under its device address.
    fn kernel_protection(&self, access: Access) -> u32 {
        match access {
            Access::Loads if self.cpu_access => PROT_READ,
            Access::Stores if self.cpu_access => READ_WRITE,
            _ => PROT_NONE,
        }
    }
}

impl Window {
    /// Maps a memory file of a chunk's length into both views.
    fn map(&self, state: &mut State, at: u64, chunk: MappedChunk, fd: Fd) -> Result<()> {
        let MappedChunk { len, access, .. } = chunk;
        let inside =
            state.reserved.find(at).is_some_and(|(start, room)| at - start <= room && room - (at - start) >= len);
        let before = state.mapped.range(..at + len).next_back();
        if !inside || before.is_some_and(|(start, mapped)| start + mapped.len > at) {
            return Err(DeviceError::new(BAD, "mapping of a chunk"));
        }
        let access = state.kernel_protection(access);
        let size = len as usize;
        // SAFETY: both ranges are of the window and have no chunk, so nothing uses them; the file cannot shrink.
        let mapped = unsafe {
            linux::mmap((self.base + at) as *mut u8, size, access, MAP_SHARED | MAP_FIXED, fd, 0).and_then(|_| {
                linux::mmap((self.alias + at) as *mut u8, size, READ_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
            })
        };
        if let Err(e) = mapped {
            self.clear(at, len);
            return Err(system_error("mmap", e));
        }
        self.exclude_from_children(at, len);
        state.mapped.insert(at, chunk);
        Ok(())
    }

    fn protect(&self, at: u64, len: u64, access: u32) -> Result<()> {
        // SAFETY: memory of a mapped chunk; a program that relies on its protection has the error that this detects.
        unsafe { linux::mprotect((self.base + at) as *mut u8, len as usize, access) }
            .map_err(|e| system_error("mprotect", e))
    }

    /// Replaces chunks by addresses without memory.
    fn clear(&self, at: u64, len: u64) {
        for view in [self.base, self.alias] {
            // SAFETY: a range of the window whose chunk no work uses any more, as `unmap_chunk` demands.
            let _ =
                unsafe { linux::mmap((view + at) as *mut u8, len as usize, PROT_NONE, RESERVED | MAP_FIXED, -1, 0) };
        }
        self.exclude_from_children(at, len);
    }

    /// A forked child has no device.
    fn exclude_from_children(&self, at: u64, len: u64) {
        // SAFETY: advice on our own mapping.
        unsafe {
            let _ = linux::madvise((self.alias + at) as *mut u8, len as usize, MADV_DONTFORK);
            let _ = linux::madvise((self.alias + at) as *mut u8, len as usize, MADV_DONTDUMP);
        }
    }
}

fn reserve_window() -> Result<Window> {
    let reserve = || {
        let len = (WINDOW + GRANULARITY) as usize;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe { linux::mmap(core::ptr::null_mut(), len, PROT_NONE, RESERVED, -1, 0) };
        at.map(|at| (at as u64).next_multiple_of(GRANULARITY)).map_err(|e| system_error("mmap", e))
    };
    let window = Window { base: reserve()?, alias: reserve()? };
    window.exclude_from_children(0, WINDOW);
    Ok(window)
}
