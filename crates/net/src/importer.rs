//! Registers granules of other nets with the device, on a thread of the program.
//!
//! ```text
//!   proxy: was offered a granule, has mapped it ──> importer ── registers it ──> proxy: where kernels see it
//!   proxy has ended ──> importer ── takes all registrations back, unmaps ──> the net is closed
//! ```
//!
//! The proxy cannot: a driver finds its descriptors in the program's table, and a call of it may wait. Drivers were seen to
//! register memory beside running kernels, but they take registrations back only when none runs, so that waits for the end.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use spinio_device::SharedMemory;
use spinio_sys::linux::spawn_signals_blocked;

use crate::mapped_granule::MappedGranule;
use crate::proxy::Command;

/// Of the thread: a driver's call needs more than our own code.
const STACK_BYTES: usize = 256 << 10;

/// A granule that the proxy has mapped, and its number there.
pub(crate) type Request = (u32, Arc<MappedGranule>);

/// Starts it: where requests go, and what is disconnected once all is given back. Without a thread for it there is none, and
/// kernels that connect to other nets stay with Linux.
pub(crate) fn start(
    device: &'static dyn SharedMemory,
    commands: Sender<Command>,
) -> Option<(Sender<Request>, Receiver<()>)> {
    let (requests, receiver) = mpsc::channel::<Request>();
    let (alive, ended) = mpsc::sync_channel::<()>(1);
    let body = move || {
        let _alive = alive;
        let mut registered = Vec::new();
        while let Ok((number, granule)) = receiver.recv() {
            let mut address = None;
            if granule.register(device) {
                address = granule.device_address(device);
                registered.push(granule);
            }
            // It fails, once the proxy has ended.
            let _ = commands.send(Command::Imported(number, address));
        }
        for granule in registered {
            if !granule.unregister(device) {
                // The device may still use it.
                std::mem::forget(granule);
            }
        }
    };
    spawn_signals_blocked("spinio-net-map", STACK_BYTES, body).ok()?;
    Some((requests, ended))
}
