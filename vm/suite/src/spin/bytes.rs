//! The bytes are correct on every route: edges, holes, ends, concurrent writers.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::thread;

use rustix::fs::{FallocateFlags, fallocate};

use super::{MIB, below, expect_p2p, fresh, memory_for, read_and_check};
use spinio_testkit::Rng;

use crate::case::{Case, CaseError, Outcome};
use crate::memory::{P2pMemory, store_through_mapping};
use crate::place::{Guest, Place, drop_cache, open_direct, pattern, remove};

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in Place::REACHABLE {
        all.push(Case::new(format!("spin: any misalignment, {}", place.name()), move |g| misaligned(g, place)));
        all.push(Case::new(format!("spin: writers are seen at once, {}", place.name()), move |g| writers(g, place)));
    }
    for place in [Place::Ext4, Place::Xfs, Place::Raid0] {
        all.push(Case::new(format!("spin: holes, unwritten extents and the end, {}", place.name()), move |g| {
            holes(g, place)
        }));
    }
    all.push(Case::new("spin: edges by store, the middle peer to peer", edges));
    all.push(Case::new("spin: an odd header before an aligned buffer goes peer to peer", words));
    for place in [Place::Tmpfs, Place::Overlay] {
        all.push(Case::new(format!("spin: a file without direct I/O, {}", place.name()), move |g| whole(g, place)));
    }
    all.push(Case::new("spin: several threads at once", threads));
    all
}

fn misaligned(guest: &Guest, place: Place) -> Outcome {
    const SIZES: [usize; 12] = [0, 1, 3, 4, 255, 511, 512, 513, 2048, 4092, 4095, 4096];
    let (path, bytes) = guest.cold(place, "misaligned", 4 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(2 * MIB)?;
    let mut random = Rng::new(1);
    for round in 0..60 {
        let offset = below(&mut random, 8) * 131_072 + *random.choose(&SIZES);
        let base = *random.choose(&[0, 4096, 65_536, MIB]);
        let len = (base + *random.choose(&SIZES)).max(1);
        // In half of the cases as far past a sector as the offset is, so that P2P has a middle to serve.
        let skew = if round % 2 == 0 { offset % 4096 } else { *random.choose(&SIZES) };
        let expected = &bytes[offset..offset + len];
        read_and_check(&runtime, &file, &mut memory, (offset as u64, skew, len), expected)?;
        drop_cache(&file)?;
    }
    remove(&path);
    Ok(())
}

fn edges(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Ext4, "edges", 8 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(4 * MIB)?;
    read_and_check(&runtime, &file, &mut memory, (0, 0, 4 * MIB), &bytes[..4 * MIB])?;
    drop_cache(&file)?;
    // Both ends inside a page: the pages between them are aligned, in the file and on the device.
    let (offset, len) = (4 * MIB + 1000, 2 * MIB + 96);
    let stats = read_and_check(&runtime, &file, &mut memory, (offset as u64, 1000, len), &bytes[offset..offset + len])?;
    expect_p2p("the middle", &stats, 2 * MIB - 4096)?;
    remove(&path);
    Ok(())
}

/// A payload after a header of odd size, into a page-aligned buffer: NVMe takes any address of whole words.
fn words(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Ext4, "words", 8 * MIB)?;
    let file = File::open(&path)?;
    let runtime = fresh();
    let mut memory = memory_for(4 * MIB)?;
    read_and_check(&runtime, &file, &mut memory, (0, 0, 2 * MIB), &bytes[..2 * MIB])?;
    for (header, skew) in [(8, 0), (4096 - 4, 0), (1236, 512), (4, 2048)] {
        drop_cache(&file)?;
        let (offset, len) = (2 * MIB + header, 4 * MIB);
        let request = (offset as u64, skew, len);
        let stats = read_and_check(&runtime, &file, &mut memory, request, &bytes[offset..offset + len])?;
        expect_p2p(&format!("after {header} bytes"), &stats, 4 * MIB - 4096)?;
    }
    remove(&path);
    Ok(())
}

