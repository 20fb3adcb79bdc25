//! The Linux kernel's own direct I/O between a block stack and device memory.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::verdict;
use crate::case::{Case, Outcome, expect, expect_bytes};
use crate::memory::{Memory, P2pMemory};
use crate::place::{Guest, Place, drop_cache, open_direct, remove};
use crate::spin::MIB;

pub(super) fn cases() -> Vec<Case> {
    let case = |place: Place| {
        let does = match verdict(place) {
            Ok(()) => "passes",
            Err(_) => "is refused with EREMOTEIO",
        };
        Case::new(format!("machine: direct I/O with device memory {does}, {}", place.name()), move |g| both(g, place))
    };
    Place::STACKS.into_iter().map(case).collect()
}

fn both(guest: &Guest, place: Place) -> Outcome {
    let (path, mut bytes) = guest.cold(place, "kernel", 4 * MIB)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(4 * MIB)?;
    // A page, a run over two chunks, full stripes of any array here, everything.
    for (offset, len) in [(4096, 4096), (60 << 10, 72 << 10), (384 << 10, 768 << 10), (0, 4 * MIB)] {
        memory.fill(0xee);
        let read = memory.pread(direct.as_raw_fd(), 0, len, offset as u64);
        expect(&format!("reading {len} at {offset}"), read, verdict(place).map(|()| len))?;
        let expected = if read.is_ok() { &bytes[offset..offset + len] } else { &vec![0xee; len][..] };
        expect_bytes("device memory", &memory.bytes(0, len), expected)?;

        let wrote = memory.pwrite(direct.as_raw_fd(), 0, len, offset as u64);
        expect(&format!("writing {len} at {offset}"), wrote, verdict(place).map(|()| len))?;
        let new = vec![len.trailing_zeros() as u8; len];
        memory.put(0, &new);
        let wrote = memory.pwrite(direct.as_raw_fd(), 0, len, offset as u64);
        expect(&format!("writing {len} at {offset} again"), wrote, verdict(place).map(|()| len))?;
        if wrote.is_ok() {
            bytes[offset..offset + len].copy_from_slice(&new);
        }
        // From storage: the cached contents do not matter.
        let file = File::open(&path)?;
        drop_cache(&file)?;
        let mut seen = vec![0; bytes.len()];
        file.read_exact_at(&mut seen, 0)?;
        expect_bytes("the file", &seen, &bytes)?;
        drop_cache(&file)?;
    }
    remove(&path);
    Ok(())
}
