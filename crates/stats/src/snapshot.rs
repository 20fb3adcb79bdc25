//! The counters at one moment, from this process's table or from the bytes of another's.

use spinio_plan::{Reason, Residency, Route};

use super::histogram::{BUCKETS, Histogram};
use super::layout::{
    CALL_WORDS, CALLS, CELL_COUNT, CELL_WORDS, CELLS, COUNTERS, DIRECTIONS, FINGERPRINT, GAUGE_SLOTS, GAUGES, MAGIC,
    PAGES, REFUSALS, RESIDENCIES, SLOT_COUNT, SLOT_WORDS, THREAD_SLOTS, header, key,
};
use super::{Direction, Gauge};

/// Calls of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Calls that returned, including those with an error.
    pub calls: u64,
    /// Calls that returned an error.
    pub failed: u64,
    /// Bytes returned.
    pub bytes: u64,
    /// Time inside the calls, summed over threads. Only some small calls are timed, and stand for the others.
    pub nanos: u64,
    /// Latency of the calls.
    pub latency: Histogram,
}

/// What was moved by one route for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteRow {
    /// The direction of the request.
    pub direction: Direction,
    /// How the bytes were moved.
    pub route: Route,
    /// Why.
    pub reason: Reason,
    /// Pieces moved.
    pub pieces: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Time spent on them, summed over threads.
    pub nanos: u64,
    /// Latency of the pieces.
    pub latency: Histogram,
}

/// How often a faster route was refused, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// Segments.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The process that the counters belong to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// The PID in the process's own namespace; 0 if the counters belong to no process yet. In a file that several
    /// processes share, the first of them.
    pub pid: u32,
    /// Name of the program, at most 15 bytes.
    pub name: String,
    /// CLOCK_MONOTONIC when the counters began, nanoseconds.
    pub started: u64,
    /// The same moment in nanoseconds since 1970.
    pub started_wall: u64,
}

/// The counters at one moment. Other threads may count meanwhile, so one number may lag another by a piece.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The process.
    pub process: Process,
    /// Device reads.
    pub read: Calls,
    /// Device writes.
    pub write: Calls,
    /// Batches.
    pub batch: Calls,
    /// Routes and reasons by which bytes were moved.
    pub rows: Vec<RouteRow>,
    /// Reasons for which a faster route was refused.
    pub refusals: Vec<Refusal>,
    /// Pages surveyed, by residency: see [`Snapshot::pages`].
    pub pages: [u64; RESIDENCIES],
    /// By gauge, see [`Snapshot::gauge`].
    pub gauges: [[u64; 2]; GAUGE_SLOTS],
    /// Pieces whose route and reason did not fit in the table.
    pub overflow: u64,
}

/// Why bytes are not a table of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// Not a table of counters, or truncated.
    NotCounters,
    /// A table of another build of SPIN, with a different layout.
    OtherVersion,
}

impl Snapshot {
    /// Reads the table of another process from its file; corrupt bytes give wrong numbers, never a panic.
    pub fn from_bytes(bytes: &[u8]) -> Result<Snapshot, SnapshotError> {
        let word = |i: usize| match bytes.get(i * 8..i * 8 + 8).and_then(|b| b.try_into().ok()) {
            Some(b) => u64::from_le_bytes(b),
            None => 0,
        };
        if bytes.len() < COUNTERS * 8 || !matches!(word(header::MAGIC), MAGIC | 0) {
            return Err(SnapshotError::NotCounters);
        }
        // All zeros: a table in which nothing was counted yet.
        match (word(header::MAGIC), word(header::FINGERPRINT)) {
            (MAGIC, FINGERPRINT) | (0, 0) => Ok(Snapshot::read(&word)),
            (MAGIC, _) => Err(SnapshotError::OtherVersion),
            _ => Err(SnapshotError::NotCounters),
        }
    }

