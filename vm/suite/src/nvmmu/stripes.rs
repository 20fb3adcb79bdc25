//! The requests of md arrays to their members, by plain system calls: the basis of full-stripe writes and
//! preread.
//!
//! ```text
//!   a full stripe         D D D P     parity comes from the data written: no reads
//!   a partial stripe      D . . P     old data and old parity are read first: the writer waits for that
//!   its filler preread    r r r       and then written with it, as a full stripe: no reads while the writer waits
//! ```

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::counters::Members;
use crate::case::{Case, CaseError, Outcome, expect, expect_bytes, fail};
use crate::md::Array;
use crate::place::{Guest, open_direct, pattern};

const CHUNK: usize = 64 << 10;
const STRIPES: usize = 24;

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (level, data) in [(5, 3), (6, 2)] {
        for missing in [false, true] {
            let how = if missing { "md RAID-{level} that lacks a member" } else { "md RAID-{level}" };
            let how = how.replace("{level}", &level.to_string());
            all.push(Case::new(format!("machine: full stripes are written without a read, {how}"), move |g| {
                stripes(g, level, data, missing)
            }));
        }
    }
    all
}

fn stripes(guest: &Guest, level: u32, data: usize, missing: bool) -> Outcome {
    let members: Vec<PathBuf> =
        ["m0", "m1", "m2", "m3"].iter().map(|disk| guest.free_partition(disk)).collect::<Result<_, CaseError>>()?;
    let array = Array::make(31, level, members.clone())?;
    if missing {
        array.fail(&members[1])?;
    }
    let counters = Members::of(array.device())?;
    let disk = open_direct(array.device())?;
    let stripe = data * CHUNK;
    let mut host = AlignedBuf::new(stripe);

    // Each case uses other stripes, none of them in the array's stripe cache.
    array.forget_stripes()?;
    let before = counters.count()?;
    for number in 0..STRIPES {
        host.put(&pattern(stripe, number as u64));
        host.write(&disk, stripe, (number * stripe) as u64)?;
    }
    let whole = counters.count()? - before;
    expect("reads for full stripes", whole.reads, 0)?;
    let disks = (4 - usize::from(missing)) * CHUNK * STRIPES;
    if whole.written_bytes < disks as u64 {
        return fail(format!("full stripes: {} bytes written, at least {disks} expected", whole.written_bytes));
    }

    array.forget_stripes()?;
    let before = counters.count()?;
    for number in 0..STRIPES {
        host.put(&pattern(CHUNK, 100 + number as u64));
        host.write(&disk, CHUNK, (number * stripe) as u64)?;
    }
    let part = counters.count()? - before;
    if part.reads < STRIPES as u64 / 2 {
        return fail(format!("{} reads for parts of {STRIPES} stripes: expected one and more each", part.reads));
    }

    // A preread: all reads first.
    array.forget_stripes()?;
    let before = counters.count()?;
    let mut old = Vec::new();
    for number in 0..STRIPES {
        host.read(&disk, stripe, (number * stripe) as u64)?;
        old.push(host.bytes(stripe).to_vec());
    }
    let early = counters.count()? - before;
    expect("reads beforehand", early.reads > 0, true)?;
    array.forget_stripes()?;
    let before = counters.count()?;
    for (number, old) in old.iter_mut().enumerate() {
        old[..CHUNK].copy_from_slice(&pattern(CHUNK, 200 + number as u64));
        host.put(old);
        host.write(&disk, stripe, (number * stripe) as u64)?;
    }
    expect("reads for prepared stripes", (counters.count()? - before).reads, 0)?;

    for (number, old) in old.iter().enumerate() {
        host.read(&disk, stripe, (number * stripe) as u64)?;
        expect_bytes("a stripe", host.bytes(stripe), old)?;
        expect_bytes("its neighbours", &old[CHUNK..], &pattern(stripe, number as u64)[CHUNK..])?;
    }
    if missing {
        return Ok(());
    }
    drop(disk);
    expect("sectors that do not match", array.mismatches()?, 0)
}

/// Host memory aligned for direct I/O.
struct AlignedBuf {
    bytes: Vec<u8>,
    at: usize,
}

impl AlignedBuf {
    fn new(len: usize) -> AlignedBuf {
        let bytes = vec![0u8; len + 4096];
        let at = bytes.as_ptr().align_offset(4096);
        AlignedBuf { bytes, at }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
    }

    fn bytes(&self, len: usize) -> &[u8] {
        &self.bytes[self.at..self.at + len]
    }

    fn read(&mut self, disk: &fs::File, len: usize, offset: u64) -> Outcome {
        disk.read_exact_at(&mut self.bytes[self.at..self.at + len], offset).map_err(CaseError::from)
    }

    fn write(&self, disk: &fs::File, len: usize, offset: u64) -> Outcome {
        disk.write_all_at(self.bytes(len), offset).map_err(CaseError::from)
    }
}
