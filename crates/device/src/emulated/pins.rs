//! Pins: pipes that reference the pages of a file mapping.
//!
//! ```text
//!   pin        page cache ──vmsplice──> [p][p][p]...   a pipe: references to the pages themselves
//!   copy       [p][p][p] ──tee──> scratch pipe ──read──> device memory
//!   unpin      close the pipe
//! ```
//!
//! A pipe that `vmsplice` filled references the pages of the page cache themselves, as a driver's registration does: it
//! sees later stores to them, and when the file is truncated or written with O_DIRECT they become orphans that still
//! contain the old bytes. So a stale pin returns wrong bytes here too.
//!
//! `tee` leaves the pin whole, so a pin may be copied from in any order and any number of times.
//!
//! Every function here that uses a descriptor must run on a thread with an unshared fd table.
//!
//! The Linux kernel limits the pipes of an ordinary user: 64 MiB in all of its processes, then two pages each. So a
//! device has pipes only while it has pins, and two devices with all their pins stay within the limit.
//!
//! Known flaws: beyond that limit pins are refused, as no driver does; and a copy from the middle of a pin reads past
//! the bytes it skips.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, PAGE};

use crate::host_memory::system_error;
use crate::{DeviceError, ErrorKind};

/// The largest pin in bytes.
pub(super) const MAX_PIN: usize = 1 << 20;
/// The most pipes of pins; with the scratch pipe less than half of an ordinary user's limit.
const MAX_PIPES: usize = 28;

/// A pipe; closed when dropped.
#[derive(Debug)]
struct Pipe {
    read_end: Fd,
    write_end: Fd,
    capacity: usize,
}

impl Pipe {
    fn new(wanted: usize) -> Result<Pipe, Errno> {
        let (out, into) = linux::pipe()?;
        let capacity = linux::set_pipe_size(into, wanted).or_else(|_| linux::pipe_size(into)).unwrap_or(PAGE);
        Ok(Pipe { read_end: out, write_end: into, capacity })
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let _ = linux::close(self.read_end);
        let _ = linux::close(self.write_end);
    }
}

fn refused(errno: Errno) -> DeviceError {
    DeviceError { kind: ErrorKind::PinRefused, operation: "vmsplice", code: errno.raw_os_error() }
}

/// Part of a pin.
#[derive(Debug)]
struct Chunk {
    pipe: Pipe,
    len: usize,
}

/// All pins of a device.
#[derive(Debug, Default)]
pub(super) struct Pins {
    table: Mutex<PinTable>,
}

#[derive(Debug, Default)]
struct PinTable {
    last_handle: u64,
    pipes: usize,
    pins: BTreeMap<u64, Arc<Vec<Chunk>>>,
    /// While there are pins.
    scratch: Option<Arc<Scratch>>,
}

/// For copying from pins: a pipe for a second reference, and a buffer for skipped bytes.
#[derive(Debug)]
struct Scratch {
    /// The reachable part of a pin: a chunk is at most this long.
    capacity: usize,
    buffer: Mutex<ScratchBuffer>,
}

#[derive(Debug)]
struct ScratchBuffer {
    pipe: Pipe,
    skipped: Vec<u8>,
}

impl Scratch {
    fn new() -> Result<Scratch, Errno> {
        // One more page, for a pin that begins inside a page; but then the capacity is doubled, which may be forbidden.
        let mut pipe = Pipe::new(MAX_PIN + PAGE)?;
        if pipe.capacity < MAX_PIN {
            pipe.capacity = linux::set_pipe_size(pipe.write_end, MAX_PIN).unwrap_or(pipe.capacity);
        }
        let (capacity, skipped) = (pipe.capacity, vec![0; pipe.capacity]);
        Ok(Scratch { capacity, buffer: Mutex::new(ScratchBuffer { pipe, skipped }) })
    }
}

impl Pins {
    /// Pins a range. Only the thread that calls [`Pins::unpin`] may call this.
    ///
    /// # Safety
    /// The range must stay mapped until this returns, and its pages must stay meaningful until it is unpinned.
    pub(super) unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<u64, DeviceError> {
        if len == 0 || len > MAX_PIN {
            return Err(refused(Errno::INVAL));
        }
        // SAFETY: as above.
        let pinned = self.scratch_capacity().and_then(|capacity| unsafe { self.pin_chunks(ptr, len, capacity) });
        if pinned.is_err() {
            self.close_unused_scratch();
        }
        pinned
    }

