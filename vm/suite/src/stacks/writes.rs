//! SPIN's writes from device memory: the file has the bytes that a `pwrite` of the same data would have left.
//!
//! A model of the file in host memory is written in parallel. After each write a buffered reader must see the model,
//! and from time to time it is read from storage. The descriptors differ: plain, O_DIRECT, O_DSYNC, O_APPEND. At the
//! end of the run `after` checks the result with md and fsck.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use linux_raw_sys::general as k;
use spinio_io::Runtime;
use spinio_io::stats::{Direction, RouteRow};
use spinio_plan::{Reason, Route};
use spinio_testkit::Rng;

use super::{MemoryKind, kinds_for, verdict};
use crate::case::{Case, CaseError, Outcome, expect, expect_bytes};
use crate::memory::{Memory, has_p2p};
use crate::place::{Guest, Place, drop_cache, open_direct, pattern, remove};
use crate::spin::{MIB, fresh, read_and_check};

const MOST: usize = 2 * MIB;
const WRITES: u64 = 24;

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in Place::STACKS {
        for &kind in kinds_for(place) {
            let name = format!("spin: {WRITES} random writes, {}, {}", place.name(), kind.name());
            all.push(Case::new(name, move |g| differential(g, place, kind)));
        }
    }
    for place in Place::STACKS.into_iter().filter(|_| has_p2p()) {
        all.push(Case::new(format!("spin: the route of a large write, {}", place.name()), move |g| route(g, place)));
    }
    all
}

/// Storage fetches the bytes itself if exactly one disk has to receive them, and if it can.
fn route(guest: &Guest, place: Place) -> Outcome {
    const LEN: usize = 4 * MIB;
    let (path, _) = guest.cold(place, "write route", LEN)?;
    let own = open_direct(&path)?;
    let runtime = fresh();
    let mut memory = MemoryKind::P2p.memory(LEN)?;
    let refused = match place {
        // A write for several disks, or for an unknown number, is refused before storage is tried.
        Place::Raid1 | Place::Raid10 | Place::Raid5 | Place::Raid6 | Place::Loop => Some(Reason::P2pMirror),
        _ if verdict(place).is_ok() => None,
        _ => Some(Reason::P2pUnreachable),
    };
    // The first write decides what is trusted.
    write(&runtime, &own, &mut *memory, (0, 0), &pattern(LEN, 1))?;
    let before = runtime.stats();
    let new = pattern(LEN, 2);
    write(&runtime, &own, &mut *memory, (0, 0), &new)?;
    let stats = runtime.stats().since(&before);
    let by_p2p = |line: &&RouteRow| line.direction == Direction::Write && line.route == Route::P2p;
    let p2p: u64 = stats.rows.iter().filter(by_p2p).map(|line| line.bytes).sum();
    expect("bytes by p2p", p2p, if refused.is_none() { LEN as u64 } else { 0 })?;
    if let Some(reason) = refused {
        let refusals: Vec<Reason> = stats.refusals.iter().map(|refused| refused.reason).collect();
        expect(&format!("{reason} is among {refusals:?}"), refusals.contains(&reason), true)?;
    }
    let file = File::open(&path)?;
    drop_cache(&file)?;
    let mut seen = vec![0; LEN];
    file.read_exact_at(&mut seen, 0)?;
    expect_bytes("on storage", &seen, &new)?;
    remove(&path);
    Ok(())
}

/// How the file is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenMode {
    Plain,
    Direct,
    Synchronous,
    Append,
}

impl OpenMode {
    const ALL: [OpenMode; 4] = [OpenMode::Plain, OpenMode::Direct, OpenMode::Synchronous, OpenMode::Append];

    fn flags(self) -> i32 {
        let flags = match self {
            OpenMode::Plain => 0,
            OpenMode::Direct => k::O_DIRECT,
            OpenMode::Synchronous => k::O_DSYNC,
            OpenMode::Append => k::O_APPEND,
        };
        flags as i32
    }
}

