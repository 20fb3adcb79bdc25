//! The route of the bytes, and the reason.

use std::fs::File;
use std::os::unix::fs::FileExt;

use spinio_plan::{Reason, Route};

use super::{MIB, by, expect_p2p, explained, fresh, memory_for, read_and_check};
use crate::case::{Case, Outcome, expect, fail};
use crate::loop_device::LoopDevice;
use crate::place::{Guest, Place, drop_cache, open_direct, remove};

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in Place::REACHABLE {
        all.push(Case::new(format!("spin: a cold file goes peer to peer, {}", place.name()), move |g| cold(g, place)));
        all.push(Case::new(format!("spin: a cached file is stored, {}", place.name()), move |g| cached(g, place)));
        all.push(Case::new(format!("spin: a half-cached file goes both ways, {}", place.name()), move |g| {
            half_cached(g, place)
        }));
    }
    all.push(Case::new("spin: below another root port: another route, and the reason", unreachable));
    all.push(Case::new("spin: one unreachable disk does not affect the others", others_unaffected));
    all.push(Case::new("spin: a loop device refuses: another route", refused));
    all.push(Case::new("spin: half a RAID-0 reachable: the bytes are right", half_reachable));
    all
}

fn cold(guest: &Guest, place: Place) -> Outcome {
    let (path, bytes) = guest.cold(place, "cold", 16 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(8 * MIB)?;
    // The first request also decides whether the pair is trusted, so its routes are not checked.
    read_and_check(&runtime, &file, &mut memory, (0, 0, 8 * MIB), &bytes[..8 * MIB])?;
    drop_cache(&file)?;
    let stats = read_and_check(&runtime, &file, &mut memory, (8 << 20, 0, 8 * MIB), &bytes[8 * MIB..])?;
    expect_p2p("the second request", &stats, 8 * MIB)?;
    remove(&path);
    Ok(())
}

fn cached(guest: &Guest, place: Place) -> Outcome {
    let (path, bytes) = guest.cold(place, "cached", 4 * MIB)?;
    let file = File::open(&path)?;
    file.read_exact_at(&mut vec![0; 4 * MIB], 0)?;
    let mut memory = memory_for(4 * MIB)?;
    let stats = read_and_check(&fresh(), &file, &mut memory, (0, 0, 4 * MIB), &bytes)?;
    expect("bytes by store", by(&stats, Route::Store), 4 << 20)?;
    remove(&path);
    Ok(())
}

fn half_cached(guest: &Guest, place: Place) -> Outcome {
    let (path, bytes) = guest.cold(place, "half-cached", 16 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(16 * MIB)?;
    read_and_check(&runtime, &file, &mut memory, (0, 0, 16 * MIB), &bytes)?;
    drop_cache(&file)?;
    // One half, then the other: runs long enough that no planner merges cached bytes.
    file.read_exact_at(&mut vec![0; 8 * MIB], 0)?;
    let stats = read_and_check(&runtime, &file, &mut memory, (0, 0, 16 * MIB), &bytes)?;
    let (stored, p2p) = (by(&stats, Route::Store), by(&stats, Route::P2p));
    expect("bytes by both routes", stored + p2p, 16 << 20)?;
    // Reading the first half may have read ahead into the second.
    if stored < 8 << 20 || p2p < 4 << 20 {
        return fail(format!("{stored} bytes were stored and {p2p} went peer to peer"));
    }
    remove(&path);
    Ok(())
}

fn unreachable(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Far, "far", 8 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(8 * MIB)?;
    for _ in 0..2 {
        let stats = read_and_check(&runtime, &file, &mut memory, (0, 0, 8 * MIB), &bytes)?;
        expect("bytes by p2p", by(&stats, Route::P2p), 0)?;
        drop_cache(&file)?;
    }
    let reasons = explained(&runtime, &file, &memory)?;
    if !reasons.contains(&Reason::P2pUnreachable) {
        return fail(format!("no reason reports that the disk is unreachable: {reasons:?}"));
    }
    remove(&path);
    Ok(())
}

fn others_unaffected(guest: &Guest) -> Outcome {
    // Whole disks share one file system, devtmpfs: a result for one must not be applied to another.
    let (path, other) = guest.cold(Place::FarRaw, "far disk", 4 * MIB)?;
    let far = File::open(path)?;
    let (path, bytes) = guest.cold(Place::Raw, "others unaffected", 8 * MIB)?;
    let near = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(8 * MIB)?;
    read_and_check(&runtime, &far, &mut memory, (0, 0, 4 * MIB), &other)?;
    read_and_check(&runtime, &near, &mut memory, (0, 0, 4 * MIB), &bytes[..4 * MIB])?;
    drop_cache(&near)?;
    let stats = read_and_check(&runtime, &near, &mut memory, (4 << 20, 0, 4 * MIB), &bytes[4 * MIB..])?;
    expect_p2p("the reachable disk", &stats, 4 * MIB)
}

fn refused(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Ext4, "loop", 4 * MIB)?;
    let device = LoopDevice::over(&path)?;
    let file = File::open(device.path())?;
    let runtime = fresh();
    let mut memory = memory_for(4 * MIB)?;
    for _ in 0..2 {
        let stats = read_and_check(&runtime, &file, &mut memory, (0, 0, 4 * MIB), &bytes)?;
        expect("bytes by p2p", by(&stats, Route::P2p), 0)?;
        drop_cache(&file)?;
    }
    drop(file);
    remove(&path);
    Ok(())
}

fn half_reachable(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Half, "half", 8 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(8 * MIB)?;
    for (offset, len) in [(0, 4096), (0, 8 * MIB), (64 << 10, 64 << 10), (1 << 20, 2 * MIB), (0, 8 * MIB)] {
        let expected = &bytes[offset..offset + len];
        read_and_check(&runtime, &file, &mut memory, (offset as u64, 0, len), expected)?;
        drop_cache(&file)?;
    }
    // Also with the program's own O_DIRECT descriptor: the Linux kernel stops at the first chunk that cannot be read.
    let own = open_direct(&path)?;
    for (offset, len) in [(0, 4096), (64 << 10, 64 << 10), (0, 8 * MIB)] {
        let expected = &bytes[offset..offset + len];
        read_and_check(&runtime, &own, &mut memory, (offset as u64, 0, len), expected)?;
    }
    remove(&path);
    Ok(())
}
