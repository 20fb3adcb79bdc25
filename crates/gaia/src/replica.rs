//! The replica: pages of the file in device memory, private to one map.
//!
//! A map has addresses for all of its pages, and memory for those that were acquired, in chunks ([`crate::chunks`]).

#![expect(unsafe_code, reason = "copies between the device and the window")]

use std::ops::Range;
use std::sync::{Arc, Mutex};

use spinio_device::{
    AppStream, Device, DeviceAddr, DeviceError, DeviceId, Fingerprint, PAGE_BYTES, Piece, ReplicaMemory, StreamId,
    WaitMode,
};
use spinio_host::lock;
use spinio_pagecache::messages::{Access, Run, pages_in};
use spinio_sys::Errno;

use crate::call_checks::captured;
use crate::chunks::{Chunks, Hold};
use crate::in_place::InPlace;
use crate::lane::{Lane, between_stops};
use crate::link::{Link, Spec};
use crate::registered_stages::RegisteredStages;
use crate::room::Room;
use crate::state::State;
use crate::window::Window;
use crate::{Error, Result};

/// Pages of one scan.
const SCAN: usize = 256 << 10;

/// Chunks that the server has, by number. They are not evicted.
type Lent = Mutex<Vec<(usize, Hold)>>;

/// The memory.
pub(crate) struct Replica {
    device: &'static dyn ReplicaMemory,
    memory: Memory,
    start: DeviceAddr,
    pages: usize,
    /// Where scans put fingerprints; only of maps for writing.
    slots: Option<DeviceAddr>,
    /// What the last scan has returned, for the next one: new memory of this size takes longer than the scan.
    scanned: Mutex<Vec<Fingerprint>>,
    stages: RegisteredStages,
}

enum Memory {
    Chunks(&'static Room, Arc<Chunks>, Lent),
    /// Of a device without chunks: one allocation, which nothing limits and which is never evicted.
    Whole,
    /// None: kernels read the mapping of the file.
    InPlace(InPlace),
}

impl Replica {
    /// Memory for pages; `state` is that of the map.
    pub(crate) fn new(device: &'static dyn Device, spec: Spec, state: &Arc<Mutex<State>>) -> Result<Replica> {
        let memory = device.replica_memory().ok_or_else(|| {
            let sentence = format!("Files cannot be mapped into the memory of {}", device.id());
            Error::new(Errno::NOTSUP, sentence)
        })?;
        let pages = spec.pages;
        if spec.is_in_place() {
            let mapping = InPlace::reserve(memory, pages)?;
            let start = DeviceAddr(mapping.start());
            let stages = RegisteredStages::new(memory);
            return Ok(Replica {
                device: memory,
                memory: Memory::InPlace(mapping),
                start,
                pages,
                slots: None,
                scanned: Mutex::default(),
                stages,
            });
        }
        let alloc = |len| memory.alloc_replica(len).map_err(|e| Error::device(e, "allocate the memory of a map"));
        let slots = match spec.access {
            Access::Read => None,
            Access::Write => {
                Some(alloc((pages.min(SCAN) * size_of::<Fingerprint>()).next_multiple_of(PAGE_BYTES) as u64)?)
            }
        };
        let room = Room::of(memory);
        let made = device.shared_memory().map_or(Ok(None), |device| room.reserve(device, pages, state));
        let made = made.and_then(|chunks| match chunks {
            Some(chunks) => Ok((chunks.start(), Memory::Chunks(room, chunks, Mutex::default()))),
            None => Ok((alloc(pages as u64 * PAGE_BYTES as u64)?, Memory::Whole)),
        });
        let (start, chunks) = made.inspect_err(|_| {
            let _ = slots.map(|slots| memory.free_replica(slots));
        })?;
        let stages = RegisteredStages::new(memory);
        Ok(Replica { device: memory, memory: chunks, start, pages, slots, scanned: Mutex::default(), stages })
    }

    /// Has the device memory for pages until this is dropped, and longer if they are in an epoch then; access is granted
    /// apart. `None`: it always has both. No state of a map is locked.
    pub(crate) fn hold(&self, pages: &Range<usize>) -> Result<Option<Hold>> {
        match &self.memory {
            Memory::Chunks(room, chunks, _) => room.hold(chunks, chunks.of_pages(pages)).map(Some),
            Memory::Whole | Memory::InPlace(_) => Ok(None),
        }
    }

    /// Lets kernels and copies use the memory of pages, which is held.
    pub(crate) fn grant_access(&self, pages: &Range<usize>) -> Result<()> {
        match &self.memory {
            Memory::Chunks(room, chunks, _) => room.grant_access(chunks, chunks.of_pages(pages)),
            Memory::Whole | Memory::InPlace(_) => Ok(()),
        }
    }