    /// # Safety
    /// As for [`Pins::pin`].
    unsafe fn pin_chunks(&self, ptr: *const u8, len: usize, chunk_capacity: usize) -> Result<u64, DeviceError> {
        let mut chunks = PinBuilder { pins: self, chunks: Vec::new() };
        let mut at = 0;
        while at < len {
            self.reserve().ok_or_else(|| refused(Errno::NFILE))?;
            // SAFETY: inside the caller's range.
            let from = unsafe { ptr.add(at) };
            let into_page = from as usize % PAGE;
            let wanted = (len - at + into_page).next_multiple_of(PAGE).min(chunk_capacity);
            let pipe = match Pipe::new(wanted) {
                Ok(pipe) => pipe,
                Err(errno) => {
                    self.unreserve(1);
                    return Err(refused(errno));
                }
            };
            let room = (pipe.capacity.min(chunk_capacity) - into_page).min(len - at);
            // SAFETY: the caller expects the pages as they are when they are read.
            let got = unsafe { linux::vmsplice(pipe.write_end, from, room) };
            let len = *got.as_ref().unwrap_or(&0);
            chunks.chunks.push(Chunk { pipe, len });
            if len == 0 {
                return Err(refused(got.err().unwrap_or(Errno::FAULT)));
            }
            at += len;
        }
        let chunks = core::mem::take(&mut chunks.chunks);
        let mut held = self.lock_table();
        held.last_handle += 1;
        let handle = held.last_handle;
        held.pins.insert(handle, Arc::new(chunks));
        Ok(handle)
    }

    /// Removes a pin.
    pub(super) fn unpin(&self, handle: u64) {
        let removed = self.lock_table().pins.remove(&handle);
        if let Some(chunks) = removed {
            self.unreserve(chunks.len());
        }
        self.close_unused_scratch();
    }

    /// The capacity of the scratch pipe, which is opened if there is none.
    fn scratch_capacity(&self) -> Result<usize, DeviceError> {
        let mut held = self.lock_table();
        if held.scratch.is_none() {
            held.scratch = Some(Arc::new(Scratch::new().map_err(refused)?));
        }
        Ok(held.scratch.as_ref().map_or(0, |scratch| scratch.capacity))
    }

    /// A copy in flight closes it instead, when it is done.
    fn close_unused_scratch(&self) {
        let mut held = self.lock_table();
        if held.pins.is_empty() {
            held.scratch = None;
        }
    }

    /// Whether the pin exists and contains the range.
    pub(super) fn contains_range(&self, handle: u64, offset: usize, len: usize) -> bool {
        let held = self.lock_table();
        let total = held.pins.get(&handle).map(|chunks| chunks.iter().map(|c| c.len).sum::<usize>());
        total.is_some_and(|total| offset.checked_add(len).is_some_and(|end| end <= total))
    }

    /// The numbers of pins and of pipes.
    pub(super) fn in_use(&self) -> (usize, usize) {
        let held = self.lock_table();
        (held.pins.len(), held.pipes + usize::from(held.scratch.is_some()))
    }

    /// Copies from a pin.
    ///
    /// # Safety
    /// `dst` must be writable for `len` bytes.
    pub(super) unsafe fn read(&self, handle: u64, offset: usize, dst: *mut u8, len: usize) -> Result<(), DeviceError> {
        let gone = DeviceError::new(ErrorKind::BadAddress, "copy from a pin");
        let held = self.lock_table();
        let chunks = held.pins.get(&handle).cloned().ok_or(gone)?;
        let scratch = held.scratch.clone().ok_or(gone)?;
        drop(held);
        let mut scratch = scratch.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut skip, mut done) = (offset, 0);
        for chunk in chunks.iter() {
            if skip >= chunk.len {
                skip -= chunk.len;
                continue;
            }
            let part = (chunk.len - skip).min(len - done);
            if part == 0 {
                break;
            }
            // SAFETY: `dst` has room for `len` bytes, of which `done + part` are used.
            unsafe { scratch.read(chunk, skip, dst.add(done), part) }?;
            done += part;
            skip = 0;
        }
        if done == len { Ok(()) } else { Err(gone) }
    }

    fn lock_table(&self) -> MutexGuard<'_, PinTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve(&self) -> Option<()> {
        let mut held = self.lock_table();
        (held.pipes < MAX_PIPES).then(|| held.pipes += 1)
    }

    fn unreserve(&self, pipes: usize) {
        self.lock_table().pipes -= pipes;
    }
}

/// Chunks of an unfinished pin; released on failure.
struct PinBuilder<'a> {
    pins: &'a Pins,
    chunks: Vec<Chunk>,
}

impl Drop for PinBuilder<'_> {
    fn drop(&mut self) {
        self.pins.unreserve(self.chunks.len());
    }
}

impl ScratchBuffer {
    /// # Safety
    /// `dst` must be writable for `len` bytes.
    unsafe fn read(&mut self, chunk: &Chunk, skip: usize, dst: *mut u8, len: usize) -> Result<(), DeviceError> {
        let fail = |e| system_error("copy from a pin", e);
        let available = linux::tee(chunk.pipe.read_end, self.pipe.write_end, skip + len).map_err(fail)?;
        if available < skip + len {
            // Bytes left in the scratch pipe would be read first next time.
            self.pipe = Pipe::new(self.pipe.capacity).map_err(fail)?;
            return Err(fail(Errno::IO));
        }
        let (mut skip, mut done) = (skip, 0);
        while done < len {
            let (first, second) = ((self.skipped.as_mut_ptr(), skip), (dst.wrapping_add(done), len - done));
            // SAFETY: `skipped` holds as much as the pipe; `dst` has room for `len` bytes, of which `done` are filled.
            let got = unsafe { linux::readv_pair(self.pipe.read_end, first, second) }.map_err(fail)?;
            let skip_result = got.min(skip);
            skip -= skip_result;
            done += got - skip_result;
        }
        Ok(())
    }
}
