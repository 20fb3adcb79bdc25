//! Limits, permissions and the memory of this machine, as seen by this process.

use rustix::process::{Resource, getrlimit};

use super::{Fact, State, text_of};
use crate::format;

const GROUP: &str = "Process and machine";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    facts.push(owner());
    facts.push(kernel_filesystem(
        "/proc",
        "/proc/self/status",
        "files cannot be opened a second time, so nothing is read directly",
    ));
    facts.push(kernel_filesystem(
        "/sys",
        "/sys/class",
        "block devices under a file, and peer-to-peer memory, stay unknown",
    ));
    facts.push(memlock());
    facts.push(descriptors());
    facts.push(seccomp());
    facts.push(huge_pages());
    facts.push(numa());
}

fn owner() -> Fact {
    let (name, uid) = ("files of others", rustix::process::geteuid().as_raw());
    if uid == 0 {
        return Fact::new(GROUP, name, State::Found, "root may ask what is cached of every file");
    }
    Fact::new(GROUP, name, State::Limited, "what is cached of them is found out by trial reads, not by a query")
        .because(format!("user {uid} may ask cachestat only about files it owns or may write to"))
}

fn kernel_filesystem(name: &str, probe: &str, without: &str) -> Fact {
    match std::fs::metadata(probe) {
        Ok(_) => Fact::new(GROUP, name, State::Found, "mounted"),
        Err(e) => Fact::new(GROUP, name, State::Limited, format!("not here: {without}"))
            .because(format!("{probe}: {e}"))
            .cure(format!("mount {name}")),
    }
}

fn memlock() -> Fact {
    let name = "RLIMIT_MEMLOCK";
    match getrlimit(Resource::Memlock).current {
        None => Fact::new(GROUP, name, State::Found, "unlimited"),
        Some(n) if n >= 64 << 20 => Fact::new(GROUP, name, State::Found, format::bytes(n)),
        Some(n) if memlock_is_unlimited() => {
            Fact::new(GROUP, name, State::Found, format!("{}, but CAP_IPC_LOCK may lock more", format::bytes(n)))
        }
        Some(n) => {
            let detail = format!("{}: little memory may be locked", format::bytes(n));
            Fact::new(GROUP, name, State::Limited, detail).cure("ulimit -l unlimited; LimitMEMLOCK= in a systemd unit")
        }
    }
}

/// Whether the limit does not apply to this process.
fn memlock_is_unlimited() -> bool {
    const IPC_LOCK: u32 = 14;
    let status = text_of("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set >> IPC_LOCK & 1 == 1)
}

fn descriptors() -> Fact {
    let name = "RLIMIT_NOFILE";
    match getrlimit(Resource::Nofile).current {
        Some(n) if n < 256 => {
            Fact::new(GROUP, name, State::Limited, format!("{n}: few files may be open at once")).cure("ulimit -n 1024")
        }
        Some(n) => Fact::new(GROUP, name, State::Found, n.to_string()),
        None => Fact::new(GROUP, name, State::Found, "unlimited"),
    }
}

fn seccomp() -> Fact {
    let status = text_of("/proc/self/status").unwrap_or_default();
    match status.lines().find_map(|l| l.strip_prefix("Seccomp:")).map(str::trim) {
        Some("0") => Fact::new(GROUP, "seccomp", State::Found, "no filter"),
        Some(_) => Fact::new(GROUP, "seccomp", State::Found, "a filter is active: the answers above went through it"),
        None => Fact::new(GROUP, "seccomp", State::Absent, "unknown"),
    }
}

fn huge_pages() -> Fact {
    let name = "huge pages";
    match text_of("/sys/kernel/mm/transparent_hugepage/enabled") {
        Some(modes) => {
            let chosen = modes.split(['[', ']']).nth(1).unwrap_or("unknown").to_owned();
            Fact::new(GROUP, name, State::Found, format!("transparent: {chosen}"))
        }
        None => Fact::new(GROUP, name, State::Absent, "no transparent huge pages: memory is pinned page by page"),
    }
}

fn numa() -> Fact {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let nodes = std::fs::read_dir("/sys/devices/system/node")
        .map_or(0, |dir| dir.flatten().filter(|e| is_node(&e.file_name().to_string_lossy())).count());
    match nodes {
        0 => Fact::new(GROUP, "NUMA", State::Absent, "unknown"),
        1 => Fact::new(GROUP, "NUMA", State::Found, "one node: all memory is near"),
        n => Fact::new(GROUP, "NUMA", State::Found, format!("{n} nodes: run a program near its GPU (numactl)")),
    }
}