    /// Runs work that may grant access to the memory of pages by parts.
    pub(crate) fn while_granting<T>(&self, pages: &Range<usize>, work: impl FnOnce() -> T) -> T {
        match &self.memory {
            Memory::Chunks(room, chunks, _) => room.while_granting(chunks, chunks.of_pages(pages), work),
            Memory::Whole | Memory::InPlace(_) => work(),
        }
    }

    /// Pages are acquired now, whose memory is there.
    pub(crate) fn touch(&self, pages: &Range<usize>) {
        if let Memory::Chunks(room, chunks, _) = &self.memory {
            room.touch(chunks, chunks.of_pages(pages));
        }
    }

    /// Fingerprints of a scan are used no more.
    pub(crate) fn keep_scanned(&self, scanned: Vec<Fingerprint>) {
        if !scanned.is_empty() && Lane::current().is_none() {
            *lock(&self.scanned) = scanned;
        }
    }

    /// Gives memory of pages back that are not in use. No state of a map is locked.
    pub(crate) fn give_back(&self, pages: &Range<usize>) {
        if let Memory::Chunks(room, chunks, _) = &self.memory {
            room.give_back(chunks, chunks.inside(pages, self.pages));
        }
    }

    /// The chunks; `None`: the device has no memory in chunks, or the map none.
    pub(crate) fn chunks(&self) -> Option<&Arc<Chunks>> {
        match &self.memory {
            Memory::Chunks(_, chunks, _) => Some(chunks),
            Memory::Whole | Memory::InPlace(_) => None,
        }
    }

    /// The chunks that lie wholly in a range of pages. `None`: the device has no memory in chunks.
    pub(crate) fn chunks_inside(&self, pages: &Range<usize>) -> Option<(&Chunks, Range<usize>)> {
        match &self.memory {
            Memory::Chunks(_, chunks, _) => Some((chunks, chunks.inside(pages, self.pages))),
            Memory::Whole | Memory::InPlace(_) => None,
        }
    }

    /// Keeps a chunk from being evicted, and runs `lend`; then it stays so until the end of lending. False: it is not
    /// mapped.
    pub(crate) fn keep_lent(&self, chunk: usize, lend: impl FnOnce() -> Result<()>) -> Result<bool> {
        let Memory::Chunks(room, chunks, lent) = &self.memory else { return Ok(false) };
        let Some(hold) = room.hold_mapped(chunks, chunk) else { return Ok(false) };
        lend()?;
        let mut lent = lock(lent);
        lent.retain(|(other, _)| *other != chunk);
        lent.push((chunk, hold));
        Ok(true)
    }

    /// The server has no chunk of these pages any more.
    pub(crate) fn end_lending(&self, pages: &Range<usize>) {
        if let Memory::Chunks(_, chunks, lent) = &self.memory {
            let chunks = chunks.of_pages(pages);
            lock(lent).retain(|(chunk, _)| !chunks.contains(chunk));
        }
    }

    /// Bytes of device memory, and how many chunks were evicted.
    pub(crate) fn usage(&self) -> (u64, u64) {
        match &self.memory {
            Memory::Chunks(_, chunks, _) => chunks.usage(),
            Memory::Whole => (self.pages as u64 * PAGE_BYTES as u64, 0),
            Memory::InPlace(_) => (0, 0),
        }
    }

    /// Of a map that is read in place: registers pages that have changed, and returns the bytes. `None`: it is none.
    pub(crate) fn register(&self, link: &Link, runs: &[Run]) -> Option<Result<u64>> {
        let mapping = self.in_place()?;
        // What this thread's stream has queued may use the pages.
        let waited = self.on_stream(|_| Ok(()));
        Some(waited.and_then(|()| between_stops(self.device, || mapping.register(link, runs))))
    }

    /// The registered pages of a map that is read in place.
    pub(crate) fn in_place(&self) -> Option<&InPlace> {
        match &self.memory {
            Memory::InPlace(mapping) => Some(mapping),
            _ => None,
        }
    }

    /// These pages will be copied through the stage of the window.
    pub(crate) fn prepare_stage(&self, window: &Arc<Window>, runs: &[Run]) {
        self.stages.prepare(window, pages_in(runs), runs.len());
    }

    /// Whose memory it is.
    pub(crate) fn device(&self) -> &'static dyn ReplicaMemory {
        self.device
    }

