//! Looks ten times a second whether the device still works. After a kernel's error no kernel of the process runs again: peers
//! would wait for answers that never come.
//!
//! ```text
//!   watcher ── query of an event of its own ──> driver: an error, twice ──> proxy: resets all connections, ENODEV
//! ```
//!
//! A query waits for no kernel, and makes the driver start work that it has kept back. Only CUDA devices are watched: an error
//! of an emulated kernel ends the process, and with it all sockets.
//!
//! Known flaw: a driver call of another thread that holds the driver's lock while it waits for a kernel delays the query.

use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use spinio_device::{Device, DeviceError, DeviceKind};
use spinio_sys::linux::spawn_signals_blocked;

use crate::proxy::Command;

const PERIOD: Duration = Duration::from_millis(100);
/// Of the thread: a driver's call needs more than our own code.
const STACK_BYTES: usize = 256 << 10;

/// The error of a device, once there was one.
pub(crate) type Failure = OnceLock<DeviceError>;

/// Ends the watcher once it is dropped.
#[derive(Debug)]
pub(crate) struct Watcher {
    _alive: Option<Sender<()>>,
}

impl Watcher {
    /// Tells the proxy if the device fails. Without a thread for it, it does not.
    pub(crate) fn start(
        device: &'static dyn Device,
        failure: std::sync::Arc<Failure>,
        commands: Sender<Command>,
    ) -> Watcher {
        if device.id().kind != DeviceKind::Cuda {
            return Watcher { _alive: None };
        }
        let (alive, ended) = mpsc::channel();
        let watch = move || {
            let mut failed = false;
            while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let Err(error) = look(device) else {
                    failed = false;
                    continue;
                };
                // Once could be a state that passes, as a capture.
                if std::mem::replace(&mut failed, true) {
                    let _ = failure.set(error);
                    let _ = commands.send(Command::Fail);
                    return;
                }
            }
        };
        let started = spawn_signals_blocked("spinio-net-look", STACK_BYTES, watch);
        Watcher { _alive: started.is_ok().then_some(alive) }
    }
}

/// Asks the device for the end of no work.
fn look(device: &'static dyn Device) -> Result<(), DeviceError> {
    let stream = device.acquire_stream()?;
    let fence = device.fence(stream);
    let done = fence.and_then(|fence| {
        let done = device.query(&fence);
        device.release_fence(fence);
        done
    });
    device.release_stream(stream);
    done.map(drop)
}
