//! Counters: calls, pieces by route and reason, latencies, refusals, residency, gauges.
//!
//! ```text
//!   small call ──────────> slot of the thread: 2 plain additions  ┐
//!   large call, batch ───> calls[direction]                       │  one table of 64-bit words (SharedWords), in
//!   piece ───────────────> cell[direction, route, reason]         │  process memory or in a file that other processes
//!   survey, plan ────────> pages[residency], refused[reason]      │  read at the same time (layout.rs: the offset of
//!   pins, buffers, files ─> gauges: now, maximum                  ┘  each number)
//!                                     │
//!                                     └──> snapshot.rs: from this table, or from the bytes of a file
//!   while tracing is on ──> ring of records (ring.rs, trace/)
//! ```
//!
//! `small_calls.rs` counts small calls in slots of threads. `region.rs` decides where the table is stored. A process
//! that makes device requests has a file in a directory of its user (`directory.rs`), where `spinio stat` and `spinio
//! top` find it. `published.rs`: a text about this process beside it, of which `spinio net` shows the sockets of kernels.
//!
//! The code that serves a request begins a `RequestSpan`, records each piece under it, and ends it with the result:
//!
//! ```text
//!   let span = stats.begin(Direction::Read, fd, offset, len).with_device(device);
//!   stats.record_piece(&span, Route::Direct, Reason::Absent, at, bytes, begun);      at: from the start of the request
//!   stats.end(&span, &result.as_ref().copied());
//! ```
//!
//! No function here takes a lock or fails, and only a traced small call allocates, so all may be called from any thread
//! at any time.
//!
//! Known flaws: only some small calls are timed, and each stands for those since the last timed one, so the latencies
//! of a few dozen calls are coarse. Processes that share one file by its name also share its gauges, and what a killed
//! process had in use stays counted.

mod directory;
mod histogram;
mod layout;
mod published;
mod region;
mod ring;
mod small_calls;
mod snapshot;
mod table_file;
pub mod trace;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use spinio_device::Device;
use spinio_plan::{Reason, Residency, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, SharedWords};

pub use directory::default_dirs;
pub use histogram::Histogram;
pub use published::{LONGEST_TEXT, PublishedText, pid_of, published_text};
pub use region::{GaugeSource, StatsLocation, StatsRegion};
pub use snapshot::{Calls, Process, Refusal, RouteRow, Snapshot, SnapshotError};

use layout::{CALL_WORDS, CALLS, CELL_COUNT, CELL_WORDS, CELLS, GAUGES, PAGES, REFUSALS};
use layout::{header, key};
use trace::TracedRequest;

/// The direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From a file to a device.
    Read,
    /// From a device to a file.
    Write,
    /// Many reads submitted together.
    Batch,
}

impl Direction {
    /// All, in numeric order.
    pub const ALL: [Direction; 3] = [Direction::Read, Direction::Write, Direction::Batch];

    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
            Direction::Batch => "batch",
        }
    }
}

/// A quantity with a current value and a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gauge {
    /// Bytes of page-cache pages registered with a driver for requests.
    Pinned,
    /// Bytes of bounce buffers.
    BounceBytes,
    /// Files with shadow descriptors.
    CachedFileStates,
    /// Files pinned for repeated reads.
    PinnedFiles,
    /// Bytes of pinned files that are registered.
    PinnedFileBytes,
    /// Pages that only SPIN read into the page cache and has not dropped yet.
    ReadaheadPages,
}

impl Gauge {
    /// All, in numeric order.
    pub const ALL: [Gauge; 6] = [
        Gauge::Pinned,
        Gauge::BounceBytes,
        Gauge::CachedFileStates,
        Gauge::PinnedFiles,
        Gauge::PinnedFileBytes,
        Gauge::ReadaheadPages,
    ];

    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Gauge::Pinned => "pinned",
            Gauge::BounceBytes => "bounce buffers",
            Gauge::CachedFileStates => "cached file states",
            Gauge::PinnedFiles => "pinned files",
            Gauge::PinnedFileBytes => "pinned file bytes",
            Gauge::ReadaheadPages => "read-ahead pages",
        }
    }

    /// The key in JSON, and with `spinio_` before it the metric.
    pub const fn key(self) -> &'static str {
        match self {
            Gauge::Pinned => "pinned_bytes",
            Gauge::BounceBytes => "bounce_bytes",
            Gauge::CachedFileStates => "file_cache_entries",
            Gauge::PinnedFiles => "pinned_files",
            Gauge::PinnedFileBytes => "pinned_file_bytes",
            Gauge::ReadaheadPages => "readahead_pages",
        }
    }
}

/// A request in progress, as the statistics see it.
#[derive(Clone, Copy, Debug)]
pub struct RequestSpan {
    direction: Direction,
    start: Instant,
    /// Only while tracing is on.
    traced: Option<TracedRequest>,
}

impl RequestSpan {
    /// The same, with the device of the request.
    pub fn with_device(mut self, device: &dyn Device) -> RequestSpan {
        if let Some(traced) = &mut self.traced {
            traced.set_device(device.id());
        }
        self
    }

    /// The same, with the number of bytes requested; computed only if the request is traced.
    pub fn with_len(mut self, len: impl FnOnce() -> u64) -> RequestSpan {
        if let Some(traced) = &mut self.traced {
            traced.set_len(len());
        }
        self
    }