    /// Whether the device runs no work any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.device.is_lost()
    }

    /// Its name.
    pub(crate) fn device_id(&self) -> DeviceId {
        self.device.id()
    }

    /// The device address of the first page.
    pub(crate) fn start(&self) -> u64 {
        self.start.0
    }

    /// How many pages take less time to scan than another scan to begin.
    pub(crate) fn scan_gap(&self) -> u64 {
        self.device.scan_gap()
    }

    /// The work of one acquire or release: after what this thread's stream has queued, and complete when it returns.
    pub(crate) fn on_stream<T>(&self, body: impl FnOnce(Copies<'_>) -> Result<T>) -> Result<T> {
        if let Some(lane) = Lane::current() {
            // Each copy is waited for.
            return body(Copies { replica: self, stream: lane.stream() });
        }
        let stream = match self.device.app_stream() {
            AppStream::Named(stream) => stream,
            AppStream::Capturing(_) => return Err(captured()),
        };
        let result = body(Copies { replica: self, stream });
        // Also after a failure: no copy may use the window later.
        let waited = self.device.synchronize(stream, WaitMode::Context).map_err(failed);
        let result = result?;
        waited.map(|()| result)
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let free = |memory: Option<DeviceAddr>| {
            let _ = memory.map(|memory| self.device.free_replica(memory));
        };
        let free_slots = || {
            free(self.slots);
            self.stages.unregister();
        };
        match &self.memory {
            Memory::Chunks(room, chunks, _) => room.free(chunks, free_slots),
            Memory::Whole => between_stops(self.device, || {
                free(Some(self.start));
                free_slots();
            }),
            Memory::InPlace(mapping) => between_stops(self.device, || mapping.end()),
        }
    }
}

/// Copies on one stream, which waits for them.
#[derive(Clone, Copy)]
pub(crate) struct Copies<'a> {
    replica: &'a Replica,
    stream: StreamId,
}

