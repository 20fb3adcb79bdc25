//! The few formats of text in sysfs. Each parser accepts any input and returns `None` for an unknown format.

use super::{Role, Transport};

/// The number at the start of a text: "65536\n", and "4 (3)" of an array that is being reshaped.
pub(super) fn number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let end = text.bytes().position(|b| !b.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// "259:3"
pub(super) fn device_number(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The disk's transport and PCI address, from the target of `/sys/dev/block/259:3`.
pub(super) fn disk_path(link: &str) -> (Transport, Option<String>) {
    let mut transport = None;
    let mut pci = None;
    let numbered = |part: &str, stem: &str| {
        part.strip_prefix(stem).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    // From the root down: a nearer component is more specific, but any component beats "virtual" and plain SCSI.
    for part in link.split('/') {
        let found = match part {
            p if is_pci_address(p) => {
                pci = Some(p.to_owned());
                continue;
            }
            "nvme-fabrics" => Transport::NvmeFabrics,
            p if p.starts_with("nvme") => Transport::Nvme,
            p if numbered(p, "virtio") => Transport::Virtio,
            p if numbered(p, "ata") => Transport::Sata,
            p if numbered(p, "usb") => Transport::Usb,
            p if p.starts_with("end_device-") => Transport::Sas,
            p if numbered(p, "mmc") || p.starts_with("mmc_host") => Transport::Mmc,
            p if p.starts_with("pmem") || p.starts_with("ndbus") => Transport::Pmem,
            p if numbered(p, "host") && matches!(transport, None | Some(Transport::Virtual)) => Transport::Scsi,
            "virtual" if transport.is_none() => Transport::Virtual,
            _ => continue,
        };
        if transport != Some(Transport::NvmeFabrics) {
            transport = Some(found);
        }
    }
    (transport.unwrap_or(Transport::Unknown), pci)
}

/// `0000:03:00.0`
fn is_pci_address(text: &str) -> bool {
    let mut parts = text.split([':', '.']);
    let hex = |p: Option<&str>, least| p.is_some_and(|p| p.len() >= least && p.bytes().all(|b| b.is_ascii_hexdigit()));
    hex(parts.next(), 4)
        && hex(parts.next(), 2)
        && hex(parts.next(), 2)
        && hex(parts.next(), 1)
        && parts.next().is_none()
        && text.contains('.')
}

/// `md/dev-NAME/state` and `slot`: a disk's role in the array.
pub(super) fn md_role(state: &str, slot: &str) -> Role {
    let has = |word: &str| state.trim().split(',').any(|w| w.trim() == word);
    match () {
        () if has("faulty") => Role::Faulty,
        () if has("in_sync") => Role::Active,
        () if number(slot).is_some() => Role::Rebuilding,
        () => Role::Spare,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(number("65536\n"), Some(65536));
        assert_eq!(number("4 (3)\n"), Some(4));
        assert_eq!(number(""), None);
        assert_eq!(number("none\n"), None);
        assert_eq!(number("99999999999999999999999"), None);
        assert_eq!(number("é1"), None);
        assert_eq!(device_number("259:3\n"), Some((259, 3)));
        assert_eq!(device_number("259:-3"), None);
        assert_eq!(device_number("259"), None);
    }

    #[test]
    fn transports() {
        let of = |link: &str| {
            let (transport, pci) = disk_path(link);
            (transport, pci.unwrap_or_default())
        };
        assert_eq!(
            of("../../devices/pci0000:00/0000:00:02.0/0000:03:00.0/nvme/nvme0/nvme0n1"),
            (Transport::Nvme, "0000:03:00.0".to_owned())
        );
        assert_eq!(of("../../devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1").0, Transport::Nvme);
        assert_eq!(of("../../devices/virtual/nvme-fabrics/ctl/nvme0/nvme0n1").0, Transport::NvmeFabrics);
        assert_eq!(
            of("../../devices/pci0000:00/0000:00:02.0/virtio1/block/vda"),
            (Transport::Virtio, "0000:00:02.0".to_owned())
        );
        assert_eq!(
            of("../../devices/pci0000:00/0000:00:17.0/ata3/host2/target2:0:0/2:0:0:0/block/sda").0,
            Transport::Sata
        );
        assert_eq!(
            of("../../devices/pci0000:00/0000:00:05.0/virtio2/host3/target3:0:0/3:0:0:0/block/sdb").0,
            Transport::Virtio
        );
        assert_eq!(of("../../devices/pci0000:00/0000:03:00.0/host0/target0:0:0/0:0:0:0/block/sdc").0, Transport::Scsi);
        assert_eq!(of("../../devices/virtual/block/zram0").0, Transport::Virtual);
        assert_eq!(of("").0, Transport::Unknown);
    }

    #[test]
    fn roles() {
        assert_eq!(md_role("in_sync\n", "0\n"), Role::Active);
        assert_eq!(md_role("in_sync,write_error", "0"), Role::Active);
        assert_eq!(md_role("faulty", "none"), Role::Faulty);
        assert_eq!(md_role("spare", "none"), Role::Spare);
        assert_eq!(md_role("spare", "2"), Role::Rebuilding);
    }
}
