//! The memory of a net: one pinned block that kernels and the proxy share, and device memory for kernels alone.
//!
//! Both are made when the net is opened, and filled before a kernel sees them. What the parts are: [`spinio_ring::layout`].
//!
//! Connections over shared memory have theirs in granules ([`crate::granules`]); the rest no other process can see.

#![expect(unsafe_code, reason = "memory that GPU kernels access at the same time")]

use std::ffi::CString;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use spinio_device::{Device, DeviceAddr, DeviceError, PinnedBuffer, SharedMemory, WaitMode};
use spinio_ring::layout::{
    DOORBELL_BYTES, DOORBELLS, EVENT_WORDS_BYTES, FAR_PEERS, FILE_BUFFER_BYTES, FILE_BUFFERS, Handle, LINE_BYTES,
    MAGIC, MAILBOX_BYTES, OWN_PEERS, PAGE, PATH_BYTES, PEER_BYTES, RECORD_BYTES, Sizes, WAIT_BYTES, header,
};
use spinio_ring::{Position, Word};
use spinio_sys::Errno;
use spinio_sys::linux::datagram::{self, Part};
use spinio_sys::linux::rights::Rights;
use spinio_sys::linux::socket::SocketAddress;
use spinio_sys::linux::{self, Fd, socket};

use crate::granules::Granules;
use crate::socket_fd::SocketFd;
use crate::{Error, Result};

/// Set where the library is built with ThreadSanitizer (`cargo x net-soak --sanitizer thread`).
const SANITIZE_THREAD: bool = option_env!("SPINIO_SANITIZE_THREAD").is_some();

/// Addresses for memory of connections to other devices.
const WINDOW_BYTES: u64 = (OWN_PEERS as u64 + FAR_PEERS as u64) * PEER_BYTES;

/// The memory. It is freed by [`Memory::free`] alone, on a thread that may call the device.
pub(crate) struct Memory {
    device: &'static dyn SharedMemory,
    pinned: PinnedBuffer,
    device_start: DeviceAddr,
    device_bytes: u64,
    sizes: Sizes,
    first: u64,
    /// Offset in device memory of the rings of connections inside the net.
    device_rings: u64,
    /// Offset of the file buffers in pinned memory, 0: there are none.
    file_buffers: usize,
    granules: Option<Granules>,
    /// Addresses at which memory of connections to other devices is mapped as it is needed (importer.rs).
    window: Option<DeviceAddr>,
}

/// What kernels have to know of the memory, and how much of it there is for bytes.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) sizes: Sizes,
    /// Of each ring.
    pub(crate) ring_bytes: u64,
    /// Pairs of rings in pinned memory.
    pub(crate) ring_pairs: u32,
    /// The same in device memory, for connections inside the net.
    pub(crate) inner_pairs: u32,
    /// Connections over memory that a program maps too, at most.
    pub(crate) granules: u32,
    /// Kernels may open files, which takes buffers.
    pub(crate) has_files: bool,
    pub(crate) first: Position,
}

/// Descriptors of the granules, and why there are not as many as planned.
pub(crate) struct GranuleFiles {
    pub(crate) files: Vec<SocketFd>,
    pub(crate) failed: Option<Errno>,
}

