//! What changes of a map.

use std::sync::Arc;
use std::time::Instant;

use spinio_device::DeviceId;
use spinio_pagecache::messages::MapKind;

use crate::counters::Counters;
use crate::current::Current;
use crate::file_reader::OpenFile;
use crate::owner_name::NameCell;
use crate::page_states::PageStates;
use crate::window::Window;

/// What a map has done: `struct spinio_gaia_info`, which only grows at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Bytes of the file when it was last acquired.
    pub file_size: u64,
    /// Acquires that returned.
    pub acquires: u64,
    /// Releases that were committed.
    pub releases: u64,
    /// Bytes that came from the file below the mount.
    pub bytes_from_file: u64,
    /// Bytes that came from released pages which are not in the file yet.
    pub bytes_from_snapshots: u64,
    /// Pages into which other writers' bytes were merged inside an epoch.
    pub pages_patched: u64,
    /// Bytes that releases have published.
    pub bytes_published: u64,
    /// Released pages whose bytes were new.
    pub pages_committed: u64,
    /// Among them, pages that were merged with the changes of other writers.
    pub pages_merged: u64,
    /// Times that the map was attached to a new server.
    pub reattached: u64,
    /// Releases that a server had committed before it ended, found by their id.
    pub releases_recovered: u64,
    /// Bytes of chunks that other processes have filled.
    pub bytes_shared: u64,
    /// Acquires, of [`Info::acquires`], that sent no message: nothing had changed.
    pub acquires_unchanged: u64,
    /// Bytes of device memory that the map has now.
    pub device_bytes: u64,
    /// Chunks that were evicted to make room.
    pub chunks_evicted: u64,
    /// Bytes that acquires of a map that is read in place have registered.
    pub bytes_registered: u64,
    /// Bytes that were copied from another device, instead of being read from the file.
    pub bytes_from_peer: u64,
    /// Why a copy on another device could not be used, the last time: `PeerRefusal::number`, 0 if it could.
    pub peer_refused: u64,
    /// Releases, of [`Info::releases`], that handed their device memory over instead of copying pages.
    pub releases_handed_over: u64,
    /// Bytes that another device had, and that could not be copied from there.
    pub peer_bytes_refused: u64,
    /// Nanoseconds of acquires: CPU programs' dirty pages were handed to the server.
    pub flush_ns: u64,
    /// The server listed pages.
    pub plan_ns: u64,
    /// Pages of the file were read: single ones into the stage, others into the device's memory.
    pub read_ns: u64,
    /// Pages of the window were copied to the device.
    pub copy_ns: u64,
    /// The server was told of pages that were there, and listed those to fetch again.
    pub confirm_ns: u64,
    /// Fingerprints at the begin of epochs for writing.
    pub scan_ns: u64,
    /// Nanoseconds of releases: fingerprints at the end of epochs.
    pub release_scan_ns: u64,
    /// Changed pages were copied to the stage, and the server took those of the part before.
    pub release_copy_ns: u64,
    /// The server committed them.
    pub release_commit_ns: u64,
    /// How kernels load the pages in place: an [`InPlaceWay`].
    pub in_place: u64,
}

/// How kernels load the pages of a map in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InPlaceWay {
    /// They do not: the map has a replica.
    No = 0,
    /// As pages of the page cache that are registered with the device; read only.
    Registered = 1,
    /// As any memory of the process, by page faults; coherent.
    Faults = 2,
    /// As any memory of the process, through its page tables; coherent.
    HostPageTables = 3,
}

impl InPlaceWay {
    /// Of a map that is not coherent.
    pub(crate) fn of(kind: MapKind) -> InPlaceWay {
        if kind == MapKind::Replica { InPlaceWay::No } else { InPlaceWay::Registered }
    }
}

/// Runs a part of an acquire or release, and adds the time that it took.
pub(crate) fn timed<T>(total: &mut u64, part: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = part();
    *total += begun.elapsed().as_nanos() as u64;
    result
}

/// What changes, under one lock: calls on one map run one after another.
pub(crate) struct State {
    /// `None` while no server is attached.
    pub(crate) window: Option<Arc<Window>>,
    /// The file below the mount, if it can be read into the device's memory.
    pub(crate) backing: Option<Box<dyn OpenFile>>,
    /// Present with the window.
    pub(crate) counters: Option<Counters>,
    pub(crate) current: Current,
    pub(crate) pages: PageStates,
    pub(crate) info: Info,
    /// What the server calls the map.
    pub(crate) name: NameCell,
    /// Devices whose memory this one cannot access.
    pub(crate) inaccessible: Vec<DeviceId>,
}
