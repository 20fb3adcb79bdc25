//! The emulated devices of a process: as many as `SPINIO_EMULATED` says, `emulated:0` to `emulated:7`.
//!
//! ```text
//!   configure("devices=2,size=64M") ── device(1): made at its first use ── current(): the one that a thread has chosen
//! ```
//!
//! All are alike, and each has its own memory, engine, streams and identity. A device has the same number in every
//! process, so that `emulated:1` of two processes is one device to what they share ([`super::Emulated::start`] makes
//! others, for tests). As in the CUDA runtime each thread has a current device, the first one until it chooses another.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::config::MAX_DEVICES;
use super::{Config, ConfigError, Emulated, Result};
use crate::{DeviceAddr, DeviceError, DeviceId, ErrorKind, StreamId};

static DEVICES: Mutex<Devices> = Mutex::new(Devices { config: None, started: [None; MAX_DEVICES as usize] });

/// All that were ever made, those of tests too.
static ALL: Mutex<Vec<&'static Emulated>> = Mutex::new(Vec::new());

thread_local! {
    /// Without a destructor, so that a hook may read it in a thread that is exiting.
    static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
}

struct Devices {
    config: Option<Config>,
    started: [Option<&'static Emulated>; MAX_DEVICES as usize],
}

impl Devices {
    fn config(&self) -> Config {
        self.config.unwrap_or_default()
    }
}

/// Configures the devices: the text of `SPINIO_EMULATED`. Starts none, and is without effect once one was made.
///
/// # Errors
/// If it is no such text.
pub fn configure(text: &str) -> core::result::Result<(), ConfigError> {
    let config = Config::parse(text)?;
    let mut devices = lock();
    if devices.started.iter().all(Option::is_none) {
        devices.config = Some(config);
    }
    Ok(())
}

/// How many this process has.
pub fn count() -> u32 {
    lock().config().devices
}

/// A device, made now if necessary.
///
/// # Errors
/// Unsupported: there is none of this number.
pub fn device(ordinal: u32) -> Result<&'static Emulated> {
    let mut devices = lock();
    let config = devices.config();
    if ordinal >= config.devices {
        let only = "emulated devices: emulated:0 is the only emulated device, unless SPINIO_EMULATED has devices=2";
        let fewer = "emulated devices: SPINIO_EMULATED has fewer";
        return Err(DeviceError::new(ErrorKind::Unsupported, if config.devices == 1 { only } else { fewer }));
    }
    let slot = &mut devices.started[ordinal as usize];
    match slot {
        Some(device) => Ok(device),
        None => Ok(slot.insert(Emulated::start_numbered(config, ordinal)?)),
    }
}

/// The device that this thread uses, made now if necessary.
///
/// # Errors
/// If it cannot be made.
pub fn current() -> Result<&'static Emulated> {
    device(CURRENT.get().unwrap_or(0))
}

/// The device of a stream, which [`Emulated::new_stream`] made or is 0: that of this thread.
///
/// # Errors
/// If there is none.
pub fn of_stream(stream: StreamId) -> Result<&'static Emulated> {
    if stream.0 == 0 { current() } else { device((stream.0 >> 32) as u32) }
}

/// The number of the device that this thread uses.
pub fn current_ordinal() -> u32 {
    CURRENT.get().unwrap_or(0)
}

/// Chooses the device that this thread uses, and makes it if necessary.
///
/// # Errors
/// If there is none of this number.
pub fn set_current(ordinal: u32) -> Result<()> {
    device(ordinal)?;
    CURRENT.set(Some(ordinal));
    Ok(())
}

/// The device that this thread uses, if it was made; of a thread that has chosen none, the first that was made.
pub(crate) fn current_in_use() -> Option<&'static Emulated> {
    let devices = lock();
    match CURRENT.get() {
        Some(ordinal) => devices.started[ordinal as usize],
        None => devices.started.iter().flatten().next().copied(),
    }
}

/// A device that was made.
pub(crate) fn with_id(id: DeviceId) -> Option<&'static Emulated> {
    lock_all().iter().find(|device| device.ordinal == id.ordinal).copied()
}

/// Whether this process has a device of this number, or would make it.
pub(super) fn exists(ordinal: u32) -> bool {
    ordinal < count() || lock_all().iter().any(|device| device.ordinal == ordinal)
}

/// The device whose memory an address is.
pub(super) fn owner_of(addr: DeviceAddr) -> Option<&'static Emulated> {
    lock_all().iter().find(|device| device.memory.contains(addr)).copied()
}

pub(super) fn add(device: &'static Emulated) {
    lock_all().push(device);
}

fn lock() -> MutexGuard<'static, Devices> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lock_all() -> MutexGuard<'static, Vec<&'static Emulated>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}
