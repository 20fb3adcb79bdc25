//! Registers and maps memory of other nets for the device, and makes what is mapped there, on a thread of the program.
//!
//! ```text
//!   proxy: was offered a granule, has mapped it ──> importer ── registers it ───────────────> proxy: where kernels see it
//!   proxy: was offered device memory ─────────────> importer ── maps it into the window ────> proxy: kernels may use it
//!   proxy: offers device memory ──────────────────> importer ── makes it, maps it, exports it ──> proxy: its descriptor
//!   proxy has ended ──> importer ── takes everything back ──> the net is closed
//! ```
//!
//! The proxy cannot: a driver finds its descriptors in the program's table, and a call of it may wait. Drivers were seen to
//! register and map memory beside running kernels, but they take it back only when none runs, so that waits for the end.

#![expect(unsafe_code, reason = "descriptors that come from another table")]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use spinio_device::{Chunk, DeviceAddr, SharedMemory};
use spinio_ring::layout::PEER_BYTES;
use spinio_sys::linux::socket_move::{Passage, receive_descriptor};
use spinio_sys::linux::{self, spawn_signals_blocked};

use crate::mapped_granule::MappedGranule;
use crate::socket_fd::Place;

/// Of the thread: a driver's call needs more than our own code.
const STACK_BYTES: usize = 256 << 10;

/// What the proxy wants.
pub(crate) enum Request {
    /// A granule that it has mapped, and its number there.
    Register(u32, Arc<MappedGranule>),
    /// Memory of this device, at a place of the window.
    Make(u16),
    /// Memory of another net, at a place of the window. Its descriptor comes through the passage.
    Map(u16),
}

/// What came of it.
pub(crate) enum Answer {
    /// Kernels see the granule here; or it cannot be registered.
    Registered(u32, Option<u64>),
    /// The memory, and its descriptor in the program's table; or there is none.
    Made(u16, Option<Place>),
    /// Whether kernels can use the memory.
    Mapped(u16, bool),
}

/// How the proxy reaches it.
pub(crate) struct Access {
    pub(crate) requests: Sender<Request>,
    /// Its end of the passage, in the program's table.
    pub(crate) passage: Place,
}

struct Importer {
    device: &'static dyn SharedMemory,
    window: Option<DeviceAddr>,
    passage: Passage,
    registered: Vec<Arc<MappedGranule>>,
    mapped: Vec<DeviceAddr>,
    exported: Vec<OwnedFd>,
}

/// Starts it: where requests go, and what is disconnected once all is given back. Without a thread for it there is none, and
/// kernels that connect to other nets stay with Linux.
pub(crate) fn start(
    device: &'static dyn SharedMemory,
    window: Option<DeviceAddr>,
    tell: impl Fn(Answer) + Send + 'static,
) -> Option<(Access, Receiver<()>)> {
    let (requests, receiver) = mpsc::channel();
    let passage = Passage::new().ok()?;
    let outer = Place { tid: linux::gettid(), fd: passage.outer };
    let (alive, ended) = mpsc::sync_channel::<()>(1);
    let body = move || {
        let _alive = alive;
        let mut importer =
            Importer { device, window, passage, registered: Vec::new(), mapped: Vec::new(), exported: Vec::new() };
        while let Ok(request) = receiver.recv() {
            tell(importer.answer(request));
        }
        importer.end();
    };
    spawn_signals_blocked("spinio-net-map", STACK_BYTES, body).ok()?;
    Some((Access { requests, passage: outer }, ended))
}

impl Importer {
    fn answer(&mut self, request: Request) -> Answer {
        match request {
            Request::Register(number, granule) => {
                let mut address = None;
                if granule.register(self.device) {
                    address = granule.device_address(self.device);
                    self.registered.push(granule);
                }
                Answer::Registered(number, address)
            }
            Request::Make(place) => Answer::Made(place, self.make(place).map(|fd| Place { tid: linux::gettid(), fd })),
            Request::Map(place) => Answer::Mapped(place, self.map(place).is_some()),
        }
    }

    fn address(&self, place: u16) -> Option<DeviceAddr> {
        self.window.map(|window| window.offset(u64::from(place) * PEER_BYTES))
    }

    /// Its descriptor, in the program's table.
    fn make(&mut self, place: u16) -> Option<linux::Fd> {
        let (chunk, fd) = self.device.create_chunk(PEER_BYTES).ok()?;
        self.put(place, chunk)?;
        let number = fd.as_raw_fd();
        self.exported.push(fd);
        Some(number)
    }

    fn map(&mut self, place: u16) -> Option<()> {
        let fd = receive_descriptor(self.passage.inner).ok()?;
        // SAFETY: opened in the line above, and owned by nothing else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let chunk = self.device.import_chunk(fd.as_fd(), PEER_BYTES).ok()?;
        self.put(place, chunk)
    }

    /// Maps a chunk, which lives as long as that.
    fn put(&mut self, place: u16, chunk: Chunk) -> Option<()> {
        let address = self.address(place)?;
        let mapped = self.device.map_chunk(address, PEER_BYTES, chunk, true);
        let _ = self.device.release_chunk(chunk);
        mapped.ok()?;
        self.mapped.push(address);
        Some(())
    }

    fn end(self) {
        for granule in self.registered {
            if !granule.unregister(self.device) {
                // The device may still use it.
                std::mem::forget(granule);
            }
        }
        for address in self.mapped {
            // It fails where the device is gone, and its memory with it.
            let _ = self.device.unmap_chunk(address, PEER_BYTES);
        }
    }
}
