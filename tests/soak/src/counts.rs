//! Event counts, sent by workers to the supervisor as one line of JSON.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Events of the workers: `parted` counts sessions that lost the exclusive access to their output, `neighbours` the
/// filler bytes that sessions wrote. The last three are the mutator's: how often it published a file that other
/// processes may have pinned, how often it opened one, and the longest time that it had to wait, in milliseconds.
pub(crate) const EVENTS: [&str; 15] = [
    "steady",
    "changing",
    "own",
    "log",
    "free",
    "advise",
    "hold",
    "batch",
    "sessions",
    "parted",
    "neighbours",
    "bytes",
    "published",
    "opened",
    "longest_wait",
];

/// Counts of events.
#[derive(Default)]
pub(crate) struct EventCounts([AtomicU64; EVENTS.len()]);

impl EventCounts {
    pub(crate) fn add(&self, event: &str, n: u64) {
        let at = EVENTS.iter().position(|d| *d == event).expect("a known event");
        self.0[at].fetch_add(n, Relaxed);
    }

    pub(crate) fn line(&self) -> String {
        let counts = EVENTS.iter().zip(&self.0).map(|(deed, n)| (deed.to_string(), n.load(Relaxed).into()));
        serde_json::Value::Object(counts.collect()).to_string()
    }

    /// Adds the counts of a worker.
    pub(crate) fn parse_line(&self, line: &str) {
        if let Ok(counts) = serde_json::from_str::<serde_json::Value>(line) {
            for (deed, n) in EVENTS.iter().zip(&self.0) {
                n.fetch_add(counts[deed].as_u64().unwrap_or(0), Relaxed);
            }
        }
    }
}
