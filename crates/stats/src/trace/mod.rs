//! Requests one by one: the parameters of each, and the routes of its pieces.
//!
//! ```text
//!   begin  while tracing is on: a number, the file, and its path if the ring does not have a recent record of it
//!   piece  ──> record: number, route, reason, bytes, start, duration         ┐ ring.rs
//!   end    ──> record: number, file, offset, length, result, start, duration ┘   ──> reader.rs, in another process
//! ```
//!
//! A small request is one record, with its route and reason. A path takes a record for every 80 bytes.

mod reader;
#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use spinio_device::{DeviceId, DeviceKind};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

pub use self::reader::{Event, Piece, Reader, Request};

use super::layout::{COUNTERS, RECORDS, TABLE_WORDS, header};
use super::ring::{self, Body};
use super::{Direction, Stats};

/// Offsets in the file of a table, in bytes, for a process that reads or traces one.
pub mod file {
    use super::*;

    /// Bytes of the counters, at the start.
    pub const COUNTERS_BYTES: usize = COUNTERS * 8;
    /// Bytes of the whole file. A tracer allocates them all before it switches tracing on.
    pub const BYTES: u64 = TABLE_WORDS as u64 * 8;
    /// Offset of the word that switches tracing on: CLOCK_MONOTONIC in nanoseconds until which requests are traced.
    pub const TRACING_AT: u64 = header::TRACING as u64 * 8;
    /// Offset of the word that counts the records written.
    pub const TICKETS_AT: u64 = header::TICKETS as u64 * 8;
}

const REQUEST: u64 = 1;
const PIECE: u64 = 2;
const PATH: u64 = 3;

/// No route, no reason, no device; and no offset.
const NONE: u64 = 0xff;
const NO_OFFSET: u64 = u64::MAX;

/// Words of a path in one record.
const PATH_WORDS: usize = 10;

/// Files whose recorded paths are remembered.
pub(super) const REPORTED_PATHS: usize = 64;

/// A request that is traced.
#[derive(Clone, Copy, Debug)]
pub struct TracedRequest {
    id: u64,
    start: u64,
    fd: Fd,
    offset: u64,
    len: u64,
    device: Option<DeviceId>,
    file: (u64, u64),
}

impl TracedRequest {
    pub(super) fn set_device(&mut self, device: DeviceId) {
        self.device = Some(device);
    }

    pub(super) fn set_len(&mut self, len: u64) {
        self.len = len;
    }
}

impl Stats {
    /// A traced request, if tracing is on now.
    pub(super) fn traced(&self, fd: Fd, offset: Option<u64>, len: u64) -> Option<TracedRequest> {
        let words = self.words.as_deref()?;
        let until = if self.always_traces { u64::MAX } else { words[header::TRACING].load(Relaxed) };
        if until == 0 {
            return None;
        }
        let start = linux::monotonic_ns();
        if start >= until {
            return None;
        }
        let stat = linux::fstat(fd).ok();
        let file = stat.map_or((0, 0), |s| (s.dev, s.ino));
        if stat.is_some() {
            self.report_path(words, fd, file);
        }
        let offset = offset.or_else(|| linux::lseek(fd, 0, 1).ok()).unwrap_or(NO_OFFSET);
        let id = words[header::REQUESTS].fetch_add(1, Relaxed) + 1;
        Some(TracedRequest { id, start, fd, offset, len, device: None, file })
    }

