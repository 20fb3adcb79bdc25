//! The devices under a file: disks, arrays, stripes, and which layer would refuse peer-to-peer DMA.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use spinio_io::{NoRing, runtime};
use spinio_plan::geometry::{BlockStack, Kind, Layer, P2pHint, Role};
use spinio_sys::linux::{self, Fd, SharedRing};

use super::{Fact, State};
use crate::{block_stack, format, input};

const GROUP: &str = "Storage";

/// File systems that have no storage. Their files take the routes of cached ones.
const IN_MEMORY: [&str; 2] = ["tmpfs", "ramfs"];

/// Collects the facts.
pub fn collect(path: &Path) -> anyhow::Result<Vec<Fact>> {
    let file = input::open(path)?;
    let stack = runtime()
        .storage(file.as_raw_fd())
        .with_context(|| format!("Cannot find out what is under {}", path.display()))?;
    let mut facts = facts(path, &stack);
    facts.push(engine(file.as_raw_fd(), &stack));
    Ok(facts)
}

/// What reads around the page cache: the ring, shadow workers, or nothing, and why.
fn engine(fd: Fd, under: &BlockStack) -> Fact {
    let name = "storage engine";
    if IN_MEMORY.contains(&under.file_system.as_str()) {
        return Fact::new(GROUP, name, State::Absent, "none: nothing is read around the page cache")
            .because("this file system keeps its files in memory");
    }
    let refusal = match runtime().ring_refusal_of(fd) {
        Err(e) => return Fact::new(GROUP, name, State::Limited, "unknown").because(e.to_string()),
        // Tried, because only the kernel knows.
        Ok(None) => match SharedRing::new(4, 4, Duration::from_millis(1)) {
            Ok(ring) => linux::close(ring.fd()).err().map(NoRing::Refused),
            Err(errno) => Some(NoRing::Refused(errno)),
        },
        Ok(refusal) => refusal,
    };
    let Some(refusal) = refusal else {
        let detail = "io_uring with SQPOLL: absent data is read without another thread of the process";
        return Fact::new(GROUP, name, State::Found, detail);
    };
    let fact = Fact::new(
        GROUP,
        name,
        State::Limited,
        "worker threads, up to 8 for one file system, each waiting for one command",
    )
    .because(refusal.to_string());
    match refusal {
        NoRing::BySetting => fact.cure("unset SPINIO_STORAGE_ENGINE"),
        NoRing::FileSystem => fact.cure("keep large files on ext4 or XFS"),
        NoRing::Refused(_) => fact.cure("see io_uring above: sysctl kernel.io_uring_disabled, or the seccomp profile"),
        NoRing::FewProcessors => fact.cure("SPINIO_STORAGE_ENGINE=ring uses it all the same"),
        NoRing::NotAwake | NoRing::NotRegistered | NoRing::OtherStorage => fact,
    }
}

fn facts(path: &Path, under: &BlockStack) -> Vec<Fact> {
    let Some(top) = &under.top else {
        let what = format!("{} on {}", path.display(), under.file_system);
        let fact = Fact::new(GROUP, "disks", State::Absent, what)
            .because("the kernel names no block device for this file system: it lives in memory, comes by network, or hides it")
            .with_picture(under.to_string(), block_stack::json(under));
        return vec![fact];
    };
    let mut facts = vec![
        Fact::new(GROUP, "disks", State::Found, path.display().to_string())
            .with_picture(under.to_string(), block_stack::json(under)),
    ];
    facts.push(match under.stripe() {
        Some(_) => Fact::new(GROUP, "stripes", State::Found, block_stack::stripes(under)),
        None => Fact::new(GROUP, "stripes", State::Absent, "none: no array deals out chunks"),
    });
    facts.push(match under.read_ahead() {
        0 => Fact::new(GROUP, "read-ahead", State::Limited, "off: small sequential reads wait for storage each time")
            .cure(format!("blockdev --setra 256 /dev/{}", top.name)),
        bytes => Fact::new(GROUP, "read-ahead", State::Found, format!("window of {}", format::bytes(bytes))),
    });
    let p2p = P2pHint::from_stack(under);
    facts.push(match &p2p {
        P2pHint::Allowed => Fact::new(GROUP, "peer-to-peer", State::Found, p2p.text()),
        P2pHint::Array(_) => Fact::new(GROUP, "peer-to-peer", State::Found, p2p.text()),
        P2pHint::Blocked(..) => Fact::new(GROUP, "peer-to-peer", State::Limited, p2p.text())
            .cure("NVMe drives on PCIe, alone or in an md array of level 0, 1 or 10"),
    });
    degraded_arrays(top, &mut facts);
    facts
}

/// Arrays with a missing disk.
fn degraded_arrays(layer: &Layer, facts: &mut Vec<Fact>) {
    if let Kind::Md(md) = &layer.kind
        && md.degraded > 0
    {
        let rebuilding = layer.members.iter().any(|m| m.role == Role::Rebuilding);
        facts.push(
            Fact::new(GROUP, &layer.name, State::Limited, layer.describe())
                .because("reads of the missing disk's data are computed from the others")
                .cure(if rebuilding { "wait: it is being rebuilt" } else { "mdadm --add a disk in its place" }),
        );
    }
    layer.members.iter().for_each(|member| degraded_arrays(member, facts));
}