fn differential(guest: &Guest, place: Place, kind: MemoryKind) -> Outcome {
    let (path, file) = guest.create(place, "writes")?;
    let mut model = pattern(3 * MIB + 1234, 1);
    file.write_all_at(&model, 0)?;
    drop_cache(&file)?;
    let descriptors: Vec<(OpenMode, File)> = OpenMode::ALL
        .into_iter()
        .map(|how| Ok((how, OpenOptions::new().read(true).write(true).custom_flags(how.flags()).open(&path)?)))
        .collect::<Result<_, CaseError>>()?;
    let mut random = Rng::new(place as u64);
    let runtime = fresh();
    let mut memory = kind.memory(MOST)?;
    for number in 0..WRITES {
        let (how, to) = random.choose(&descriptors);
        let (at, skew, new) = request(&mut random, *how, model.len(), number);
        let what = format!("write {number}: {} bytes at {at}, skew {skew}, {how:?}", new.len());
        write(&runtime, to, &mut *memory, (at as u64, skew), &new).map_err(|e| said(&what, e))?;
        // For any offset, an appended write goes to the end.
        let at = if *how == OpenMode::Append { model.len() } else { at };
        model.resize(model.len().max(at + new.len()), 0);
        model[at..at + new.len()].copy_from_slice(&new);
        if number % 8 == 7 {
            drop_cache(&file)?;
        }
        let mut seen = vec![0; model.len()];
        file.read_exact_at(&mut seen, 0)?;
        expect(&format!("{what}: the file's length"), file.metadata()?.len(), model.len() as u64)?;
        expect_bytes(&what, &seen, &model)?;
        if random.chance(50) {
            let (from, len) = (random.below(MIB as u64) as usize, 1 + random.below(MIB as u64) as usize);
            let expected = &model[from..from + len];
            read_and_check(&runtime, &file, &mut *memory, (from as u64, skew, len), expected)
                .map_err(|e| said(&format!("read back after {what}"), e))?;
        }
        // It grows by the appended bytes.
        if model.len() > 12 * MIB {
            file.set_len(2 * MIB as u64)?;
            model.truncate(2 * MIB);
        }
    }
    remove(&path);
    Ok(())
}

/// Offset, distance past a page's start on the device, and contents.
fn request(random: &mut Rng, how: OpenMode, size: usize, number: u64) -> (usize, usize, Vec<u8>) {
    let unit = if how == OpenMode::Direct { 4096 } else { *random.choose(&[1, 1, 512, 4096]) };
    // Full stripes of every array here among them.
    let most = *random.choose(&[100, 4096, 65_536, 384 << 10, MOST]) as u64;
    let len = (1 + random.below(most) as usize).next_multiple_of(unit).min(MOST);
    // Sometimes past the end, so that a hole is left.
    let at = random.below(size as u64 + 20_000) as usize / unit * unit;
    let skew = if random.chance(50) { at % 4096 } else { random.below(4096) as usize };
    // Direct I/O from bounce buffers does not depend on the device's address.
    (at, skew, pattern(len, 2000 + number))
}

fn write(runtime: &Runtime, to: &File, memory: &mut dyn Memory, (at, skew): (u64, usize), new: &[u8]) -> Outcome {
    memory.put(skew, new);
    let wrote = runtime.write(to.as_raw_fd(), Some(at), memory.target(skew)?, new.len());
    let wrote = wrote.map_err(|e| CaseError::Failed(e.to_string()))?;
    expect("bytes written", wrote, new.len())?;
    expect_bytes("device memory afterwards", &memory.bytes(skew, new.len()), new)
}

fn said(what: &str, miss: CaseError) -> CaseError {
    match miss {
        CaseError::Failed(why) => CaseError::Failed(format!("{what}: {why}")),
        skipped => skipped,
    }
}
