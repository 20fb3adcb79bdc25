//! What keeps memory of the emulated device alive: arrays, DLPack tensors, maps of files.
//!
//! ```text
//!   arrays ──────────────────────────────> OwnedMemory ──> an allocation
//!   GaiaMap, arrays of it ──> MapSlot ───> OwnedMemory ──> a map        until `unmap`, which empties the slot
//!   DLPack tensors, calls that run ──────────^  while they use the memory
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use spinio_runtime::client::{self, gaia::Map};

use crate::failure;

/// One allocation.
pub(crate) struct Allocation(u64);

impl Drop for Allocation {
    fn drop(&mut self) {
        client::emulated::free(self.0);
    }
}

/// Memory of the device.
pub(crate) enum DeviceMemory {
    Allocated(#[expect(dead_code, reason = "freed when dropped")] Allocation),
    Mapped(Map),
}

/// It is freed or unmapped when the last array and the last DLPack tensor over it are dropped.
pub(crate) struct OwnedMemory(Option<DeviceMemory>);

impl OwnedMemory {
    pub(crate) fn of_allocation(addr: u64) -> OwnedMemory {
        OwnedMemory(Some(DeviceMemory::Allocated(Allocation(addr))))
    }

    fn of_map(map: Map) -> OwnedMemory {
        OwnedMemory(Some(DeviceMemory::Mapped(map)))
    }

    /// The map of a file that it is.
    pub(crate) fn map(&self) -> Option<&Map> {
        match &self.0 {
            Some(DeviceMemory::Mapped(map)) => Some(map),
            _ => None,
        }
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        let memory = self.0.take();
        let mut waiting = lock_deferred();
        if waiting.pauses > 0 {
            // Freeing waits for the device, which waits for a thread that may need a lock that this one holds.
            waiting.freed.extend(memory);
        } else {
            drop(waiting);
            drop(memory);
        }
    }
}

/// Memory that became free while the device was paused.
pub(crate) struct DeferredFrees {
    pub(crate) pauses: u32,
    pub(crate) freed: Vec<DeviceMemory>,
}

static DEFERRED_FREES: Mutex<DeferredFrees> = Mutex::new(DeferredFrees { pauses: 0, freed: Vec::new() });

pub(crate) fn lock_deferred() -> MutexGuard<'static, DeferredFrees> {
    DEFERRED_FREES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A map until it is unmapped. Locked under the GIL, and only briefly.
pub(crate) struct MapSlot(Mutex<Option<Arc<OwnedMemory>>>);

impl MapSlot {
    pub(crate) fn new(map: Map) -> MapSlot {
        MapSlot(Mutex::new(Some(Arc::new(OwnedMemory::of_map(map)))))
    }

    /// The map, which stays mapped while the result is alive.
    pub(crate) fn get(&self) -> PyResult<Arc<OwnedMemory>> {
        let owned = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match owned {
            None => Err(failure::not_mapped(false)),
            Some(owned) if owned.map().is_some_and(|map| !map.is_own_process()) => Err(failure::not_mapped(true)),
            Some(owned) => Ok(owned),
        }
    }

    pub(crate) fn take(&self) -> Option<Arc<OwnedMemory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for MapSlot {
    fn drop(&mut self) {
        if let Some(owned) = self.take() {
            Python::attach(|py| py.detach(|| drop(owned)));
        }
    }
}
