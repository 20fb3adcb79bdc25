//! Whether storage may DMA into a device: the result of the probe, per file system (or block device) and device.

use std::collections::HashMap;
use std::sync::Mutex;

use spinio_device::{Device, DeviceId};
use spinio_host::lock;
use spinio_plan::Reason;

/// Whether storage may DMA into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum P2pTrust {
    /// The probe matched.
    Trusted,
    /// Linux reports that it cannot.
    Unreachable,
    /// The probe did not match.
    Untrusted,
}

impl P2pTrust {
    /// Whether P2P may be used, or why not.
    pub fn allows(self) -> Result<(), Reason> {
        match self {
            P2pTrust::Trusted => Ok(()),
            P2pTrust::Unreachable => Err(Reason::P2pUnreachable),
            P2pTrust::Untrusted => Err(Reason::P2pUntrusted),
        }
    }
}

/// The probe results of a runtime.
#[derive(Default)]
pub struct P2pTrustMap(Mutex<HashMap<(u64, DeviceId), P2pTrust>>);

impl P2pTrustMap {
    /// Whether this storage may DMA into the device, if that is known.
    pub fn p2p_trust(&self, storage: u64, device: &dyn Device) -> Option<P2pTrust> {
        lock(&self.0).get(&(storage, device.id())).copied()
    }

    /// Why P2P from this storage was refused before, to any device.
    pub fn known_refusal(&self, storage: u64) -> Option<Reason> {
        let trust = lock(&self.0);
        let mut of_storage = trust.iter().filter(|((of, _), _)| *of == storage);
        of_storage.find_map(|(_, trust)| trust.allows().err())
    }

    /// Stores a result.
    pub fn set(&self, storage: u64, device: &dyn Device, trust: P2pTrust) {
        lock(&self.0).insert((storage, device.id()), trust);
    }
}
