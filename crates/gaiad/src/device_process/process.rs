//! The process: requests from the socket, by several threads.
//!
//! ```text
//!   thread   request ── ranges in pieces ──> buffer 0 ── copied out ──┐ pwrite ──> file
//!                                            buffer 1 ── is filled ───┘ meanwhile
//! ```
//!
//! Each thread has a stream and a pinned buffer of its own for each of the two, on each device that it has used.

#![expect(unsafe_code, reason = "the device writes to memory of the process")]

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use spinio_device::{
    Chunk, Device, DeviceAddr, DeviceError, DeviceId, ErrorKind, PinnedBuffer, SharedMemory, StreamId, WaitMode,
    emulated, registry,
};
use spinio_sys::injection_point;
use spinio_sys::linux::packets::{self, Wait};

use super::messages::{CopyRange, REQUEST, Request, answer};
use crate::backing::reopen;
use crate::lock::lock;

/// Requests at a time. Each copies to memory that may be new, so that one thread is slower than the device.
const THREADS: usize = 6;
/// Bytes of a buffer.
const BUFFER: usize = 2 << 20;

/// `CUDA_ERROR_OUT_OF_MEMORY`, as it comes when a device is opened, whatever the kind of the error.
const CUDA_OUT_OF_MEMORY: i32 = 2;

/// What was imported.
struct Imported {
    device: &'static dyn Device,
    memory: &'static dyn SharedMemory,
    handle: Chunk,
    at: DeviceAddr,
    len: u64,
}

impl Drop for Imported {
    fn drop(&mut self) {
        // No copy uses it: each has a reference, and waits.
        if self.memory.unmap_chunk(self.at, self.len).is_ok() {
            let _ = self.memory.free_reservation(self.at, self.len);
        }
        let _ = self.memory.release_chunk(self.handle);
    }
}

/// A memory file, with its lock.
struct File {
    fd: OwnedFd,
    len: u64,
}

#[derive(Default)]
struct Process {
    chunks: Mutex<HashMap<u64, Arc<Imported>>>,
    files: Mutex<HashMap<u64, Arc<File>>>,
}

/// Serves requests until no server has the other end of the socket.
pub(crate) fn run(socket: &OwnedFd) -> Result<(), Errno> {
    if let Some(text) = std::env::var_os("SPINIO_EMULATED").as_deref().and_then(|text| text.to_str()) {
        let _ = emulated::configure(text);
    }
    let process = Process::default();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let body = || process.serve(socket);
            std::thread::Builder::new()
                .name("gaia-device".to_owned())
                .spawn_scoped(scope, body)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))?;
        }
        Ok(())
    })
}

impl Process {
    fn serve(&self, socket: &OwnedFd) {
        let mut lanes = HashMap::new();
        while let Some((bytes, fd)) = receive(socket) {
            // A message that is none has no id to answer.
            let Some((id, request)) = Request::parse(&bytes) else { return };
            injection_point!("device process: request received");
            let done = self.answer(request, fd, &mut lanes);
            injection_point!("device process: request done");
            let errno = done.err().map_or(0, Errno::raw_os_error);
            if packets::send(socket, &answer(id, errno), &[], Wait::Yes).is_err() {
                return;
            }
        }
    }

    fn answer(&self, request: Request, fd: Option<OwnedFd>, lanes: &mut HashMap<DeviceId, Lanes>) -> Result<(), Errno> {
        match request {
            Request::Import { chunk, device, len } => {
                let imported = import(device, &fd.ok_or(Errno::BADF)?, len)?;
                lock(&self.chunks).insert(chunk, Arc::new(imported));
                Ok(())
            }
            Request::File { file } => {
                // The lock is of this open file: it ends with this process.
                let fd = reopen(&fd.ok_or(Errno::BADF)?, OFlags::RDWR)?;
                rustix::io::retry_on_intr(|| flock(&fd, FlockOperation::LockExclusive))?;
                let len = rustix::fs::fstat(&fd)?.st_size as u64;
                lock(&self.files).insert(file, Arc::new(File { fd, len }));
                Ok(())
            }
            Request::Copy { chunk, file, ranges } => {
                let chunk = lock(&self.chunks).get(&chunk).cloned().ok_or(Errno::NOENT)?;
                let file = lock(&self.files).get(&file).cloned().ok_or(Errno::NOENT)?;
                copy(&chunk, &file, &ranges, lanes)
            }
            Request::Open { device } => registry::with_uuid(device).map(drop).map_err(not_opened),
            Request::Forget { chunk } => {
                let forgotten = lock(&self.chunks).remove(&chunk);
                drop(forgotten);
                Ok(())
            }
        }
    }
}

/// The next message, with a descriptor if it has one; `None`: the server has gone.
fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Option<OwnedFd>)> {
    let (mut bytes, mut fds) = (vec![0; REQUEST + 1], Vec::new());
    let received = packets::receive(socket, &mut bytes, 1, &mut fds, Wait::Yes).ok()?;
    bytes.truncate(received.bytes);
    (received.bytes > 0).then_some((bytes, fds.pop()))
}