    /// Reads a table word by word.
    pub(super) fn read(word: &impl Fn(usize) -> u64) -> Snapshot {
        let histogram = |at: usize| {
            let mut h = Histogram::default();
            (0..BUCKETS).for_each(|i| h.counts[i] = word(at + i));
            h
        };
        let mut calls = [const { None }; DIRECTIONS].map(|_: Option<Calls>| Calls::default());
        for (d, c) in calls.iter_mut().enumerate() {
            let at = CALLS + d * CALL_WORDS;
            *c = Calls {
                calls: word(at),
                failed: word(at + 1),
                bytes: word(at + 2),
                nanos: word(at + 3),
                latency: histogram(at + 4),
            };
        }
        let mut rows = Vec::new();
        for at in (0..CELL_COUNT).map(|i| CELLS + i * CELL_WORDS) {
            if let Some((direction, route, reason)) = decode_key(word(at)) {
                let (pieces, bytes, nanos) = (word(at + 1), word(at + 2), word(at + 3));
                rows.push(RouteRow { direction, route, reason, pieces, bytes, nanos, latency: histogram(at + 4) });
            }
        }
        let slot_sum =
            |i: usize| (0..SLOT_COUNT).fold(0u64, |sum, l| sum.wrapping_add(word(THREAD_SLOTS + l * SLOT_WORDS + i)));
        for (direction, at) in [(Direction::Read, 0), (Direction::Write, 2)] {
            let (count, bytes) = (slot_sum(at), slot_sum(at + 1));
            if count > 0 {
                // The time of small calls is already in their cell and in the calls.
                add_small_calls(&mut calls[direction as usize], &mut rows, direction, count, bytes);
            }
        }
        rows.retain(|l| l.pieces > 0);
        rows.sort_by_key(|l| (l.direction as usize, l.route, l.reason));
        let refusals = Reason::ALL.iter().enumerate().filter_map(|(i, &reason)| {
            let at = REFUSALS + i * 2;
            (word(at) > 0).then(|| Refusal { reason, count: word(at), bytes: word(at + 1) })
        });
        let [read, write, batch] = calls;
        Snapshot {
            process: process(word),
            read,
            write,
            batch,
            rows,
            refusals: refusals.collect(),
            pages: std::array::from_fn(|i| word(PAGES + i)),
            gauges: std::array::from_fn(|i| [word(GAUGES + i * 2), word(GAUGES + i * 2 + 1)]),
            overflow: word(header::OVERFLOW),
        }
    }