impl Memory {
    /// Allocates it; also the descriptors of the granules.
    pub(crate) fn new(device: &'static dyn Device, plan: Plan) -> Result<(Memory, GranuleFiles)> {
        let sizes = plan.sizes;
        let rings = |pairs: u32| u64::from(pairs) * 2 * plan.ring_bytes;
        let Some(device) = device.shared_memory() else {
            let sentence = format!("{} has no virtual memory management, which a net needs", device.id());
            return Err(Error::new(Errno::NOTSUP, sentence));
        };
        let failed = |e| Error::device(e, "allocate device memory for a net");
        let granularity = device.chunk_granularity().map_err(failed)?;
        let cleared_device = sizes.device_rings(plan.inner_pairs);
        let device_bytes = (cleared_device as u64 + rings(plan.inner_pairs)).next_multiple_of(granularity);
        let end_of_rings = sizes.rings() + rings(plan.ring_pairs) as usize;
        let file_buffers = if plan.has_files { end_of_rings } else { 0 };
        let file_bytes = if plan.has_files { FILE_BUFFERS as usize * FILE_BUFFER_BYTES } else { 0 };
        let bytes = (end_of_rings + file_bytes).max(cleared_device);
        let pinned = device.alloc_pinned(bytes).map_err(|e| Error::device(e, "allocate pinned memory for a net"))?;
        // Not the rings, of which pages that no connection uses need no memory on the emulated device.
        let cleared = sizes.rings().max(cleared_device);
        // SAFETY: nothing else uses the new block, which is longer.
        unsafe { pinned.ptr.write_bytes(0, cleared) };
        let free_pinned = |e: DeviceError| {
            device.free_pinned(pinned);
            failed(e)
        };
        let device_start = device.reserve(device_bytes).map_err(free_pinned)?;
        let (first, device_rings) = (plan.first.bits(), cleared_device as u64);
        let (files, failed_file) = Granules::files(plan.granules, plan.ring_bytes);
        let granules = Granules::new(device, &files, plan.ring_bytes);
        let files = if granules.is_some() { files } else { Vec::new() };
        let window =
            if granules.is_some() && granularity == PEER_BYTES { device.reserve(WINDOW_BYTES).ok() } else { None };
        let memory = Memory {
            device,
            pinned,
            device_start,
            device_bytes,
            sizes,
            first,
            device_rings,
            file_buffers,
            granules,
            window,
        };
        let mapped = device.map_private_chunks(device_start, &[device_bytes]).and_then(|count| {
            if count == 1 {
                device.protect_chunks(device_start, device_bytes, true).inspect_err(|_| {
                    let _ = device.unmap_chunk(device_start, device_bytes);
                })?;
            }
            Ok(count)
        });
        if !matches!(mapped, Ok(1)) {
            if let Some(granules) = &memory.granules {
                granules.free(device);
            }
            let _ = device.free_reservation(device_start, device_bytes);
            if let Some(window) = window {
                let _ = device.free_reservation(window, WINDOW_BYTES);
            }
            device.free_pinned(pinned);
            let none = || Error::new(Errno::NOMEM, "The device has no memory left for a net");
            return Err(mapped.map_or_else(failed, |_| none()));
        }
        if let Err(error) = memory.clear_device_memory() {
            let _ = memory.free();
            return Err(failed(error));
        }
        memory.words(0, 8)[header::MAGIC].store_release(MAGIC);
        Ok((memory, GranuleFiles { files, failed: failed_file }))
    }

    fn clear_device_memory(&self) -> core::result::Result<(), DeviceError> {
        let stream = self.device.acquire_stream()?;
        // SAFETY: the pinned block is as long, not written until the copy has been waited for, and stays allocated.
        let queued =
            unsafe { self.device.copy_in(stream, self.device_start, self.pinned.ptr, self.device_rings as usize) };
        let done = queued.and_then(|()| self.device.synchronize(stream, WaitMode::Block));
        self.device.release_stream(stream);
        done
    }

    /// Gives it back. Neither a kernel nor the proxy may use it any more. Host memory goes also where the device keeps its own, as one
    /// does whose kernel has failed: the first error says so.
    pub(crate) fn free(&self) -> Result<()> {
        let freed = self.free_device_memory();
        self.device.free_pinned(self.pinned);
        if let Some(granules) = &self.granules {
            granules.free(self.device);
        }
        freed.map_err(|e| Error::device(e, "give the memory of a net back"))
    }

    /// Addresses last, and none at which memory may still be mapped.
    fn free_device_memory(&self) -> core::result::Result<(), DeviceError> {
        self.device.unmap_chunk(self.device_start, self.device_bytes)?;
        let freed = self.device.free_reservation(self.device_start, self.device_bytes);
        let window = self.window.map_or(Ok(()), |window| self.device.free_reservation(window, WINDOW_BYTES));
        freed.and(window)
    }

    /// The argument of kernels.
    pub(crate) fn handle(&self) -> Result<Handle> {
        let pinned = self.device.device_ptr(self.pinned.ptr);
        Ok(Handle {
            pinned: pinned.map_err(|e| Error::device(e, "find the device's address of pinned memory"))?,
            device: self.device_start.0,
            sockets: self.sizes.sockets,
            mailboxes: self.sizes.mailboxes,
            peers: self.window.map_or(0, |window| window.0),
            rings: self.device_start.0 + self.device_rings,
            first: self.first,
            files: self.file_buffers as u64,
            waits: self.sizes.waits() as u64,
        })
    }

    /// Where memory of connections to other devices can be mapped.
    pub(crate) fn window(&self) -> Option<DeviceAddr> {
        self.window
    }

    /// The words of a granule's ends.
    pub(crate) fn granule(&self, number: u32) -> Option<&[AtomicU64]> {
        self.granules.as_ref().map(|granules| granules.words(number))
    }