    /// When the request began.
    pub fn start(&self) -> Instant {
        self.start
    }
}

/// The last table number. A forked child reuses the numbers of its parent's later tables, which it never sees.
static TABLE_COUNT: AtomicU64 = AtomicU64::new(0);

/// The counters of a runtime, or none of them (`SPINIO_STATS=off`).
pub struct Stats {
    words: Option<SharedWords>,
    /// Not 0, and different for each table of a process.
    table_id: u64,
    pid: u32,
    /// Every request of this process is traced, whatever the switch of a table says that other processes share.
    always_traces: bool,
    /// Files whose paths the trace has recorded: a tag of the file, and the ticket.
    path_reported: [AtomicU64; trace::REPORTED_PATHS],
}

impl Stats {
    fn new(words: Option<SharedWords>) -> Stats {
        let table_id = TABLE_COUNT.fetch_add(1, Relaxed) + 1;
        Stats {
            words,
            table_id,
            pid: linux::getpid(),
            always_traces: false,
            path_reported: [const { AtomicU64::new(0) }; trace::REPORTED_PATHS],
        }
    }

    fn with_tracing(self, always_traces: bool) -> Stats {
        Stats { always_traces, ..self }
    }

    fn add(&self, at: usize, n: u64) {
        if let Some(words) = &self.words {
            words[at].fetch_add(n, Relaxed);
        }
    }

    /// A request begins. `offset`: `None` for the descriptor's own offset; `len`: bytes requested.
    pub fn begin(&self, direction: Direction, fd: Fd, offset: Option<u64>, len: u64) -> RequestSpan {
        RequestSpan { direction, start: Instant::now(), traced: self.traced(fd, offset, len) }
    }

    /// The call returns.
    pub fn end(&self, span: &RequestSpan, result: &Result<usize, Errno>) {
        if self.words.is_none() {
            return;
        }
        let nanos = span.start.elapsed().as_nanos() as u64;
        let at = CALLS + span.direction as usize * CALL_WORDS;
        self.add(at, 1);
        match result {
            Ok(bytes) => self.add(at + 2, *bytes as u64),
            Err(_) => self.add(at + 1, 1),
        }
        self.add(at + 3, nanos);
        self.add(at + 4 + histogram::bucket(nanos), 1);
        if let Some(traced) = &span.traced {
            self.trace_request(traced, span.direction, None, result);
        }
    }

    /// A piece of the request has been moved since `begun`: `bytes` from `at` on, relative to the start of the request.
    pub fn record_piece(&self, span: &RequestSpan, route: Route, reason: Reason, at: u64, bytes: u64, begun: Instant) {
        if bytes > 0 && self.words.is_some() {
            let nanos = begun.elapsed().as_nanos() as u64;
            self.count(span.direction, route, reason, bytes, nanos);
            if let Some(traced) = &span.traced {
                self.trace_piece(traced, span.direction, (route, reason), (at, bytes), begun);
            }
        }
    }

    /// A faster route was refused for a segment.
    pub fn record_refusal(&self, reason: Reason, bytes: u64) {
        self.add(REFUSALS + reason as usize * 2, 1);
        self.add(REFUSALS + reason as usize * 2 + 1, bytes);
    }

    /// The residency of `bytes` bytes was surveyed.
    pub fn residency_probed(&self, residency: Residency, bytes: u64) {
        self.add(PAGES + residency as usize, bytes.div_ceil(linux::PAGE as u64));
    }

    /// Sets the current value of a gauge.
    pub fn set_gauge(&self, gauge: Gauge, now: u64) {
        if let Some(words) = &self.words {
            let at = GAUGES + gauge as usize * 2;
            words[at].store(now, Relaxed);
            if words[at + 1].load(Relaxed) < now {
                words[at + 1].fetch_max(now, Relaxed);
            }
        }
    }

    /// The counters now.
    pub fn snapshot(&self) -> Snapshot {
        match &self.words {
            Some(words) => Snapshot::read(&|i| words[i].load(Relaxed)),
            None => Snapshot::default(),
        }
    }

    fn count(&self, direction: Direction, route: Route, reason: Reason, bytes: u64, nanos: u64) {
        match self.cell(direction, route, reason) {
            Some(cell) => {
                self.add(cell + 1, 1);
                self.add(cell + 2, bytes);
                self.add(cell + 3, nanos);
                self.add(cell + 4 + histogram::bucket(nanos), 1);
            }
            None => self.add(header::OVERFLOW, 1),
        }
    }

    /// The offset of a cell, which is created if it does not exist.
    fn cell(&self, direction: Direction, route: Route, reason: Reason) -> Option<usize> {
        let words = self.words.as_ref()?;
        let key = key(direction as usize, route, reason);
        let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        for i in 0..CELL_COUNT {
            let at = CELLS + (first + i) % CELL_COUNT * CELL_WORDS;
            let found = match words[at].load(Relaxed) {
                // Another thread, or another process with this file, may have created it first.
                0 => words[at].compare_exchange(0, key, Relaxed, Relaxed).unwrap_or_else(|current| current),
                found => found,
            };
            if found == key || found == 0 {
                return Some(at);
            }
        }
        None
    }
}

#[cfg(test)]
mod region_tests;
#[cfg(test)]
mod tests;