    /// The calls of a direction.
    pub fn calls(&self, direction: Direction) -> &Calls {
        match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
            Direction::Batch => &self.batch,
        }
    }

    /// Whether no device request was made.
    pub fn is_empty(&self) -> bool {
        Direction::ALL.iter().all(|d| self.calls(*d).calls == 0)
    }

    /// Pages of 4 KiB that were surveyed and had this residency.
    pub fn pages(&self, residency: Residency) -> u64 {
        self.pages[residency as usize]
    }

    /// The current value of a gauge, and its maximum.
    pub fn gauge(&self, gauge: Gauge) -> (u64, u64) {
        let [now, max] = self.gauges[gauge as usize];
        (now, max)
    }

    /// What was counted since `earlier`; gauges are unchanged.
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let mut out = self.clone();
        out.combine(earlier, u64::saturating_sub);
        out.rows.retain(|l| l.pieces > 0);
        out.refusals.retain(|r| r.count > 0);
        out
    }

    /// Adds the counters and gauges of another process.
    pub fn add(&mut self, other: &Snapshot) {
        for line in &other.rows {
            if !self.rows.iter().any(|l| l.same_key(line)) {
                self.rows.push(RouteRow {
                    pieces: 0,
                    bytes: 0,
                    nanos: 0,
                    latency: Histogram::default(),
                    ..line.clone()
                });
            }
        }
        for r in &other.refusals {
            if !self.refusals.iter().any(|mine| mine.reason == r.reason) {
                self.refusals.push(Refusal { count: 0, bytes: 0, ..*r });
            }
        }
        self.combine(other, u64::wrapping_add);
        for (mine, theirs) in self.gauges.as_flattened_mut().iter_mut().zip(other.gauges.as_flattened()) {
            *mine = mine.wrapping_add(*theirs);
        }
        self.rows.sort_by_key(|l| (l.direction as usize, l.route, l.reason));
        self.refusals.sort_by_key(|r| r.reason);
    }

    fn combine(&mut self, other: &Snapshot, with: fn(u64, u64) -> u64) {
        let mine = [&mut self.read, &mut self.write, &mut self.batch];
        for (mine, theirs) in mine.into_iter().zip([&other.read, &other.write, &other.batch]) {
            mine.calls = with(mine.calls, theirs.calls);
            mine.failed = with(mine.failed, theirs.failed);
            mine.bytes = with(mine.bytes, theirs.bytes);
            mine.nanos = with(mine.nanos, theirs.nanos);
            mine.latency.combine(&theirs.latency, with);
        }
        for theirs in &other.rows {
            if let Some(mine) = self.rows.iter_mut().find(|l| l.same_key(theirs)) {
                mine.pieces = with(mine.pieces, theirs.pieces);
                mine.bytes = with(mine.bytes, theirs.bytes);
                mine.nanos = with(mine.nanos, theirs.nanos);
                mine.latency.combine(&theirs.latency, with);
            }
        }
        for theirs in &other.refusals {
            if let Some(mine) = self.refusals.iter_mut().find(|r| r.reason == theirs.reason) {
                mine.count = with(mine.count, theirs.count);
                mine.bytes = with(mine.bytes, theirs.bytes);
            }
        }
        for (mine, theirs) in self.pages.iter_mut().zip(other.pages) {
            *mine = with(*mine, theirs);
        }
        self.overflow = with(self.overflow, other.overflow);
    }
}

impl RouteRow {
    fn same_key(&self, other: &RouteRow) -> bool {
        (self.direction, self.route, self.reason) == (other.direction, other.route, other.reason)
    }
}

/// Adds the small calls of all slots to the calls and rows.
fn add_small_calls(calls: &mut Calls, rows: &mut Vec<RouteRow>, direction: Direction, count: u64, bytes: u64) {
    let (route, reason) = (Route::Copy, Reason::Small);
    let at = rows.iter().position(|l| (l.direction, l.route, l.reason) == (direction, route, reason));
    let line = match at {
        Some(at) => &mut rows[at],
        None => {
            let latency = Histogram::default();
            rows.push(RouteRow { direction, route, reason, pieces: 0, bytes: 0, nanos: 0, latency });
            let last = rows.len() - 1;
            &mut rows[last]
        }
    };
    line.pieces = line.pieces.wrapping_add(count);
    line.bytes = line.bytes.wrapping_add(bytes);
    calls.calls = calls.calls.wrapping_add(count);
    calls.bytes = calls.bytes.wrapping_add(bytes);
}

fn process(word: &impl Fn(usize) -> u64) -> Process {
    let mut name: Vec<u8> = (0..2).flat_map(|i| word(header::NAME + i).to_le_bytes()).collect();
    name.truncate(name.iter().position(|b| *b == 0).unwrap_or(name.len()));
    let name = String::from_utf8_lossy(&name).chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let pid = u32::try_from(word(header::PID)).unwrap_or(0);
    Process { pid, name, started: word(header::STARTED), started_wall: word(header::STARTED_WALL) }
}

/// Decodes the key of a cell; `None` for a free cell or an invalid key.
fn decode_key(word: u64) -> Option<(Direction, Route, Reason)> {
    let direction = *Direction::ALL.get((word >> 16 & 0xffff) as usize)?;
    let route = *Route::ALL.get((word >> 8 & 0xff) as usize)?;
    let reason = *Reason::ALL.get((word & 0xff) as usize)?;
    (key(direction as usize, route, reason) == word).then_some((direction, route, reason))
}