    /// Where kernels see a granule.
    pub(crate) fn granule_address(&self, number: u32) -> u64 {
        self.granules.as_ref().map_or(0, |granules| granules.device_address(number))
    }

    fn words(&self, offset: usize, bytes: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && offset + bytes <= self.sizes.rings());
        // SAFETY: inside the block, whose start is aligned to a page; all accesses of the host to this part are atomic.
        unsafe { core::slice::from_raw_parts(self.pinned.ptr.add(offset).cast::<AtomicU64>(), bytes / 8) }
    }

    /// The header.
    pub(crate) fn header(&self) -> &[AtomicU64] {
        self.words(0, self.sizes.doorbells())
    }

    /// The doorbell queue.
    pub(crate) fn doorbells(&self) -> &[AtomicU64] {
        self.words(self.sizes.doorbells(), DOORBELLS * DOORBELL_BYTES)
    }

    /// The record of a socket.
    pub(crate) fn record(&self, socket: u32) -> &[AtomicU64] {
        self.words(self.sizes.records() + socket as usize * RECORD_BYTES, RECORD_BYTES)
    }

    /// The line that kernels read.
    pub(crate) fn device_line(&self, socket: u32) -> &[AtomicU64] {
        self.words(self.sizes.device_lines() + socket as usize * LINE_BYTES, LINE_BYTES)
    }

    /// The line that kernels write.
    pub(crate) fn host_line(&self, socket: u32) -> &[AtomicU64] {
        self.words(self.sizes.host_lines() + socket as usize * LINE_BYTES, LINE_BYTES)
    }

    /// The words of groups that wait for a socket.
    pub(crate) fn waits(&self, socket: u32) -> &[AtomicU64] {
        self.words(self.sizes.waits() + socket as usize * WAIT_BYTES, WAIT_BYTES)
    }

    /// Request and reply of a mailbox.
    pub(crate) fn mailbox(&self, mailbox: u32) -> (&[AtomicU64], &[AtomicU64]) {
        self.words(self.sizes.mailboxes() + mailbox as usize * MAILBOX_BYTES, MAILBOX_BYTES).split_at(LINE_BYTES / 8)
    }

    /// The words of an event set.
    pub(crate) fn event_words(&self, set: u32) -> &[AtomicU64] {
        self.words(self.sizes.event_sets() + set as usize * EVENT_WORDS_BYTES, EVENT_WORDS_BYTES)
    }

    /// The ring of an event set.
    pub(crate) fn event_ring(&self, set: u32) -> &[AtomicU64] {
        self.words(self.sizes.event_sets() + PAGE + set as usize * PAGE, PAGE)
    }

    fn ring(&self, offset: u64, len: usize) -> *mut u8 {
        let offset = offset as usize;
        assert!(
            offset >= self.sizes.rings() && offset + len <= self.pinned.len,
            "a ring is outside the memory of its net"
        );
        // SAFETY: inside the block, as just checked.
        unsafe { self.pinned.ptr.add(offset) }
    }

    /// A word of a record in a ring.
    pub(crate) fn ring_word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: inside the block; the host accesses words of records only as atomics.
        unsafe { &*self.ring(offset, 8).cast::<AtomicU64>() }
    }

    /// Sends a datagram of which the payload is in two parts of a ring: offsets and lengths.
    pub(crate) fn send_message(
        &self,
        fd: Fd,
        parts: [(u64, usize); 2],
        address: &[u8],
    ) -> core::result::Result<usize, Errno> {
        let parts = parts.map(|(offset, len)| {
            self.read_by_system(offset, len);
            Part { start: self.ring(offset, len), len }
        });
        // SAFETY: inside the block; a kernel that changes bytes which it has sent changes only what its peer gets.
        unsafe { datagram::send_message(fd, &parts, address) }
    }

    /// Receives a datagram into two parts of a ring.
    pub(crate) fn recv_message(
        &self,
        fd: Fd,
        parts: [(u64, usize); 2],
        rights: Option<&mut Rights>,
    ) -> core::result::Result<(usize, SocketAddress), Errno> {
        let system_parts = parts.map(|(offset, len)| Part { start: self.ring(offset, len), len });
        // SAFETY: inside the block, and no Rust code reads or writes payloads.
        let done = unsafe { datagram::recv_message(fd, &system_parts, rights) };
        let mut left = done.as_ref().map_or(0, |(received, _)| *received);
        for (offset, len) in parts {
            self.written_by_system(offset, left.min(len));
            left -= left.min(len);
        }
        done
    }

    /// The first `len` bytes of a file buffer, if kernels have it and it has as many.
    fn file_buffer(&self, buffer: u32, len: usize) -> core::result::Result<*mut u8, Errno> {
        if self.file_buffers == 0 || buffer >= FILE_BUFFERS || len > FILE_BUFFER_BYTES {
            return Err(Errno::INVAL);
        }
        Ok(self.ring((self.file_buffers + buffer as usize * FILE_BUFFER_BYTES) as u64, len))
    }

    /// Reads bytes of a file into a file buffer.
    pub(crate) fn read_file(&self, fd: Fd, buffer: u32, len: usize, at: u64) -> core::result::Result<usize, Errno> {
        let to = self.file_buffer(buffer, len)?;
        // SAFETY: inside the block, and no Rust code has a reference to bytes of file buffers.
        unsafe { linux::pread(fd, to, len, at) }
    }

    /// Writes bytes of a file buffer into a file.
    pub(crate) fn write_file(&self, fd: Fd, buffer: u32, len: usize, at: u64) -> core::result::Result<usize, Errno> {
        let from = self.file_buffer(buffer, len)?;
        // SAFETY: inside the block; a kernel that changes the bytes meanwhile changes only what it writes.
        unsafe { linux::pwrite(fd, from, len, at) }
    }

    /// The path that a kernel has stored in a file buffer, each byte loaded once.
    pub(crate) fn path(&self, buffer: u32) -> core::result::Result<CString, Errno> {
        let from = self.file_buffer(buffer, PATH_BYTES + 1)?;
        let byte = |at: usize| {
            // SAFETY: inside the block, and all accesses of Rust code to it are atomic.
            unsafe { AtomicU8::from_ptr(from.add(at)) }.load(Relaxed)
        };
        let path: Vec<u8> = (0..=PATH_BYTES).map(byte).take_while(|byte| *byte != 0).collect();
        if path.len() > PATH_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
        CString::new(path).map_err(|_| Errno::INVAL)
    }

    /// A byte of a ring; `at` is taken modulo its size.
    fn bytes(&self, ring: u64, size: u64, at: u64) -> &AtomicU8 {
        let place = self.ring(ring + (at & (size - 1)), 1);
        // SAFETY: inside the block; kernels may change it meanwhile, and all accesses of Rust code to rings are atomic.
        unsafe { AtomicU8::from_ptr(place) }
    }

    /// The bytes of a ring of `size` bytes, from a position on.
    pub(crate) fn load(&self, ring: u64, size: u64, first: Position) -> impl Iterator<Item = u8> {
        (first.bits()..).map(move |at| self.bytes(ring, size, at).load(Relaxed))
    }

    /// Sends bytes of a ring.
    pub(crate) fn send(&self, fd: Fd, offset: u64, len: usize) -> core::result::Result<usize, Errno> {
        self.read_by_system(offset, len);
        // SAFETY: inside the block; a kernel that changes bytes which it has sent changes only what its peer gets.
        unsafe { socket::send(fd, self.ring(offset, len), len) }
    }

    /// Receives bytes into a ring.
    pub(crate) fn recv(&self, fd: Fd, offset: u64, len: usize) -> core::result::Result<usize, Errno> {
        // SAFETY: inside the block, and no Rust code has a reference to bytes of rings meanwhile.
        let done = unsafe { socket::recv(fd, self.ring(offset, len), len) };
        self.written_by_system(offset, done.unwrap_or(0));
        done
    }

    /// The same with descriptors that come with them.
    pub(crate) fn recv_with_rights(
        &self,
        fd: Fd,
        offset: u64,
        len: usize,
        rights: &mut Rights,
    ) -> core::result::Result<usize, Errno> {
        // SAFETY: as above.
        let done = unsafe { datagram::recv_with_rights(fd, self.ring(offset, len), len, rights) };
        self.written_by_system(offset, done.unwrap_or(0));
        done
    }

    /// ThreadSanitizer does not see what a system call does with memory: in its build, this thread reads the bytes too.
    fn read_by_system(&self, offset: u64, len: usize) {
        if SANITIZE_THREAD {
            for at in 0..len {
                // SAFETY: inside the block. In order after what the kernel wrote, if the protocol is right: this shows it.
                unsafe { self.ring(offset, len).add(at).read_volatile() };
            }
        }
    }

    /// The same for bytes that a system call has written.
    fn written_by_system(&self, offset: u64, len: usize) {
        if SANITIZE_THREAD {
            for at in 0..len {
                // SAFETY: as above, and no kernel uses the bytes before they are published.
                unsafe {
                    let byte = self.ring(offset, len).add(at);
                    byte.write_volatile(byte.read_volatile());
                }
            }
        }
    }
}
