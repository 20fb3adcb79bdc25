//! The disks after all cases: copies and parity match, and every file system is consistent.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::case::{Case, Outcome, expect};
use crate::md::{Array, retry, run};
use crate::place::{Guest, Place};

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in [Place::Raid1, Place::Raid10, Place::Raid5, Place::Raid6] {
        all.push(Case::new(format!("after: copies and parity match, {}", place.name()), move |g| consistent(g, place)));
    }
    for place in Place::STACKS.into_iter().rev().chain([Place::Ext4, Place::Xfs]) {
        all.push(Case::new(format!("after: the file system is sound, {}", place.name()), move |g| {
            check_file_system(g, place)
        }));
    }
    all
}

fn consistent(guest: &Guest, place: Place) -> Outcome {
    let array = Array::at(guest.disk(place.folder().unwrap_or_default())?);
    expect("members that are missing", array.degraded()?, 0)?;
    // Bytes in flight to the disks are on both or on none.
    rustix::fs::sync();
    expect("sectors that do not match", array.mismatches()?, 0)
}

fn check_file_system(guest: &Guest, place: Place) -> Outcome {
    let at = guest.mount(place)?;
    let mounts = fs::read_to_string("/proc/mounts")?;
    let entry = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| Path::new(words[1]) == at);
    let (device, kind) = entry.map(|words| (words[0].to_owned(), words[2].to_owned())).unwrap_or_default();
    retry(|| run(Command::new("umount").arg(&at)))?;
    match kind.as_str() {
        "ext4" => run(Command::new("e2fsck").args(["-f", "-n"]).arg(&device))?,
        _ => run(Command::new("xfs_repair").arg("-n").arg(&device))?,
    }
    if place == Place::Loop {
        // The storage under it is checked later.
        run(Command::new("losetup").arg("--detach").arg(&device))?;
    }
    Ok(())
}
