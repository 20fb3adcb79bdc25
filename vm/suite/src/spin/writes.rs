//! The route of written bytes: from the device by storage itself if possible, else by the CPU.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use linux_raw_sys::general as k;
use spinio_plan::Route;

use super::{MIB, by, expect_p2p, fresh, memory_for};
use crate::case::{Case, CaseError, Outcome, expect, expect_bytes};
use crate::memory::Memory;
use crate::place::{Guest, Place, drop_cache, pattern, remove};

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in Place::REACHABLE {
        all.push(Case::new(format!("spin: a write goes peer to peer, {}", place.name()), move |g| {
            written(g, place, true)
        }));
    }
    all.push(Case::new("spin: a write below another root port goes another way", |g| written(g, Place::Far, false)));
    all
}

fn written(guest: &Guest, place: Place, reachable: bool) -> Outcome {
    let (path, mut model) = guest.cold(place, "written", 9 * MIB)?;
    let runtime = fresh();
    let mut memory = memory_for(4 * MIB)?;
    let reader = OpenOptions::new().read(true).write(true).open(&path)?;
    for (number, flags) in [0, k::O_DIRECT, k::O_DSYNC, 0].into_iter().enumerate() {
        let file = OpenOptions::new().write(true).custom_flags(flags as i32).open(&path)?;
        let (at, len) = (number * 2 * MIB + 4096, 2 * MIB);
        let new = pattern(len, 100 + number as u64);
        memory.put(0, &new);
        let before = runtime.stats();
        let wrote = runtime.write(file.as_raw_fd(), Some(at as u64), memory.target(0)?, len);
        let wrote = wrote.map_err(|e| CaseError::Failed(format!("write {number}, flags {flags:o}: {e}")))?;
        expect("bytes written", wrote, len)?;
        model[at..at + len].copy_from_slice(&new);
        let mut seen = vec![0; model.len()];
        reader.read_exact_at(&mut seen, 0)?;
        expect_bytes(&format!("after write {number}, flags {flags:o}"), &seen, &model)?;
        drop_cache(&reader)?;
        reader.read_exact_at(&mut seen, 0)?;
        expect_bytes(&format!("on the disk after write {number}"), &seen, &model)?;
        let stats = runtime.stats().since(&before);
        if reachable {
            expect_p2p(&format!("write {number}, flags {flags:o}"), &stats, len)?;
        } else {
            expect("bytes by p2p", by(&stats, Route::P2p), 0)?;
        }
    }
    remove(&path);
    Ok(())
}
