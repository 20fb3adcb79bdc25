//! SPIN's report of the block devices under a file, and whether it is correct. Every user may query it.

use std::os::fd::AsRawFd;

use spinio_io::Runtime;
use spinio_plan::geometry::{BlockStack, Kind, Level, P2pHint, Transport};

use super::verdict;
use crate::case::{Case, CaseError, Outcome, expect, fail};
use crate::memory::has_p2p;
use crate::place::{Guest, Place, remove};
use crate::spin::fresh;

const CHUNK: u64 = 64 << 10;

pub(super) fn cases() -> Vec<Case> {
    let mut all: Vec<Case> = Place::STACKS
        .into_iter()
        .map(|place| {
            Case::new(format!("spin: the block devices under a file, {}", place.name()), move |g| under(g, place))
        })
        .collect();
    all.push(Case::new("spin: the block devices under a file, tmpfs", nothing));
    all
}

/// The actual stack: file system, disks, and bytes of data in a stripe where there are stripes.
fn expected_stack(place: Place) -> (&'static str, usize, Option<u64>) {
    match place {
        Place::Raid0 => ("ext4", 4, Some(4 * CHUNK)),
        Place::Raid1 => ("ext4", 2, None),
        Place::Raid10 => ("ext4", 4, Some(2 * CHUNK)),
        Place::Raid5 => ("ext4", 4, Some(3 * CHUNK)),
        Place::Raid6 => ("ext4", 4, Some(2 * CHUNK)),
        // 192 MiB on each disk, of which the striped volume has 80.
        Place::Linear => ("ext4", 3, None),
        Place::Striped => ("xfs", 4, Some(4 * CHUNK)),
        Place::Part | Place::Crypt | Place::Loop => ("xfs", 1, None),
        _ => ("ext4", 1, None),
    }
}

fn is_right(place: Place, kind: &Kind) -> bool {
    let level = |wanted: Level| matches!(kind, Kind::Md(md) if md.level == wanted && md.degraded == 0);
    match place {
        Place::Part => matches!(kind, Kind::Partition { start } if *start > 0),
        Place::Raid0 => level(Level::Raid0),
        Place::Raid1 => level(Level::Raid1),
        Place::Raid10 => level(Level::Raid10),
        Place::Raid5 => level(Level::Raid5),
        Place::Raid6 => level(Level::Raid6),
        Place::Linear => matches!(kind, Kind::Linear),
        Place::Striped => matches!(kind, Kind::Striped { chunk: CHUNK }),
        Place::Crypt => matches!(kind, Kind::Crypt),
        Place::Loop => matches!(kind, Kind::Loop { file } if file.ends_with("loop.img")),
        Place::Sata => matches!(kind, Kind::Disk { transport: Transport::Sata, .. }),
        _ => false,
    }
}

fn under(guest: &Guest, place: Place) -> Outcome {
    let (path, stack) = storage(guest, place, &fresh())?;
    let Some(top) = &stack.top else { return fail("no block device is reported") };
    let (file_system, disks, width) = expected_stack(place);
    if !is_right(place, &top.kind) {
        return fail(format!("the uppermost layer, {}, is reported as {:?}", top.name, top.kind));
    }
    expect("file system", &stack.file_system[..], file_system)?;
    // A loop device ends at its file.
    let disk_count = if place == Place::Loop { 1 } else { stack.disks().len() };
    expect("disks", disk_count, disks)?;
    expect("bytes of a stripe", stack.stripe().map(|s| s.width()), width)?;
    if has_p2p() {
        // The hint agrees with the Linux kernel's behaviour.
        let hint = P2pHint::from_stack(&stack);
        expect(&hint.text(), hint.worth_probing(), verdict(place).is_ok())?;
    }
    let once = !matches!(place, Place::Raid1 | Place::Raid10 | Place::Raid5 | Place::Raid6 | Place::Loop);
    expect("each byte goes to one disk", stack.writes_single_disk(), once)?;
    remove(&path);
    Ok(())
}

fn nothing(guest: &Guest) -> Outcome {
    let (path, stack) = storage(guest, Place::Tmpfs, &fresh())?;
    remove(&path);
    expect("block devices", stack.top.is_none(), true)
}

fn storage(guest: &Guest, place: Place, runtime: &Runtime) -> Result<(std::path::PathBuf, BlockStack), CaseError> {
    let (path, file) = guest.create(place, "storage")?;
    let stack = runtime.storage(file.as_raw_fd()).map_err(|e| CaseError::Failed(e.to_string()))?;
    Ok((path, BlockStack::clone(&stack)))
}
