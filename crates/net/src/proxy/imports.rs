//! Granules of other nets that this one has mapped. They stay registered with the device until the net is closed, so each is
//! found again when its net offers it once more.
//!
//! A granule is known by its file: the mapping keeps that alive, so no other one has its number.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use spinio_ring::layout::FAR_PEERS;
use spinio_sys::linux::{self, Fd, FileKey};

use crate::importer::Request;
use crate::mapped_granule::{MappedGranule, SIZES};

/// At a time: as many, and as many bytes, which connections of default size do not reach.
const MOST: usize = FAR_PEERS as usize;
const MOST_BYTES: usize = 256 << 20;

#[derive(Debug)]
struct Import {
    file: FileKey,
    granule: Arc<MappedGranule>,
    /// Where kernels see it, once it is registered.
    address: Option<u64>,
    /// A connection has it.
    used: bool,
}

/// What came of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Kernels can use it.
    Ready(u32),
    /// It is being registered.
    Soon(u32),
    /// It is no granule, or another connection has it.
    Refused,
    /// There is no more room.
    Full,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Imports {
    all: Vec<Import>,
    importer: Option<Sender<Request>>,
}

impl Imports {
    /// Without an importer, kernels connect to other nets through Linux only.
    pub(super) fn new(importer: Option<Sender<Request>>) -> Imports {
        Imports { all: Vec::new(), importer }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.importer.is_some()
    }

    /// The granule of a file with rings of this size, for a connection.
    pub(super) fn take(&mut self, file: Fd, size_log2: u8) -> Found {
        // The seals first, which only memory has: any other file may be of a file system that does not answer fstat.
        let is_granule = SIZES.contains(&size_log2) && linux::cannot_shrink(file);
        let Some(stat) = is_granule.then(|| linux::fstat(file).ok()).flatten() else { return Found::Refused };
        let id = stat.key();
        if let Some(number) = self.all.iter().position(|import| import.file == id) {
            let import = &mut self.all[number];
            let Some(_) = import.address.filter(|_| !import.used && import.granule.size() == 1 << size_log2) else {
                return Found::Refused;
            };
            import.used = true;
            return Found::Ready(number as u32);
        }
        let bytes: usize = self.all.iter().map(|import| import.granule.bytes()).sum();
        if self.all.len() >= MOST || bytes >= MOST_BYTES {
            return Found::Full;
        }
        let Some(granule) = MappedGranule::map(file, size_log2).map(Arc::new) else { return Found::Refused };
        let number = self.all.len() as u32;
        let asked =
            self.importer.as_ref().map(|importer| importer.send(Request::Register(number, Arc::clone(&granule))));
        if !matches!(asked, Some(Ok(()))) {
            return Found::Full;
        }
        self.all.push(Import { file: id, granule, address: None, used: true });
        Found::Soon(number)
    }

    /// It is registered; None: it cannot be.
    pub(super) fn set_address(&mut self, number: u32, address: Option<u64>) {
        if let Some(import) = self.all.get_mut(number as usize) {
            import.address = address;
        }
    }

    /// The connection is over.
    pub(super) fn give_back(&mut self, number: u32) {
        if let Some(import) = self.all.get_mut(number as usize) {
            import.used = false;
        }
    }

    /// Where kernels see it.
    pub(super) fn address(&self, number: u32) -> u64 {
        self.all.get(number as usize).and_then(|import| import.address).unwrap_or(0)
    }

    /// Its memory.
    pub(super) fn granule(&self, number: u32) -> Option<Arc<MappedGranule>> {
        self.all.get(number as usize).map(|import| Arc::clone(&import.granule))
    }
}
