//! The NVIDIA driver: whether it is installed, the GPUs, and what they allow SPIN to do.
//!
//! The driver is loaded and initialised, as any CUDA program does; no context is created.

use std::path::Path;

use spinio_sys::cuda::{Driver, attribute};

use super::{Fact, State, text_of};
use crate::format;

const GROUP: &str = "NVIDIA";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    let module = text_of("/proc/driver/nvidia/version");
    match driver(facts, module.as_deref()) {
        Some(driver) => (0..driver.device_count().unwrap_or(0)).for_each(|ordinal| gpu(facts, driver, ordinal)),
        None => facts.push(
            Fact::new(GROUP, "BAR, HMM", State::Absent, "not queried")
                .because("they belong to a GPU, and none is usable"),
        ),
    }
    let gates = Gates::of(&text_of("/proc/driver/nvidia/params").unwrap_or_default());
    facts.extend(module.map(|_| p2pdma(gates)));
    facts.push(gds(gates));
}

fn driver(facts: &mut Vec<Fact>, module: Option<&str>) -> Option<&'static Driver> {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(e) => {
            let (state, cause, cure) = match module {
                None => (
                    State::Absent,
                    "no NVIDIA kernel module is loaded".to_owned(),
                    "with an NVIDIA GPU: install its driver",
                ),
                Some(_) => (
                    State::Limited,
                    format!("the kernel module is loaded, but {e}"),
                    "install the driver's user-space part; in a container, start it with the GPU's libraries mounted",
                ),
            };
            facts.push(Fact::new(GROUP, "driver", state, "none: no CUDA device").because(cause).cure(cure));
            return None;
        }
    };
    if let Err(e) = driver.init() {
        let mut fact = Fact::new(GROUP, "driver", State::Limited, "libcuda.so.1 is here, but does not start");
        fact = fact.because(match Path::new("/dev/nvidiactl").exists() {
            true => format!("cuInit: {e}"),
            false => format!("cuInit: {e}; there is no /dev/nvidiactl"),
        });
        facts.push(
            fact.cure(
                "load the kernel module (modprobe nvidia) of the same version; in a container, pass the devices in",
            ),
        );
        return None;
    }
    let version = driver.version().unwrap_or(0);
    let module = module.and_then(|m| m.lines().next()).and_then(module_version).unwrap_or("unknown version");
    let detail = format!("{module}, CUDA {}.{}", version / 1000, version % 1000 / 10);
    facts.push(Fact::new(GROUP, "driver", State::Found, detail));
    Some(driver)
}

/// `580.159.03` from the line of /proc/driver/nvidia/version.
fn module_version(line: &str) -> Option<&str> {
    line.split_whitespace().find(|w| w.contains('.') && w.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
}

fn gpu(facts: &mut Vec<Fact>, driver: &Driver, ordinal: i32) {
    let name = format!("cuda:{ordinal}");
    let device = match driver.device(ordinal) {
        Ok(device) => device,
        Err(e) => return facts.push(Fact::new(GROUP, name, State::Limited, "not usable").because(e.to_string())),
    };
    let title = driver.device_name(device).unwrap_or_else(|_| "a GPU".to_owned());
    let (memory, pci) = (driver.device_memory(device).unwrap_or(0), driver.device_pci(device).unwrap_or_default());
    let pci = pci.to_lowercase();
    facts.push(Fact::new(GROUP, &name, State::Found, format!("{title}, {}, {pci}", format::bytes(memory))));
    let can = |which| driver.device_attribute(device, which).unwrap_or(0) != 0;

    let what = format!("{name} registers pages");
    facts.push(if can(attribute::HOST_REGISTER_SUPPORTED) && can(attribute::READ_ONLY_HOST_REGISTER_SUPPORTED) {
        Fact::new(GROUP, what, State::Found, "page-cache pages, read-only: the dma route is open")
    } else {
        Fact::new(GROUP, what, State::Limited, "no: cached data takes the copy route")
            .because("the driver does not register read-only host memory for this GPU")
    });
    let what = format!("{name} HMM");
    facts.push(if can(attribute::PAGEABLE_MEMORY_ACCESS) {
        let by = match can(attribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES) {
            true => "through the page tables of the CPU",
            false => "by page faults",
        };
        let atomics = match can(attribute::HOST_NATIVE_ATOMIC_SUPPORTED) {
            true => "",
            false => "; no atomics on mapped files",
        };
        let detail =
            format!("kernels access any host memory {by}{atomics}; GAIA maps in place are coherent, and writable");
        Fact::new(GROUP, what, State::Found, detail)
    } else {
        Fact::new(
            GROUP,
            what,
            State::Absent,
            "kernels cannot read ordinary host memory; SPIN registers what they need, GAIA maps in place too",
        )
    });
    facts.push(bar(&name, &pci, memory));
    facts.push(numa(&name, &pci));
}

/// The window through which the CPU and other devices would reach the GPU's memory.
fn bar(name: &str, pci: &str, memory: u64) -> Fact {
    let name = format!("{name} BAR");
    let resource = text_of(format!("/sys/bus/pci/devices/{pci}/resource")).unwrap_or_default();
    let window = largest_window(&resource);
    let size = match window {
        0 => "its size is unknown".to_owned(),
        n if n >= memory => format!("{}, all of its memory", format::bytes(n)),
        n => format!("{} of {}", format::bytes(n), format::bytes(memory)),
    };
    Fact::new(GROUP, name, State::Absent, format!("{size}; not mapped, so no store and no p2p route into this GPU"))
        .because("SPIN has no p2p route into CUDA memory; `P2PDMA` shows whether the driver could offer one")
        .cure("none yet: docs/from-the-paper.md")
}

/// Lines of `start end flags`, in hexadecimal.
fn largest_window(resource: &str) -> u64 {
    let number = |w: Option<&str>| w.and_then(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).ok());
    let size = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = (number(words.next())?, number(words.next())?);
        (end > start).then(|| end - start + 1)
    };
    resource.lines().filter_map(size).max().unwrap_or(0)
}

