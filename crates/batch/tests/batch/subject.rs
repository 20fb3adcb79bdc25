//! The file that batches are about, and what may be said of one that ran.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use spinio_device::emulated::{Emulated, Outstanding, POISON};
use spinio_batch::{Batches, Done, Piece};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_testkit::place::{self, Place};
use spinio_testkit::{Buffer, FaultyDevice, Rng, file, within};

pub(crate) const SIZE: usize = (2 << 20) + 777;

pub(crate) struct Subject {
    _place: Place,
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl Subject {
    pub(crate) fn on(kind: &'static str) -> Result<Subject, String> {
        let place = place::on(kind)?;
        let path = place.file("subject");
        let file = file::written(&path, SIZE as u64);
        file.sync_all().unwrap();
        Ok(Subject { _place: place, path, file })
    }

    pub(crate) fn new() -> Subject {
        Subject::on("tree").unwrap()
    }

    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

pub(crate) fn settings() -> Settings {
    Settings { staging: 8 << 20, kernels: None, ..Settings::default() }
}

/// Pieces of random place and length, some past the end; each goes to a place of its own in the buffer, a few bytes of
/// which lie unused between them.
pub(crate) fn pieces(rng: &mut Rng, fds: &[i32], buffer: &Buffer, count: usize, longest: u64) -> Vec<Piece> {
    let mut to = 0;
    let mut all = Vec::new();
    for _ in 0..count {
        let len = match rng.below(4) {
            0 => 512,
            1 => 4096,
            _ => rng.edgy(longest),
        };
        let mut offset = rng.edgy(SIZE as u64 + 9000);
        if rng.chance(40) {
            offset = offset / 512 * 512;
        }
        if rng.chance(10) && !all.is_empty() {
            let earlier: &Piece = rng.pick(&all);
            offset = earlier.offset;
        }
        to += rng.below(3) * 16 + u64::from(rng.chance(30));
        if to + len > buffer.len() as u64 {
            break;
        }
        let address = buffer.addr().0 + to;
        all.push(Piece { fd: *rng.pick(fds), offset, len, address, ..Piece::default() });
        to += len;
    }
    all
}

/// Reads pieces through a device that stands before the buffer's own.
pub(crate) fn through(
    device: &'static FaultyDevice,
    runtime: &Runtime,
    buffer: &Buffer,
    pieces: &mut [Piece],
    what: &str,
) -> Done {
    let known = [buffer.target_through(device, 0).allocation];
    within(what, || runtime.batch_into(pieces, &known)).unwrap()
}

/// As [`through`], where nothing can arrive: each piece that has bytes is told as failed. The device is whole again then.
pub(crate) fn in_vain(
    device: &'static FaultyDevice,
    runtime: &Runtime,
    buffer: &Buffer,
    pieces: &mut Vec<Piece>,
    what: &str,
) {
    pieces.retain(|p| p.offset < SIZE as u64 && p.len > 0);
    let done = through(device, runtime, buffer, pieces, what);
    assert_eq!((done.failed, done.bytes), (pieces.len(), 0), "{what}");
    device.heal();
}

/// Fails unless each piece is what the file says, and every other byte of the buffer untouched.
pub(crate) fn check(pieces: &[Piece], buffer: &Buffer) {
    let mut expected = vec![POISON; buffer.len()];
    for (n, p) in pieces.iter().enumerate() {
        let within = p.len.min((SIZE as u64).saturating_sub(p.offset)) as usize;
        assert_eq!(p.result, within as i64, "piece {n}: {p:?}");
        let at = (p.address - buffer.addr().0) as usize;
        expected[at..at + within].copy_from_slice(&file::bytes(p.offset, within, 0));
    }
    let seen = buffer.bytes();
    if let Some(at) = seen.iter().zip(&expected).position(|(a, b)| a != b) {
        let whose = pieces.iter().position(|p| (p.address..p.address + p.len).contains(&(buffer.addr().0 + at as u64)));
        panic!("byte {at} is {:#x}, not {:#x}: piece {whose:?}", seen[at], expected[at]);
    }
}

pub(crate) fn routes(runtime: &Runtime) -> Vec<Route> {
    let mut routes: Vec<_> = runtime.stats().lines.iter().filter(|l| l.bytes > 0).map(|l| l.route).collect();
    routes.sort();
    routes.dedup();
    routes
}

/// Waits until the device has everything back from a runtime that was let go: a helper that came too late for its last
/// batch may be the last to do so.
pub(crate) fn assert_nothing_lent(device: &Emulated, buffers: usize) {
    let nothing = Outstanding { allocations: buffers, ..Outstanding::default() };
    let begun = std::time::Instant::now();
    while device.outstanding() != nothing && begun.elapsed() < std::time::Duration::from_secs(60) {
        std::thread::yield_now();
    }
    assert_eq!(device.outstanding(), nothing);
}