impl Copies<'_> {
    fn address(self, first: usize, count: usize) -> DeviceAddr {
        assert!(first + count <= self.replica.pages);
        self.replica.start.offset((first * PAGE_BYTES) as u64)
    }

    /// The address of a byte of a run of pages.
    pub(crate) fn byte(self, run: Run, at: u64) -> DeviceAddr {
        self.address(run.first as usize, run.count as usize).offset(at)
    }

    /// Enqueues zeros from byte `at` of a run to its end; the run's pages of the window are not in use.
    pub(crate) fn store_zeros(self, run: Run, at: u64, window: &Window) -> Result<()> {
        let len = run.count as usize * PAGE_BYTES - at as usize;
        window.zero(run.first as usize, at as usize, len);
        let from = window.page(run.first as usize).wrapping_add(at as usize);
        // SAFETY: as in `store`; the rest of the run is in the window.
        unsafe { self.copy_in(self.byte(run, at), from, len) }
    }

    /// Enqueues copies of pages from the window.
    pub(crate) fn store(self, run: Run, window: &Window) -> Result<()> {
        let (first, count) = (run.first as usize, run.count as usize);
        let to = self.address(first, count);
        // SAFETY: `on_stream` waits for the copy before the window may be unmapped or freed; the last page is checked
        // by `address`, and a window has as many pages as the replica.
        unsafe { self.copy_in(to, window.page(first), count * PAGE_BYTES) }
    }

    /// Enqueues copies of pages from the window's stage, from page `at` of it, one after the other.
    pub(crate) fn store_staged(self, runs: &[Run], window: &Window, at: usize) -> Result<()> {
        self.copy_staged(true, runs, window, at)
    }

    /// Enqueues copies of pages to the window's stage, from page `at` of it, one after the other.
    pub(crate) fn load(self, runs: &[Run], window: &Window, at: usize) -> Result<()> {
        self.copy_staged(false, runs, window, at)
    }

    /// Called once before the stream is waited for.
    fn copy_staged(self, into_device: bool, runs: &[Run], window: &Window, mut at: usize) -> Result<()> {
        let pages = pages_in(runs);
        if let Some(list) = self.replica.stages.list(window, runs.len(), pages) {
            let device = runs.iter().flat_map(Run::pages).map(|page| self.address(page, 1));
            let pieces =
                device.zip(at..).map(|(device, at)| Piece { device, host: window.stage(at, 1), len: PAGE_BYTES });
            let pieces: Vec<Piece> = pieces.collect();
            // SAFETY: the stage is registered, of which the pieces are a part; the list has room for all of its pages, and
            // the map's lock keeps both from others until `on_stream` has waited.
            return unsafe { self.replica.device.copy_pieces(self.stream, into_device, &pieces, list) }.map_err(failed);
        }
        for run in runs {
            let (first, count) = (run.first as usize, run.count as usize);
            let (device, host) = (self.address(first, count), window.stage(at, count));
            // SAFETY: as in `store`; the stage has that many pages from there.
            unsafe {
                match into_device {
                    true => self.copy_in(device, host, count * PAGE_BYTES),
                    false => self.copy_out(host, device, count * PAGE_BYTES),
                }
            }?;
            at += count;
        }
        Ok(())
    }

    /// # Safety
    /// As [`spinio_device::Device::copy_in`].
    unsafe fn copy_in(self, to: DeviceAddr, from: *const u8, len: usize) -> Result<()> {
        match Lane::current() {
            // SAFETY: the caller's.
            Some(lane) => unsafe { lane.copy_in(to, from, len) },
            // SAFETY: the caller's.
            None => unsafe { self.replica.device.copy_in(self.stream, to, from, len) }.map_err(failed),
        }
    }

    /// # Safety
    /// As [`spinio_device::Device::copy_out`].
    unsafe fn copy_out(self, to: *mut u8, from: DeviceAddr, len: usize) -> Result<()> {
        match Lane::current() {
            // SAFETY: the caller's.
            Some(lane) => unsafe { lane.copy_out(to, from, len) },
            // SAFETY: the caller's.
            None => unsafe { self.replica.device.copy_out(self.stream, to, from, len) }.map_err(failed),
        }
    }

    fn wait(self) -> Result<()> {
        match Lane::current() {
            Some(_) => Ok(()),
            None => self.replica.device.synchronize(self.stream, WaitMode::Context).map_err(failed),
        }
    }

    /// The fingerprints of pages now, of all runs one after the other. [`Replica::keep_scanned`] takes them back.
    pub(crate) fn fingerprints(self, runs: &[Run]) -> Result<Vec<Fingerprint>> {
        let count = pages_in(runs);
        if let Some(lane) = Lane::current() {
            let mut fingerprints = Vec::with_capacity(count);
            for run in runs {
                lane.fingerprints(self.address(run.first as usize, run.count as usize), *run, &mut fingerprints)?;
            }
            return Ok(fingerprints);
        }
        let no_slots = || Error::new(Errno::ACCESS, "The map is read-only");
        let slots = self.replica.slots.ok_or_else(no_slots)?;
        let mut fingerprints = std::mem::take(&mut *lock(&self.replica.scanned));
        fingerprints.resize(count, Fingerprint::default());
        let (list, mut done) = (fingerprints.as_mut_ptr(), 0);
        let parts = runs.iter().flat_map(|run| {
            let run = run.pages();
            run.clone().step_by(SCAN).map(move |first| (first, run.end.min(first + SCAN) - first))
        });
        let scanned = parts.into_iter().try_for_each(|(first, count)| {
            let out = list.wrapping_add(done);
            done += count;
            let pages = self.address(first, count);
            // SAFETY: `out` has room for the part's, and `slots`, which the map's lock keeps from others; the list lives until
            // the stream was synchronized, also after a failure to synchronize: then it leaks.
            unsafe { self.replica.device.fingerprint_pages(self.stream, pages, count, slots, out) }
        });
        let waited = self.replica.device.synchronize(self.stream, WaitMode::Context);
        if let Err(e) = waited {
            std::mem::forget(fingerprints);
            return Err(failed(e));
        }
        scanned.map_err(failed)?;
        Ok(fingerprints)
    }

    /// Stores `head` where the replica still has the bytes of `base`; the others are the program's own stores, and stay.
    pub(crate) fn patch(self, page: usize, base: &[u8; PAGE_BYTES], head: &[u8; PAGE_BYTES]) -> Result<()> {
        let mut bytes = Box::new([0u8; PAGE_BYTES]);
        let at = self.address(page, 1);
        // SAFETY: waited for below, before the bytes are used; after a failure they leak.
        let loaded = unsafe { self.copy_out(bytes.as_mut_ptr(), at, PAGE_BYTES) }.and_then(|()| self.wait());
        let stored = loaded.and_then(|()| {
            let pages = base.iter().zip(head).zip(bytes.iter_mut());
            pages.filter(|((base, _), byte)| base == byte).for_each(|((_, head), byte)| *byte = *head);
            // SAFETY: as above.
            unsafe { self.copy_in(at, bytes.as_ptr(), PAGE_BYTES) }.and_then(|()| self.wait())
        });
        if let Err(e) = stored {
            std::mem::forget(bytes);
            return Err(e);
        }
        Ok(())
    }
}

fn failed(error: DeviceError) -> Error {
    Error::device(error, "copy pages of a map")
}
