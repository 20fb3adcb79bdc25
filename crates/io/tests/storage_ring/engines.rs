//! The three engines that read storage, for tests that run with each.

use std::fs::File;

use spinio_device::emulated::Emulated;
use spinio_host::settings::StorageEngine;
use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::faulty_syscalls::Call;
use spinio_testkit::{Buffer, FaultySyscalls};

use super::{MIB, read, settings, warm_up};

/// What reads storage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Engine {
    /// The shared ring.
    Ring,
    /// Shadow workers.
    Workers,
    /// The calling thread's own ring, into peer-to-peer memory.
    OwnRing,
}

/// A runtime with an engine, and its device.
pub(crate) struct StorageReader {
    pub(crate) runtime: Runtime,
    device: &'static Emulated,
    engine: Engine,
}

impl Engine {
    pub(crate) const ALL: [Engine; 3] = [Engine::Ring, Engine::Workers, Engine::OwnRing];

    /// A runtime that has read the file with it; `None` where it cannot.
    pub(crate) fn start(self, file: &File) -> Option<StorageReader> {
        let device = emulated(if self == Engine::OwnRing { "size=256M,bar=128M,p2p=1" } else { "size=256M" });
        let reader = |runtime| StorageReader { runtime, device, engine: self };
        match self {
            Engine::Ring => {
                let reader = reader(Runtime::new(settings()));
                warm_up(&reader.runtime, file, &reader.buffer(MIB)).then_some(reader)
            }
            Engine::Workers => {
                let settings = Settings { storage_engine: StorageEngine::Workers, ..Settings::default() };
                Some(reader(Runtime::new(settings)))
            }
            Engine::OwnRing => {
                let kernel = FaultySyscalls::new();
                let reader = reader(Runtime::with_kernel(Settings::default(), kernel));
                assert_eq!(read(&reader.runtime, file, &reader.buffer(MIB), 0, MIB), Ok(MIB));
                let by_own_ring = kernel.calls(Call::OwnRingRead) > 0;
                if !by_own_ring {
                    eprintln!("skipped: no P2P, or no ring of a thread, here");
                }
                by_own_ring.then_some(reader)
            }
        }
    }
}

impl StorageReader {
    /// Memory that the engine reads into.
    pub(crate) fn buffer(&self, len: usize) -> Buffer {
        match self.engine {
            Engine::OwnRing => Buffer::host_mapped(self.device, len),
            _ => Buffer::new(self.device, len),
        }
    }
}