fn import(uuid: [u8; 16], fd: &OwnedFd, len: u64) -> Result<Imported, Errno> {
    let device = registry::with_uuid(uuid).map_err(not_opened)?;
    let memory = device.shared_memory().ok_or(Errno::OPNOTSUPP)?;
    let least = memory.chunk_granularity().map_err(errno)?;
    if len == 0 || !len.is_multiple_of(least) {
        return Err(Errno::INVAL);
    }
    let handle = memory.import_chunk(fd.as_fd(), len).map_err(errno)?;
    let mapped = memory.reserve(len).and_then(|at| {
        memory.map_chunk(at, len, handle, false).map(|()| at).inspect_err(|_| {
            let _ = memory.free_reservation(at, len);
        })
    });
    match mapped {
        Ok(at) => Ok(Imported { device, memory, handle, at, len }),
        Err(error) => {
            let _ = memory.release_chunk(handle);
            Err(errno(error))
        }
    }
}

/// A device that has no memory for a context now is not one that is not there.
fn not_opened(error: DeviceError) -> Errno {
    if error.kind == ErrorKind::NoMemory || error.code == CUDA_OUT_OF_MEMORY { Errno::NOMEM } else { Errno::NODEV }
}

fn errno(error: DeviceError) -> Errno {
    match error.kind {
        ErrorKind::NoMemory => Errno::NOMEM,
        ErrorKind::Unsupported => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

/// A stream and a buffer, and where the bytes in it belong.
struct Lane {
    stream: StreamId,
    buffer: PinnedBuffer,
    used: usize,
    /// Offset in the file, in the buffer, length.
    pieces: Vec<(u64, usize, usize)>,
}

/// Those of a thread on a device; for the life of the process.
struct Lanes([Lane; 2]);

impl Lanes {
    fn new(device: &dyn Device) -> Result<Lanes, DeviceError> {
        let lane = || {
            let (stream, buffer) = (device.acquire_stream()?, device.alloc_pinned(BUFFER)?);
            Ok(Lane { stream, buffer, used: 0, pieces: Vec::new() })
        };
        Ok(Lanes([lane()?, lane()?]))
    }
}

impl Lane {
    /// Queues the copy of a piece that has room.
    fn queue(&mut self, device: &dyn Device, from: DeviceAddr, to: u64, len: usize) -> Result<(), Errno> {
        // SAFETY: the part of the buffer that nothing uses until `finish`, which waits; the chunk stays mapped as long as
        // the request has it.
        let into = unsafe { self.buffer.ptr.add(self.used) };
        // SAFETY: as above.
        unsafe { device.copy_out(self.stream, into, from, len) }.map_err(errno)?;
        self.pieces.push((to, self.used, len));
        self.used += len;
        Ok(())
    }

    /// Waits for what is queued, and writes it to the file.
    fn finish(&mut self, device: &dyn Device, file: Option<&File>) -> Result<(), Errno> {
        let pieces = std::mem::take(&mut self.pieces);
        self.used = 0;
        if pieces.is_empty() {
            return Ok(());
        }
        device.synchronize(self.stream, WaitMode::Context).map_err(errno)?;
        for (to, at, len) in pieces {
            // SAFETY: inside the buffer, which the device has filled and nothing writes now.
            let mut bytes = unsafe { core::slice::from_raw_parts(self.buffer.ptr.add(at), len) };
            let (Some(file), mut to) = (file, to) else { continue };
            while !bytes.is_empty() {
                let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(&file.fd, bytes, to))?;
                if written == 0 {
                    return Err(Errno::IO);
                }
                (bytes, to) = (&bytes[written..], to + written as u64);
            }
        }
        Ok(())
    }
}

fn copy(
    chunk: &Imported,
    file: &File,
    ranges: &[CopyRange],
    lanes: &mut HashMap<DeviceId, Lanes>,
) -> Result<(), Errno> {
    let device = chunk.device;
    let fits = |at: u64, len: u64, all: u64| at.checked_add(len).is_some_and(|end| end <= all);
    if !ranges.iter().all(|range| fits(range.from, range.len, chunk.len) && fits(range.to, range.len, file.len)) {
        return Err(Errno::INVAL);
    }
    let Lanes(lanes) = match lanes.entry(device.id()) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Lanes::new(device).map_err(errno)?),
    };
    let mut now = 0;
    let mut copied = Ok(());
    'all: for range in ranges {
        let mut done = 0;
        while done < range.len {
            if lanes[now].used == BUFFER {
                // The other one is written while this one is filled.
                now = 1 - now;
                copied = lanes[now].finish(device, Some(file));
                if copied.is_err() {
                    break 'all;
                }
            }
            let room = (BUFFER - lanes[now].used) as u64;
            let len = room.min(range.len - done);
            copied = lanes[now].queue(device, chunk.at.offset(range.from + done), range.to + done, len as usize);
            if copied.is_err() {
                break 'all;
            }
            done += len;
        }
    }
    // After an error too: the device may still write to the buffers. Then nothing more is written to the file.
    for lane in [1 - now, now] {
        let finished = lanes[lane].finish(device, copied.is_ok().then_some(file));
        copied = copied.and(finished);
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_without_memory_for_a_context_is_told_from_one_that_is_not_there() {
        let error = |kind, code| not_opened(DeviceError { kind, operation: "open", code });
        assert_eq!(error(ErrorKind::Unsupported, 2), Errno::NOMEM);
        assert_eq!(error(ErrorKind::NoMemory, 0), Errno::NOMEM);
        assert_eq!(error(ErrorKind::Unsupported, 0), Errno::NODEV);
        assert_eq!(error(ErrorKind::Unsupported, 101), Errno::NODEV);
    }
}
