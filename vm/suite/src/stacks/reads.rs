//! SPIN's reads over every route that a stack and a device allow: the bytes, the route and the reason.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use spinio_io::stats::Snapshot;
use spinio_io::{Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::linux;

use super::{MemoryKind, kinds_for, verdict};
use crate::case::{Case, CaseError, Outcome, expect, expect_bytes, fail};
use crate::place::{Guest, Place, drop_cache, open_direct, remove};
use crate::spin::{MIB, by, explained, read_and_check};

/// Bytes of each read: several stripes, and more than the P2P probe takes.
const LEN: usize = 6 * MIB;

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in Place::STACKS {
        for &kind in kinds_for(place) {
            let name = format!("spin: every route, {}, {}", place.name(), kind.name());
            all.push(Case::new(name, move |g| every_route(g, place, kind)));
        }
    }
    all
}

fn every_route(guest: &Guest, place: Place, kind: MemoryKind) -> Outcome {
    let (path, bytes) = guest.cold(place, "routes", LEN + 777)?;
    let file = File::open(&path)?;
    let mut memory = kind.memory(LEN + 2 * MIB)?;

    // By default, and cold.
    let runtime = Runtime::new(Settings::default());
    let passes = kind == MemoryKind::P2p && verdict(place).is_ok();
    for round in 0..2 {
        let stats = read_and_check(&runtime, &file, &mut *memory, (0, 0, LEN), &bytes[..LEN])?;
        let p2p = by(&stats, Route::P2p);
        // The first request also decides whether the pair is trusted; its routes are not fixed.
        match (passes, round) {
            (true, 0) => {}
            (true, _) => expect("bytes by p2p", p2p, LEN as u64)?,
            (false, _) => {
                expect("bytes by p2p", p2p, 0)?;
                let seen = actual_route(kind, Route::Direct);
                expect(&format!("bytes by {seen} ({})", said(&stats)), by(&stats, seen), LEN as u64)?;
            }
        }
        drop_cache(&file)?;
    }
    let refused = match kind {
        MemoryKind::Emulated => Some(Reason::NoP2pMapping),
        MemoryKind::P2p if !passes => Some(Reason::P2pUnreachable),
        MemoryKind::P2p => None,
    };
    let reasons = explained(&runtime, &file, &*memory)?;
    for reason in [Reason::NoP2pMapping, Reason::P2pUnreachable, Reason::P2pUntrusted] {
        expect(&format!("'{reason}' is reported"), reasons.contains(&reason), refused == Some(reason))?;
    }
    drop_cache(&file)?;

    // By each route that serves cold bytes, alone: the first named must serve all.
    let only = |routes: &[Route]| Runtime::new(Settings { routes: routes.to_vec(), ..Settings::default() });
    for route in [Route::Copy, Route::Direct] {
        let seen = actual_route(kind, route);
        let runtime = only(&[route, Route::Copy, Route::Store]);
        let stats = read_and_check(&runtime, &file, &mut *memory, (0, 0, LEN), &bytes[..LEN])?;
        expect(&format!("cold bytes by {seen} ({})", said(&stats)), by(&stats, seen), LEN as u64)?;
        drop_cache(&file)?;
    }

    // And cached bytes.
    file.read_exact_at(&mut vec![0; LEN + 777], 0)?;
    for route in [Route::Copy, Route::Dma] {
        let seen = actual_route(kind, route);
        let runtime = only(&[route, Route::Copy, Route::Store, Route::Direct]);
        let stats = read_and_check(&runtime, &file, &mut *memory, (0, 0, LEN), &bytes[..LEN])?;
        expect(&format!("cached bytes by {seen} ({})", said(&stats)), by(&stats, seen), LEN as u64)?;
    }

    // Misaligned, half cached, to the end: any mixture.
    for (number, (offset, skew, len)) in
        [(3, 0, MIB), (65_000, 65_000 % 4096, 3 * MIB), (LEN - 5000, 1, 9000), (MIB + 512, 512, 2 * MIB)]
            .into_iter()
            .enumerate()
    {
        if number % 2 == 0 {
            drop_cache(&file)?;
            file.read_exact_at(&mut vec![0; 100_000], MIB as u64)?;
        }
        let expected = &bytes[offset..bytes.len().min(offset + len)];
        read_and_check(&runtime, &file, &mut *memory, (offset as u64, skew, len), expected)?;
    }

    // Through a descriptor that the program itself opened for direct I/O, with offsets and without.
    let own = open_direct(&path)?;
    for (offset, len) in [(4096, 4096), (60 << 10, 64 << 10), (MIB, 3 * MIB)] {
        let expected = &bytes[offset..offset + len];
        read_and_check(&runtime, &own, &mut *memory, (offset as u64, 0, len), expected)?;
        memory.fill_range(0, len, 0xee);
        linux::lseek(own.as_raw_fd(), offset as i64, 0)?;
        let got = runtime.read(own.as_raw_fd(), None, memory.target(0)?, len);
        expect("bytes read at the file's own offset", got.map_err(|e| CaseError::Failed(e.to_string()))?, len)?;
        expect_bytes("read at the file's own offset", &memory.bytes(0, len), expected)?;
        expect("the file's own offset", linux::lseek(own.as_raw_fd(), 0, 1)?, (offset + len) as u64)?;
    }
    // To the end, which is not aligned. The Linux kernel's bytes in the buffer past the end are not checked.
    let last = LEN - MIB;
    let got = runtime.read(own.as_raw_fd(), Some(last as u64), memory.target(0)?, 2 * MIB);
    expect("bytes read up to the end", got.map_err(|e| CaseError::Failed(e.to_string()))?, MIB + 777)?;
    expect_bytes("up to the end", &memory.bytes(0, MIB + 777), &bytes[last..])?;

    if by(&runtime.stats(), Route::P2p) > 0 && !passes {
        return fail(format!("p2p bytes where none can be: {}", said(&runtime.stats())));
    }
    remove(&path);
    Ok(())
}

/// A device without a DMA engine cannot copy from bounce buffers: the CPU stores the bytes.
fn actual_route(kind: MemoryKind, route: Route) -> Route {
    if kind == MemoryKind::P2p { Route::Store } else { route }
}

/// The routes of the bytes.
fn said(stats: &Snapshot) -> String {
    let lines: Vec<String> = stats.rows.iter().map(|l| format!("{} {} ({})", l.bytes, l.route, l.reason)).collect();
    lines.join(", ")
}
