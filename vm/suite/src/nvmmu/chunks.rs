//! Large direct writes of SPIN, split into chunks: a boundary inside a stripe makes the array read.
//!
//! ```text
//!   fixed size     4 MiB │ 4 MiB │ 4 MiB ...      each boundary leaves two partial stripes: old parity is read twice
//!   SPIN's         up to the last stripe's end │ up to the last stripe's end │ ...                no reads

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use spinio_io::{Runtime, Settings};

use super::bench::whole_stripes;
use super::counters::Members;
use crate::case::{Case, CaseError, Outcome, expect, expect_bytes, fail};
use crate::md::Array;
use crate::place::{Guest, Place, drop_cache, open_direct, pattern, remove};
use crate::spin::MIB;
use crate::stacks::kind;

/// Bytes of data in a stripe of the RAID-5 here.
const STRIPE: usize = 192 << 10;

/// The largest chunk: half of the bounce buffers.
const PORTION: usize = 4 * MIB;

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("spin: chunks of a large direct write end with stripes, md RAID-5", chunks_end_with_stripes)]
}

fn chunks_end_with_stripes(guest: &Guest) -> Outcome {
    let len = 24 * MIB;
    let (path, file) = guest.create(Place::Raid5, "chunks")?;
    fallocate(&file, FallocateFlags::empty(), 0, len as u64)?;
    let mut model = pattern(len, 3);
    file.write_all_at(&model, 0)?;
    file.sync_all()?;
    let within = whole_stripes(&file, STRIPE as u64, len as u64)?;
    drop_cache(&file)?;
    drop(file);
    let (start, bytes) = (within.start, (within.len() / STRIPE - 1) * STRIPE);
    if bytes < 3 * PORTION {
        return Err(CaseError::Skipped("no room for this many contiguous stripes".to_owned()));
    }
    let device = guest.disk(Place::Raid5.folder().unwrap_or_default())?;
    let (array, members) = (Array::at(device.clone()), Members::of(&device)?);
    let own = open_direct(&path)?;

    // The control, without stripe alignment: here, chunks of the host's.
    let mut memory = kind().memory(bytes)?;
    array.forget_stripes()?;
    let before = members.count()?;
    let host = aligned(&pattern(bytes, 4));
    for at in (0..bytes).step_by(PORTION) {
        let len = PORTION.min(bytes - at);
        own.write_all_at(&host.0[host.1 + at..][..len], (start + at) as u64)?;
    }
    let plain = (members.count()? - before).reads;

    let new = pattern(bytes, 5);
    memory.put(0, &new);
    let runtime = Runtime::new(Settings { bounce_limit: 2 * PORTION as u64, ..Settings::default() });
    array.forget_stripes()?;
    let before = members.count()?;
    let wrote = runtime.write(own.as_raw_fd(), Some(start as u64), memory.target(0)?, bytes);
    expect("bytes written", wrote.map_err(|e| CaseError::Failed(e.to_string()))?, bytes)?;
    let reads = (members.count()? - before).reads;
    println!(
        "  member reads: {plain} for chunks of fixed size, {reads} for SPIN's; the file's stripes begin at {start}"
    );
    if plain == 0 {
        return fail("chunks of fixed size cost no reads either: the case shows nothing");
    }
    expect("member reads", reads, 0)?;
    model[start..start + bytes].copy_from_slice(&new);
    let file = File::open(&path)?;
    drop_cache(&file)?;
    let mut seen = vec![0; len];
    file.read_exact_at(&mut seen, 0)?;
    expect_bytes("on storage", &seen, &model)?;
    remove(&path);
    Ok(())
}

/// The same bytes aligned for direct I/O: from an index on.
fn aligned(bytes: &[u8]) -> (Vec<u8>, usize) {
    let mut out = vec![0; bytes.len() + 4096];
    let at = out.as_ptr().align_offset(4096);
    out[at..at + bytes.len()].copy_from_slice(bytes);
    (out, at)
}
