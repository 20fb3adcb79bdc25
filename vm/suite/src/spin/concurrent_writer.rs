//! Reads concurrent with a writer: each byte must be of a version that a plain `pread` at that time could have
//! returned.
//!
//! A thread rewrites the whole file again and again, each time with bytes that encode their version, while
//! reads go peer to peer or through the page cache. testkit's oracle decides which versions are allowed:
//! none that was overwritten before the read began.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use rustix::fs::{FallocateFlags, fallocate};
use spinio_plan::Route;
use spinio_testkit::Rng;
use spinio_testkit::file::bytes;
use spinio_testkit::oracle::Versions;

use super::{below, by, fresh, memory_for};
use crate::case::{Case, CaseError, Outcome, fail};
use crate::memory::{Memory, P2pMemory};
use crate::place::{Guest, Place, drop_cache, open_direct, remove};

const FILE: usize = 1 << 20;
const READS: usize = 60;
const WRITES: u64 = 8;

/// How the writer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteMode {
    Buffered,
    /// O_DIRECT, from device memory.
    Direct,
    /// A hole first, then buffered: zeros may be seen.
    Punched,
    /// Truncated to half, then buffered: reads may be short, or see zeros.
    Truncated,
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in [Place::Ext4, Place::Xfs, Place::Raid0] {
        for (how, who) in [
            (WriteMode::Buffered, "a writer"),
            (WriteMode::Direct, "a direct writer"),
            (WriteMode::Punched, "a hole puncher"),
            (WriteMode::Truncated, "a truncater"),
        ] {
            let name = format!("spin: reads concurrent with {who}, {}", place.name());
            all.push(Case::new(name, move |g| reads_concurrent_with_writer(g, place, how)));
        }
    }
    all
}

fn reads_concurrent_with_writer(guest: &Guest, place: Place, how: WriteMode) -> Outcome {
    let (path, file) = guest.create(place, "concurrent writer")?;
    file.write_all_at(&bytes(0, FILE, 0), 0)?;
    drop_cache(&file)?;
    let direct = open_direct(&path)?;
    let versions = Versions::new();
    let stop = AtomicBool::new(false);
    let (wrote, read) = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let wrote = rewrite(&file, &direct, how, &versions, &stop);
            stop.store(true, Relaxed);
            wrote
        });
        let read = reads(&file, how, (&versions, &stop), place as u64);
        stop.store(true, Relaxed);
        (writer.join().unwrap_or_else(|_| fail("the writer panicked")), read)
    });
    wrote?;
    read?;
    remove(&path);
    Ok(())
}

fn rewrite(file: &File, direct: &File, how: WriteMode, versions: &Versions, stop: &AtomicBool) -> Outcome {
    let mut memory = P2pMemory::allocate(FILE)?;
    while !stop.load(Relaxed) {
        let mut outcome = Ok(());
        versions.write(|version| outcome = write(file, direct, how, &mut memory, &bytes(0, FILE, version)));
        outcome?;
    }
    Ok(())
}

fn write(file: &File, direct: &File, how: WriteMode, memory: &mut P2pMemory, new: &[u8]) -> Outcome {
    match how {
        WriteMode::Buffered => {}
        WriteMode::Direct => {
            memory.put(0, new);
            let wrote = memory.pwrite(direct.as_raw_fd(), 0, FILE, 0)?;
            return if wrote == FILE { Ok(()) } else { fail(format!("a direct write of {wrote} bytes")) };
        }
        WriteMode::Punched => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, 0, FILE as u64)?;
        }
        WriteMode::Truncated => file.set_len(FILE as u64 / 2)?,
    }
    Ok(file.write_all_at(new, 0)?)
}

fn reads(file: &File, how: WriteMode, (versions, stop): (&Versions, &AtomicBool), seed: u64) -> Outcome {
    let runtime = fresh();
    let mut memory = memory_for(FILE)?;
    let mut random = Rng::new(seed);
    let mut number = 0;
    // Both sides have run, unless the writer failed.
    while (number < READS || versions.count() < WRITES) && !stop.load(Relaxed) {
        number += 1;
        let offset = below(&mut random, FILE / 2) & !4095;
        let len = (1 + below(&mut random, FILE / 2)).next_multiple_of(*random.choose(&[1, 4096]));
        if random.chance(60) {
            drop_cache(file)?;
        }
        memory.fill_range(0, len, 0);
        let target = memory.target(0)?;
        let (got, window) = versions.read(|| runtime.read(file.as_raw_fd(), Some(offset as u64), target, len));
        let got = got.map_err(|e| CaseError::Failed(format!("read {number}: {e}")))?;
        if got != len && how != WriteMode::Truncated {
            return fail(format!("read {number}: {got} of {len} bytes at {offset}"));
        }
        let zeros = matches!(how, WriteMode::Punched | WriteMode::Truncated);
        if let Some((at, byte)) = window.first_wrong(offset as u64, &memory.bytes(0, got), |_, byte| zeros && byte == 0)
        {
            return fail(format!(
                "read {number} of {len} bytes at {offset}: {byte:#04x} at {at} is none of {window:?}"
            ));
        }
    }
    if by(&runtime.stats(), Route::P2p) == 0 {
        return Err(CaseError::Skipped(
            "right, but the writer kept all of it in the page cache: nothing went peer to peer".into(),
        ));
    }
    Ok(())
}