fn writers(guest: &Guest, place: Place) -> Outcome {
    let (path, mut bytes) = guest.cold(place, "writers", 2 * MIB)?;
    let file = File::options().read(true).write(true).open(&path)?;
    let direct = open_direct(&path)?;
    let mut page = P2pMemory::allocate(4096)?;
    let runtime = fresh();
    let mut memory = memory_for(2 * MIB)?;
    let mut random = Rng::new(2);
    read_and_check(&runtime, &file, &mut memory, (0, 0, 2 * MIB), &bytes)?;
    for round in 0..24u8 {
        let new = pattern(3000, 100 + u64::from(round));
        let at = below(&mut random, 500) * 4096;
        match round % 3 {
            0 => {
                file.write_all_at(&new, at as u64 + 77)?;
                bytes[at + 77..at + 77 + new.len()].copy_from_slice(&new);
            }
            1 => {
                store_through_mapping(&file, at as u64 / 4096, &new)?;
                bytes[at..at + new.len()].copy_from_slice(&new);
            }
            _ => {
                page.fill(round);
                page.pwrite(direct.as_raw_fd(), 0, 4096, at as u64)?;
                bytes[at..at + 4096].fill(round);
            }
        }
        read_and_check(&runtime, &file, &mut memory, (0, 0, 2 * MIB), &bytes)?;
        if round % 8 == 7 {
            drop_cache(&file)?;
        }
    }
    remove(&path);
    Ok(())
}

fn holes(guest: &Guest, place: Place) -> Outcome {
    let (path, file) = guest.create(place, "holes")?;
    let mut bytes = vec![0; 4 * MIB + 777];
    // Data, a hole, unwritten extents, data that ends inside a sector.
    bytes[..MIB].copy_from_slice(&pattern(MIB, 3));
    bytes[4 * MIB..].fill(0x44);
    file.write_all_at(&bytes[..MIB], 0)?;
    file.set_len(2 * MIB as u64)?;
    fallocate(&file, FallocateFlags::empty(), 2 * MIB as u64, 2 * MIB as u64)?;
    file.write_all_at(&bytes[4 * MIB..], 4 * MIB as u64)?;
    drop_cache(&file)?;
    let runtime = fresh();
    let mut memory = memory_for(6 * MIB)?;
    let requests =
        [(0, 4 * MIB), (0, 6 * MIB), (MIB - 100, 200), (3 * MIB, 2 * MIB), (4 * MIB + 776, 4096), (5 * MIB, 4096)];
    for _ in 0..2 {
        for (offset, len) in requests {
            let end = bytes.len().min(offset + len);
            let expected = bytes.get(offset..end).unwrap_or_default();
            read_and_check(&runtime, &file, &mut memory, (offset as u64, 0, len), expected)?;
        }
        drop_cache(&file)?;
    }
    remove(&path);
    Ok(())
}

fn whole(guest: &Guest, place: Place) -> Outcome {
    let (path, bytes) = guest.cold(place, "whole", 3 * MIB + 5)?;
    let file = File::open(&path)?;
    let mut memory = memory_for(4 * MIB)?;
    read_and_check(&fresh(), &file, &mut memory, (0, 3, 4 * MIB), &bytes)?;
    remove(&path);
    Ok(())
}

fn threads(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Ext4, "threads", 16 * MIB)?;
    let runtime = fresh();
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|n| {
                let (runtime, path, bytes) = (&runtime, &path, &bytes);
                scope.spawn(move || {
                    let file = File::open(path)?;
                    let mut memory = memory_for(2 * MIB)?;
                    let mut random = Rng::new(10 + n);
                    for _ in 0..12 {
                        let offset = below(&mut random, 14 * MIB) & !511;
                        let len = 1 + below(&mut random, 2 * MIB);
                        let expected = &bytes[offset..offset + len];
                        read_and_check(runtime, &file, &mut memory, (offset as u64, offset % 4096, len), expected)
                            .map_err(|e| match e {
                                CaseError::Failed(why) => CaseError::Failed(format!("thread {n}: {why}")),
                                skipped => skipped,
                            })?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|w| w.join().unwrap_or(Err(CaseError::Failed("a thread panicked".to_owned()))))
            .collect()
    });
    remove(&path);
    outcomes.into_iter().collect()
}