fn numa(name: &str, pci: &str) -> Fact {
    let name = format!("{name} NUMA");
    match text_of(format!("/sys/bus/pci/devices/{pci}/numa_node")).as_deref() {
        Some("-1") | None => Fact::new(GROUP, name, State::Absent, "its node is unknown"),
        Some(node) => Fact::new(GROUP, name, State::Found, format!("node {node}")),
    }
}

/// The settings by which an administrator opens video memory to peer-to-peer DMA, since driver 565: a mapping with
/// struct pages, from which storage can transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Gates {
    static_bar1: bool,
    no_write_combining: bool,
}

impl Gates {
    /// From the text of /proc/driver/nvidia/params, whose line `RegistryDwords` is the value of NVreg_RegistryDwords.
    fn of(params: &str) -> Gates {
        let set = params.lines().find_map(|line| line.strip_prefix("RegistryDwords:")).unwrap_or_default();
        let is_on = |name: &str| {
            set.trim().trim_matches('"').split(';').filter_map(|pair| pair.split_once('=')).any(|(key, value)| {
                let value = value.trim();
                let value = value.strip_prefix("0x").map_or_else(|| value.parse(), |hex| u32::from_str_radix(hex, 16));
                key.trim().eq_ignore_ascii_case(name) && value.is_ok_and(|n| n != 0)
            })
        };
        Gates { static_bar1: is_on("RMForceStaticBar1"), no_write_combining: is_on("RmForceDisableIomapWC") }
    }

    fn are_open(self) -> bool {
        self.static_bar1 && self.no_write_combining
    }
}

fn p2pdma(gates: Gates) -> Fact {
    let name = "P2PDMA";
    if gates.are_open() {
        return Fact::new(
            GROUP,
            name,
            State::Absent,
            "RmForceDisableIomapWC and static BAR1 are set; SPIN does not use it yet",
        )
        .because("the driver may list the GPU as a p2pmem provider that is not published; SPIN takes nothing of that");
    }
    let closed = |name: &'static str, open: bool| (!open).then_some(name);
    let missing: Vec<&str> =
        [closed("RMForceStaticBar1", gates.static_bar1), closed("RmForceDisableIomapWC", gates.no_write_combining)]
            .into_iter()
            .flatten()
            .collect();
    Fact::new(GROUP, name, State::Absent, "closed: the driver maps no video memory with struct pages")
        .because(format!("not set in NVreg_RegistryDwords: {}", missing.join(", ")))
        .cure(
            "driver 565 or newer and, by the administrator, options nvidia \
             NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1\"; SPIN does not use it yet",
        )
}

/// GPUDirect Storage. Reported because users ask for it; SPIN does not use cuFile in this version.
fn gds(gates: Gates) -> Fact {
    let name = "GPUDirect Storage";
    let library = in_loader_cache(b"libcufile.so.0");
    let module = Path::new("/proc/driver/nvidia-fs/stats").exists();
    let detail = match (library, module) {
        (true, true) => "libcufile and nvidia-fs are here",
        (true, false) if gates.are_open() => {
            "libcufile is here, nvidia-fs is not: it would go by P2PDMA, whose gates are set"
        }
        (true, false) => {
            "libcufile is here, nvidia-fs is not, and P2PDMA is closed: it would run in compatibility mode"
        }
        (false, _) => "not installed",
    };
    Fact::new(GROUP, name, State::Absent, format!("{detail}; SPIN does not use it in this version"))
}

fn in_loader_cache(library: &[u8]) -> bool {
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    cache.windows(library.len()).any(|w| w == library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_version_parses() {
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (x)";
        assert_eq!(module_version(line), Some("580.159.03"));
        assert_eq!(module_version("nothing here"), None);
    }

    #[test]
    fn gates_are_read_from_the_modules_parameters() {
        let params =
            |dwords: &str| format!("ResmanDebugLevel: 4294967295\nRegistryDwords: \"{dwords}\"\nRmMsg: \"\"\n");
        let of = |dwords: &str| Gates::of(&params(dwords));
        assert!(of("PeerMappingOverride=1;RMForceStaticBar1=1;RmForceDisableIomapWC=1").are_open());
        assert!(of("RMForceStaticBar1=0x1; rmforcedisableiomapwc=1;").are_open());
        assert_eq!(of("RMForceStaticBar1=1"), Gates { static_bar1: true, ..Gates::default() });
        assert_eq!(of("RMForceStaticBar1=0;RmForceDisableIomapWC=0x0"), Gates::default());
        assert_eq!(Gates::of(""), Gates::default());
        let fact = p2pdma(of("RmForceDisableIomapWC=1"));
        assert_eq!(fact.cause.as_deref(), Some("not set in NVreg_RegistryDwords: RMForceStaticBar1"));
        assert!(p2pdma(Gates::default()).cure.unwrap().contains("RmForceDisableIomapWC=1"));
    }

    #[test]
    fn largest_window_parses() {
        let text = "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n\
                    0x0000004000000000 0x0000005fffffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000";
        assert_eq!(largest_window(text), 128 << 30);
        assert_eq!(largest_window(""), 0);
        assert_eq!(largest_window("x y z"), 0);
    }
}
