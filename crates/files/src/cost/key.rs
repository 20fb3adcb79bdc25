//! The key of a model: the storage, file system and device that it was measured on, by names that are stable across
//! reboots.
//!
//! ```text
//!   /sys/dev/block/259:3 ──> partition? its disk ──> dm/uuid, md/uuid, wwid, device/wwid, device/serial, serial
//!                                                   none of these: the kernel's name of it
//! ```

use spinio_device::{Device, DeviceKind};
use spinio_sys::linux::fs_magic;

/// What a model applies to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelKey {
    /// The disk or array under the file system.
    pub storage: String,
    /// The kind of file system.
    pub file_system: String,
    /// The accelerator.
    pub device: String,
}

impl ModelKey {
    /// From names and the file system's magic number; 0: the storage itself.
    pub fn new(storage: String, file_system: u64, device: String) -> ModelKey {
        let name = if file_system == 0 { Some("none") } else { fs_magic::name(file_system) };
        let file_system = name.map_or_else(|| format!("{file_system:x}"), str::to_owned);
        ModelKey { storage, file_system, device }
    }

    /// Name of the file that contains its model: the three names, sanitized, and a hash of all of them.
    pub fn file_name(&self) -> String {
        let sanitize = |text: &str| -> String {
            let replace = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '_' };
            text.chars().take(40).map(replace).collect()
        };
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for byte in [&self.storage, &self.file_system, &self.device].into_iter().flat_map(|t| t.bytes().chain([0])) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let names = [sanitize(&self.storage), sanitize(&self.file_system), sanitize(&self.device)];
        format!("{}-{:08x}", names.join("-"), hash as u32 ^ (hash >> 32) as u32)
    }
}

/// The name of a device, stable across reboots and driver versions. Called on the program's thread.
pub(super) fn device_name(device: &dyn Device) -> String {
    let description = device.describe();
    match device.id().kind {
        // The rest is its bus address and the driver version.
        DeviceKind::Cuda => format!("cuda {}", description.split(',').next().unwrap_or_default()),
        // The rest is its configuration, which determines the costs.
        DeviceKind::Emulated | DeviceKind::P2pmem => description,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_sanitized_and_distinct() {
        let key_name = |device: &str| ModelKey::new("serial /../x".into(), 0xef53, device.into()).file_name();
        let name = key_name("cuda NVIDIA H200");
        assert!(name.starts_with("serial__.._x-ext4-cuda_NVIDIA_H200-"), "{name}");
        assert!(!name.contains('/'));
        assert_ne!(key_name("cuda é"), key_name("cuda è"));
        assert_eq!(ModelKey::new(String::new(), 0x1234, String::new()).file_system, "1234");
    }
}