    /// A traced request has returned. `route_reason`: of a small request, which has no pieces.
    pub(super) fn trace_request(
        &self,
        traced: &TracedRequest,
        direction: Direction,
        route_reason: Option<(Route, Reason)>,
        result: &Result<usize, Errno>,
    ) {
        let Some(words) = &self.words else { return };
        let (route, reason) = route_reason.map_or((NONE, NONE), |(route, reason)| (route as u64, reason as u64));
        let result = match result {
            Ok(bytes) => *bytes as i64,
            Err(error) => -i64::from(error.raw_os_error()),
        };
        let device = traced.device.map_or(NONE, |d| device_number(d.kind)) << 32;
        ring::write(
            words,
            &[
                REQUEST | (direction as u64) << 8 | route << 16 | reason << 24 | u64::from(linux::gettid()) << 32,
                traced.id,
                traced.start,
                linux::monotonic_ns().saturating_sub(traced.start),
                traced.offset,
                traced.len,
                result as u64,
                traced.file.0,
                traced.file.1,
                device | u64::from(traced.device.map_or(0, |d| d.ordinal)),
                u64::from(self.pid) << 32 | u64::from(traced.fd as u32),
                0,
                0,
                0,
            ],
        );
    }

    pub(super) fn trace_piece(
        &self,
        traced: &TracedRequest,
        direction: Direction,
        route_reason: (Route, Reason),
        (at, bytes): (u64, u64),
        begun: Instant,
    ) {
        let Some(words) = &self.words else { return };
        let duration = begun.elapsed().as_nanos() as u64;
        let (route, reason) = (route_reason.0 as u64, route_reason.1 as u64);
        let mut body = Body::default();
        body[..6].copy_from_slice(&[
            PIECE | (direction as u64) << 8 | route << 16 | reason << 24 | u64::from(linux::gettid()) << 32,
            traced.id,
            linux::monotonic_ns().saturating_sub(duration),
            duration,
            at,
            bytes,
        ]);
        body[10] = u64::from(self.pid) << 32;
        ring::write(words, &body);
    }

    /// Records the path of a file, unless the ring still has it.
    fn report_path(&self, words: &[AtomicU64], fd: Fd, (dev, ino): (u64, u64)) {
        let tag = (dev ^ ino.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let reported = &self.path_reported[tag as usize % REPORTED_PATHS];
        // The tag of the file is in the upper half, the ticket in the lower, so that one load reads both.
        let (now, last) = (words[header::TICKETS].load(Relaxed) as u32, reported.load(Acquire));
        if last >> 32 == tag && now.wrapping_sub(last as u32) < RECORDS as u32 / 4 && last as u32 != 0 {
            return;
        }
        let mut link = *b"/proc/thread-self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
        let number = u64::from(fd as u32);
        let mut at = 21;
        let mut divisor = 1_000_000_000;
        while divisor > 0 {
            if number >= divisor || divisor == 1 {
                link[at] = b'0' + (number / divisor % 10) as u8;
                at += 1;
            }
            divisor /= 10;
        }
        let Ok(link) = std::ffi::CStr::from_bytes_until_nul(&link) else { return };
        let mut path = [0u8; 4096];
        let len = linux::readlink(link, &mut path).unwrap_or(0);
        let parts = len.div_ceil(PATH_WORDS * 8);
        for part in 0..parts {
            let text = &path[part * PATH_WORDS * 8..len.min((part + 1) * PATH_WORDS * 8)];
            let mut body = Body::default();
            body[..4].copy_from_slice(&[
                PATH | (part as u64) << 8 | (parts as u64) << 16 | (text.len() as u64) << 32,
                dev,
                ino,
                0,
            ]);
            for (word, bytes) in body[4..].iter_mut().zip(text.chunks(8)) {
                let mut padded = [0u8; 8];
                padded[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_le_bytes(padded);
            }
            ring::write(words, &body);
        }
        // Set last, so that no other thread skips the path before it is in the ring. Two threads may both record it.
        reported.store(tag << 32 | u64::from(now.max(1)), Release);
    }
}

fn device_number(kind: DeviceKind) -> u64 {
    match kind {
        DeviceKind::Emulated => 0,
        DeviceKind::Cuda => 1,
        DeviceKind::P2pmem => 2,
    }
}

fn device_name(word: u64) -> Option<String> {
    let kind = match word >> 32 {
        0 => DeviceKind::Emulated,
        1 => DeviceKind::Cuda,
        2 => DeviceKind::P2pmem,
        _ => return None,
    };
    Some(DeviceId { kind, ordinal: word as u32 }.to_string())
}
