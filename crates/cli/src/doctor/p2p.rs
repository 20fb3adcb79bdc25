//! Peer-to-peer: which devices publish memory, and which drives can DMA into it.
//!
//! ```text
//!   root port ─┬─ switch ─┬─ drive A          same switch: it routes packets between its own ports
//!              │          └─ GPU or memory
//!   root port ─── drive B                     through the host bridge: only if the kernel
//!                                             has the processor on its list
//! ```

use std::path::Path;

use spinio_device::p2pmem::{self, Provider};

use super::{Fact, State, text_of};
use crate::format;

const GROUP: &str = "Peer-to-peer";
const DEVICES: &str = "/sys/bus/pci/devices";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    let providers = p2pmem::providers();
    facts.push(config(providers.iter().any(|p| p.published)));
    if providers.is_empty() {
        facts.push(
            Fact::new(GROUP, "p2pmem", State::Absent, "no PCI device publishes memory: the p2p route stays closed")
                .because(format!(
                    "no {DEVICES}/*/p2pmem: no drive with a controller memory buffer, no driver that publishes a BAR"
                ))
                .cure("an NVMe drive with a controller memory buffer; for NVIDIA GPUs see `P2PDMA` below"),
        );
        return;
    }
    for provider in &providers {
        facts.push(memory(provider));
        if !provider.published {
            continue;
        }
        let mine = pci_path(&provider.address);
        for (drive, path) in drives() {
            facts.push(reachability(provider, &mine, &drive, &path));
        }
    }
}

fn config(any: bool) -> Fact {
    let name = "CONFIG_PCI_P2PDMA";
    if any {
        return Fact::new(GROUP, name, State::Found, "in this kernel: memory is published");
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let places = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
    match places.iter().find_map(text_of).or_else(kernel_config) {
        Some(text) if text.lines().any(|l| l == "CONFIG_PCI_P2PDMA=y") => {
            Fact::new(GROUP, name, State::Found, "in this kernel")
        }
        Some(_) => Fact::new(GROUP, name, State::Absent, "not in this kernel")
            .because("the kernel was built without it, as Debian 12's and 13's own are")
            .cure("a kernel with CONFIG_PCI_P2PDMA=y, such as Debian 13's backports"),
        None => Fact::new(GROUP, name, State::Absent, "unknown until a device publishes memory")
            .because(format!("no {} to read", places[0])),
    }
}

/// The configuration of the running kernel, if the kernel contains it.
fn kernel_config() -> Option<String> {
    let packed = "/proc/config.gz";
    Path::new(packed).exists().then_some(())?;
    let out = std::process::Command::new("gzip").args(["-dc", packed]).output().ok()?;
    String::from_utf8(out.stdout).ok().filter(|t| t.contains("CONFIG_"))
}

fn memory(p: &Provider) -> Fact {
    let size = format!("{}, {} free", format::bytes(p.size), format::bytes(p.available));
    let allocate = Path::new(DEVICES).join(&p.address).join("p2pmem/allocate");
    if !p.published {
        return Fact::new(GROUP, &p.address, State::Limited, format!("{size}, but not published")).because(
            "its driver has not given it to others, though the Linux kernel lets root map it: it may be in use, as all \
                 of video memory is that an NVIDIA driver armed for P2PDMA lists so. SPIN takes nothing of it",
        );
    }
    match std::fs::OpenOptions::new().read(true).write(true).open(&allocate) {
        Ok(_) => Fact::new(GROUP, &p.address, State::Found, size),
        Err(e) => Fact::new(GROUP, &p.address, State::Limited, format!("{size}, but not for this user"))
            .because(format!("{}: {e}", allocate.display()))
            .cure(format!("chmod a+rw {}", allocate.display())),
    }
}

/// NVMe controllers: name and the PCI devices above and including them.
fn drives() -> Vec<(String, Vec<String>)> {
    let mut out: Vec<_> = std::fs::read_dir("/sys/class/nvme")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| (e.file_name().to_string_lossy().into_owned(), pci_path_of(&e.path().join("device"))))
        .collect();
    out.sort();
    out
}

fn pci_path(address: &str) -> Vec<String> {
    pci_path_of(&Path::new(DEVICES).join(address))
}

/// The PCI addresses on the path from the root to a device.
fn pci_path_of(link: &Path) -> Vec<String> {
    let path = link.canonicalize().unwrap_or_default();
    path.iter().map(|c| c.to_string_lossy().into_owned()).filter(|c| is_pci_address(c)).collect()
}

/// `0000:03:00.0`
fn is_pci_address(text: &str) -> bool {
    let mut parts = text.split([':', '.']);
    let hex = |p: Option<&str>, len| p.is_some_and(|p| p.len() >= len && p.bytes().all(|b| b.is_ascii_hexdigit()));
    hex(parts.next(), 4)
        && hex(parts.next(), 2)
        && hex(parts.next(), 2)
        && hex(parts.next(), 1)
        && parts.next().is_none()
}

fn reachability(provider: &Provider, provider_path: &[String], drive: &str, path: &[String]) -> Fact {
    let name = format!("{drive} to {}", provider.address);
    if path.last() == provider_path.last() {
        return Fact::new(GROUP, name, State::Found, "the memory is the drive's own");
    }
    match common_bridge(provider_path, path) {
        Some(port) => Fact::new(GROUP, name, State::Found, format!("under the same port, {port}")),
        None => Fact::new(GROUP, name, State::Limited, "only through the host bridge")
            .because("the kernel passes that only on processors it knows to forward peer-to-peer")
            .cure("put both under one PCIe switch; spinio explain says whether the P2P probe passed"),
    }
}

/// The first bridge above both.
fn common_bridge<'a>(a: &'a [String], b: &[String]) -> Option<&'a String> {
    let (first, other) = (a.first()?, b.first()?);
    (a.len() > 1 && b.len() > 1 && first == other).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Vec<String> {
        text.split('/').map(str::to_owned).filter(|c| is_pci_address(c)).collect()
    }

    #[test]
    fn pci_address_is_recognised() {
        assert!(is_pci_address("0000:03:00.0") && is_pci_address("10000:e1:1f.7"));
        assert!(!is_pci_address("pci0000:00") && !is_pci_address("nvme0") && !is_pci_address("0000:03:00"));
    }

    #[test]
    fn p2p_needs_common_root_port() {
        let memory = path("/sys/devices/pci0000:00/0000:00:02.0/0000:01:00.0/0000:02:00.0/0000:03:00.0");
        let near = path("/sys/devices/pci0000:00/0000:00:02.0/0000:01:00.0/0000:02:01.0/0000:04:00.0");
        let far = path("/sys/devices/pci0000:00/0000:00:03.0/0000:05:00.0");
        let on_root = path("/sys/devices/pci0000:00/0000:00:07.0");
        assert_eq!(common_bridge(&memory, &near).map(String::as_str), Some("0000:00:02.0"));
        assert_eq!(common_bridge(&memory, &far), None);
        assert_eq!(common_bridge(&on_root, &on_root), None);
        assert_eq!(common_bridge(&[], &near), None);
    }
}
