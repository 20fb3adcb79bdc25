//! Devices as the command line names them, and memory on one for this process.

use std::fmt;
use std::str::FromStr;

use anyhow::Context;
use spinio_device::cuda::standalone;
use spinio_device::{Device, DeviceAddr, DeviceId, DeviceKind, emulated, registry};
use spinio_io::{Target, runtime};

use crate::exit::{self, Exit};
use crate::format;

/// A device named on the command line: `cuda:0`, `p2pmem:1`, `emulated`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceName(pub DeviceId);

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceName, String> {
        let (kind, number) = text.split_once(':').unwrap_or((text, "0"));
        let kinds = [DeviceKind::Cuda, DeviceKind::P2pmem, DeviceKind::Emulated];
        let kind = kinds.into_iter().find(|k| k.name() == kind);
        match (kind, number.parse()) {
            (Some(kind), Ok(ordinal)) => Ok(DeviceName(DeviceId { kind, ordinal })),
            _ => Err(format!("`{text}` names no device: write cuda:0, p2pmem:0 or emulated")),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The device that a user most likely means: a CUDA GPU if there is one, else the software GPU.
pub fn preferred() -> DeviceName {
    let kind = if standalone::count().is_ok_and(|n| n > 0) { DeviceKind::Cuda } else { DeviceKind::Emulated };
    DeviceName(DeviceId { kind, ordinal: 0 })
}

/// A device, for this process. The settings (`SPINIO_EMULATED`) describe the emulated one.
pub fn open(device: DeviceName) -> anyhow::Result<&'static dyn Device> {
    let DeviceName(id) = device;
    let missing =
        |e: &dyn fmt::Display| exit::error(Exit::Missing, format!("Cannot use {id}: {e}. `spinio doctor` has details"));
    match id.kind {
        DeviceKind::Cuda => standalone::open(id.ordinal).map_err(|e| missing(&e)),
        DeviceKind::Emulated => {
            configure()?;
            let device = emulated::device(id.ordinal).map_err(|e| missing(&e))?;
            Ok(device)
        }
        _ => Err(missing(&"files cannot be mapped there")),
    }
}

/// Memory on a device, freed when dropped.
pub struct Buffer {
    /// Its address.
    pub target: Target,
    addr: DeviceAddr,
}

impl Buffer {
    /// New memory. The settings of this process (`SPINIO_EMULATED`) describe the emulated device.
    pub fn new(device: DeviceName, len: u64) -> anyhow::Result<Buffer> {
        Buffer::alloc(device, len, false)
    }

    /// The same, host-mapped if the device supports it: storage may be able to reach such memory.
    pub fn mapped(device: DeviceName, len: u64) -> anyhow::Result<Buffer> {
        Buffer::alloc(device, len, true).or_else(|_| Buffer::alloc(device, len, false))
    }

    fn alloc(device: DeviceName, len: u64, host_mapped: bool) -> anyhow::Result<Buffer> {
        let DeviceName(id) = device;
        let failed = || format!("Cannot allocate {} on {id}", format::bytes(len));
        let missing = |e: &dyn fmt::Display| {
            exit::error(Exit::Missing, format!("{}: {e}. `spinio doctor` has details", failed()))
        };
        let bytes = usize::try_from(len).with_context(failed)?;
        match id.kind {
            // For the cause: the registry would only return that there is none.
            DeviceKind::Cuda => drop(standalone::open(id.ordinal).map_err(|e| missing(&e))?),
            _ => configure()?,
        }
        let made = registry::alloc(id.kind, id.ordinal, bytes, host_mapped);
        let addr = made.map_err(|e| missing(&e))?;
        let allocation = registry::find_or_query(addr.0 as *const u8, bytes)
            .with_context(|| format!("{id} does not know the memory it has just given"))?;
        Ok(Buffer { target: Target { allocation, addr }, addr })
    }
}

/// The properties of a buffer on a device; the buffer is not kept.
pub fn probe_buffer(device: DeviceName) -> anyhow::Result<spinio_io::Buffer> {
    let page = Buffer::new(device, 4096)?;
    Ok(spinio_io::Buffer::of(&page.target.allocation))
}

/// The number of emulated devices, as the settings of this process say.
pub fn emulated_devices() -> anyhow::Result<u32> {
    configure()?;
    Ok(emulated::count())
}

fn configure() -> anyhow::Result<()> {
    match &runtime().settings().emulated {
        Some(text) => emulated::configure(text).map_err(|e| exit::error(Exit::Usage, format!("SPINIO_EMULATED: {e}"))),
        None => Ok(()),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Memory that cannot be freed is freed with the process, which is about to end.
        let _ = registry::free(self.addr);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |text: &str| text.parse::<DeviceName>().map(|n| n.to_string());
        assert_eq!(name("emulated").as_deref(), Ok("emulated:0"));
        assert_eq!(name("cuda:1").as_deref(), Ok("cuda:1"));
        assert!(name("cuda:x").is_err() && name("gpu").is_err() && name("").is_err());
    }
}
