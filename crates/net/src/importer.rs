//! Registers and maps memory of other nets for the device, and makes what is mapped there, on a thread of the program.
//!
//! ```text
//!   proxy: was offered a granule, has mapped it ──> importer ── registers it ───────────────> proxy: where kernels see it
//!   proxy: was offered device memory ─────────────> importer ── wants its descriptor, maps it into the window ──> proxy
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
    /// The proxy has its descriptor.
    Taken(u16),
    /// Memory of another net is to be mapped at a place of the window: asks for its descriptor.
    Map(u16),
    /// The descriptor is in the passage.
    Given(u16),
}

/// What came of it.
pub(crate) enum Answer {
    /// Kernels see the granule here; or it cannot be registered.
    Registered(u32, Option<u64>),
    /// The memory, and its descriptor in the program's table; or there is none.
    Made(u16, Option<Place>),
    /// Wants the descriptor of this memory, through this passage: before Linux 6.9 it could not take it out of the proxy's table.
    Wants(u16, Place),
    /// What came of the memory.
    Mapped(u16, Mapped),
}

/// Whether kernels can use memory of another net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapped {
    Yes,
    /// Nor will they.
    No,
    /// No descriptor was left.
    NotNow,
}

struct Importer {
    device: &'static dyn SharedMemory,
    window: Option<DeviceAddr>,
    /// In the program's table for a moment: descriptors on their way to the proxy, and a way for those that come from it.
    made: Vec<(u16, OwnedFd)>,
    passages: Vec<(u16, Passage)>,
    registered: Vec<Arc<MappedGranule>>,
    mapped: Vec<DeviceAddr>,
}

/// Starts it: where requests go, and what is disconnected once all is given back. Without a thread for it there is none, and
/// kernels that connect to other nets stay with Linux.
pub(crate) fn start(
    device: &'static dyn SharedMemory,
    window: Option<DeviceAddr>,
    tell: impl Fn(Answer) + Send + 'static,
) -> Option<(Sender<Request>, Receiver<()>)> {
    let (requests, receiver) = mpsc::channel();
    let (alive, ended) = mpsc::sync_channel::<()>(1);
    let body = move || {
        let _alive = alive;
        let mut importer = Importer {
            device,
            window,
            made: Vec::new(),
            passages: Vec::new(),
            registered: Vec::new(),
            mapped: Vec::new(),
        };
        while let Ok(request) = receiver.recv() {
            if let Some(answer) = importer.answer(request) {
                tell(answer);
            }
        }
        importer.end();
    };
    spawn_signals_blocked("spinio-net-map", STACK_BYTES, body).ok()?;
    Some((requests, ended))
}

impl Importer {
    fn answer(&mut self, request: Request) -> Option<Answer> {
        let here = |fd| Place { tid: linux::gettid(), fd };
        Some(match request {
            Request::Register(number, granule) => {
                let mut address = None;
                if granule.register(self.device) {
                    address = granule.device_address(self.device);
                    self.registered.push(granule);
                }
                Answer::Registered(number, address)
            }
            Request::Make(place) => {
                let fd = self.make(place);
                let answer = Answer::Made(place, fd.as_ref().map(|fd| here(fd.as_raw_fd())));
                self.made.extend(fd.map(|fd| (place, fd)));
                answer
            }
            Request::Taken(place) => {
                self.made.retain(|(made, _)| *made != place);
                return None;
            }
            Request::Map(place) => match Passage::new() {
                Ok(passage) => {
                    let outer = here(passage.outer);
                    self.passages.push((place, passage));
                    Answer::Wants(place, outer)
                }
                Err(_) => Answer::Mapped(place, Mapped::NotNow),
            },
            Request::Given(place) => Answer::Mapped(place, self.map(place)),
        })
    }

    fn address(&self, place: u16) -> Option<DeviceAddr> {
        self.window.map(|window| window.offset(u64::from(place) * PEER_BYTES))
    }

    fn make(&mut self, place: u16) -> Option<OwnedFd> {
        let (chunk, fd) = self.device.create_chunk(PEER_BYTES).ok()?;
        self.put(place, chunk)?;
        Some(fd)
    }

    fn map(&mut self, place: u16) -> Mapped {
        let Some(at) = self.passages.iter().position(|(of, _)| *of == place) else { return Mapped::No };
        let (_, passage) = self.passages.swap_remove(at);
        // Either thread had no number for it.
        let Ok(fd) = receive_descriptor(passage.inner) else { return Mapped::NotNow };
        // SAFETY: opened in the line above, and owned by nothing else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let chunk = self.device.import_chunk(fd.as_fd(), PEER_BYTES).ok();
        let put = chunk.and_then(|chunk| self.put(place, chunk));
        if put.is_some() { Mapped::Yes } else { Mapped::No }
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
