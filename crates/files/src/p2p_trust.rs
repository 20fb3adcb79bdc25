//! Whether storage may DMA into a device: what the probe found, for each file system (or block device) and device.

use std::collections::HashMap;
use std::sync::Mutex;

use spinio_device::{Device, DeviceId};
use spinio_host::lock;
use spinio_plan::Reason;

/// Whether storage may DMA into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The probe matched.
    Trusted,
    /// The kernel says that it cannot.
    Unreachable,
    /// The probe did not match.
    Untrusted,
}

impl Verdict {
    /// Whether P2P may be used, or why not.
    pub fn allows(self) -> Result<(), Reason> {
        match self {
            Verdict::Trusted => Ok(()),
            Verdict::Unreachable => Err(Reason::P2pUnreachable),
            Verdict::Untrusted => Err(Reason::P2pUntrusted),
        }
    }
}

/// The verdicts of a runtime.
#[derive(Default)]
pub struct P2pTrust(Mutex<HashMap<(u64, DeviceId), Verdict>>);

impl P2pTrust {
    /// Whether this storage may DMA into the device, if that is known.
    pub fn verdict(&self, storage: u64, device: &dyn Device) -> Option<Verdict> {
        lock(&self.0).get(&(storage, device.id())).copied()
    }

    /// Why P2P from this storage was refused before, to whichever device.
    pub fn known_refusal(&self, storage: u64) -> Option<Reason> {
        let verdicts = lock(&self.0);
        let mut of_storage = verdicts.iter().filter(|((of, _), _)| *of == storage);
        of_storage.find_map(|(_, verdict)| verdict.allows().err())
    }

    /// Remembers it.
    pub fn set(&self, storage: u64, device: &dyn Device, verdict: Verdict) {
        lock(&self.0).insert((storage, device.id()), verdict);
    }
}
