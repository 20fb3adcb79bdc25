//! A map: a range of a file in device memory.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use spinio_device::{Device, DeviceAddr, PAGE_BYTES};
use spinio_host::lock;
use spinio_pagecache::messages::{Access, MAX_PAGES, MapKind, Stats};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::attach::attach;
use crate::call_checks::pages_within;
use crate::current::Current;
use crate::file_reader::FileReader;
use crate::link::{Link, Spec};
use crate::mounted_file::{FuseFile, MountedFile};
use crate::owner_name::NameCell;
use crate::page_states::PageStates;
use crate::process_owned::ProcessOwned;
use crate::queued_calls::Queue;
use crate::replica::Replica;
use crate::sources;
use crate::state::{InPlaceWay, Info, State};
use crate::{Error, Result};

/// A range of a file in device memory. It is unmapped when dropped; unreleased stores are dropped with it.
pub struct Map {
    pub(crate) spec: Spec,
    len: u64,
    pub(crate) reader: Option<&'static dyn FileReader>,
    // Dropped in this order.
    pub(crate) link: ProcessOwned<Link>,
    pub(crate) replica: ProcessOwned<Replica>,
    pub(crate) state: ProcessOwned<Arc<Mutex<State>>>,
    pub(crate) queue: Arc<Queue>,
}

impl Map {
    /// Maps `len` bytes of the file from `offset`, which must be a multiple of 4096, into memory of `device`.
    pub fn new(fd: Fd, offset: u64, len: u64, access: Access, device: &'static dyn Device) -> Result<Map> {
        Map::with_reader(fd, offset, len, access, device, None)
    }

    /// The same; `reader` reads the file below the mount into the device's memory. Without one its pages are read into
    /// the window, and copied from there.
    pub fn with_reader(
        fd: Fd,
        offset: u64,
        len: u64,
        access: Access,
        device: &'static dyn Device,
        reader: Option<&'static dyn FileReader>,
    ) -> Result<Map> {
        check_descriptor(fd, access)?;
        let tid = linux::gettid();
        Map::with_file(offset, len, access, device, reader, move || Ok(Box::new(FuseFile::dup(tid, fd)?)))
    }

    /// Maps as [`Map::new`] for reading, without memory of the device: kernels read the Linux kernel's page cache.
    pub fn in_place(fd: Fd, offset: u64, len: u64, device: &'static dyn Device) -> Result<Map> {
        check_descriptor(fd, Access::Read)?;
        let tid = linux::gettid();
        let spec = spec(offset, len, Access::Read, MapKind::Registered)?;
        Map::with_spec(spec, len, device, None, move || Ok(Box::new(FuseFile::dup(tid, fd)?)))
    }

    pub(crate) fn with_file(
        offset: u64,
        len: u64,
        access: Access,
        device: &'static dyn Device,
        reader: Option<&'static dyn FileReader>,
        open: impl FnOnce() -> Result<Box<dyn MountedFile>> + Send + 'static,
    ) -> Result<Map> {
        Map::with_spec(spec(offset, len, access, MapKind::Replica)?, len, device, reader, open)
    }

    fn with_spec(
        spec: Spec,
        len: u64,
        device: &'static dyn Device,
        reader: Option<&'static dyn FileReader>,
        open: impl FnOnce() -> Result<Box<dyn MountedFile>> + Send + 'static,
    ) -> Result<Map> {
        let link = Link::start(spec, open)?;
        let mut state = State {
            window: None,
            backing: None,
            counters: None,
            current: Current::default(),
            pages: PageStates::new(0),
            info: Info { in_place: InPlaceWay::of(spec.kind) as u64, ..Info::default() },
            name: NameCell::default(),
            inaccessible: Vec::new(),
        };
        attach(&link, reader, &mut state)?;
        let state = Arc::new(Mutex::new(state));
        // After the server has agreed: a device without chunks has all of the memory now.
        let replica = Replica::new(device, spec, &state)?;
        // After the device has: a size that is wrong costs nothing.
        lock(&state).pages = PageStates::new(spec.pages);
        let map = Map {
            spec,
            len,
            reader,
            link: ProcessOwned::new(link),
            replica: ProcessOwned::new(replica),
            state: ProcessOwned::new(state),
            queue: Arc::default(),
        };
        sources::add(&map.state, &map.queue, &map.replica, spec.first, spec.pages);
        Ok(map)
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.replica.start()
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte; it always has one.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `len` bytes from `offset` of a map in place, which lie in one page, to memory of the device: for tests.
    /// Kernels of the emulated device load from the mapping, which never has the old pages that a registration may keep.
    #[doc(hidden)]
    pub fn copy_registered(&self, to: DeviceAddr, offset: u64, len: usize) -> Result<()> {
        let none = || Error::new(Errno::INVAL, "The map is not read in place");
        self.replica.in_place().ok_or_else(none)?.copy(to, offset, len)
    }

    /// What the map has done.
    pub fn info(&self) -> Info {
        let info = lock(&self.state).info;
        let (device_bytes, chunks_evicted) = self.replica.usage();
        Info { device_bytes, chunks_evicted, ..info }
    }

    /// Counters of the file at the server.
    pub fn stats(&self) -> Result<Stats> {
        let mut state = lock(&self.state);
        if state.window.is_none() {
            attach(&self.link, self.reader, &mut state)?;
        }
        self.link.run(|link| link.stats())
    }

    /// The pages of `len` bytes from byte `offset` of the map.
    pub(crate) fn pages_of(&self, offset: u64, len: u64) -> Result<Range<usize>> {
        pages_within(offset, len, self.len).map(|pages| pages.start as usize..pages.end as usize)
    }

    /// Whether this process made the map, and is not a forked child of that.
    pub fn is_own_process(&self) -> bool {
        self.state.is_own_process()
    }
}

/// Whether the descriptor allows a map of this access.
pub(crate) fn check_descriptor(fd: Fd, access: Access) -> Result<()> {
    let mode = linux::status_flags(fd).map_err(|e| Error::of(e, "query the descriptor"))? as u32 & linux::O_ACCMODE;
    let allowed = match access {
        Access::Read => mode != linux::O_WRONLY,
        Access::Write => mode == linux::O_RDWR,
    };
    if allowed { Ok(()) } else { Err(Error::new(Errno::ACCESS, "The descriptor is not open for this access")) }
}

pub(crate) fn spec(offset: u64, len: u64, access: Access, kind: MapKind) -> Result<Spec> {
    let page = PAGE_BYTES as u64;
    let first = offset / page;
    let pages = len.div_ceil(page);
    let end = first.checked_add(pages).filter(|end| *end <= MAX_PAGES);
    if !offset.is_multiple_of(page) || pages == 0 || end.is_none() {
        let sentence = "A map begins at a multiple of 4096 bytes, is not empty, and ends below 64 TiB";
        return Err(Error::new(Errno::INVAL, sentence));
    }
    if pages > u64::from(u32::MAX) {
        return Err(Error::new(Errno::NOMEM, "A map has less than 16 TiB"));
    }
    Ok(Spec { access, first, pages: pages as usize, kind })
}

impl Drop for Map {
    fn drop(&mut self) {
        // In a forked child another mapping may be at the address.
        if self.is_own_process() {
            sources::remove(&self.state);
        }
    }
}

impl std::fmt::Debug for Map {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Map {{ address: {:#x}, len: {} }}", self.address(), self.len)
    }
}
