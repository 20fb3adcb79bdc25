//! The trace in the format of ui.perfetto.dev and chrome://tracing: Chrome's trace event format.
//!
//! ```text
//!   process 4711  python3
//!     thread 4711            |== read 8 MiB ==|    |= read 8 MiB =|     a thread makes one request at a time,
//!     thread 4711, 2               |=== batch =======|                  except for submitted batches
//!     direct 1               |--|--|--|--|                             pieces of a route overlap, so each route
//!     direct 2               |---|--|---|                              has as many rows as are busy at once
//!     copy 1                 |-----|
//! ```
//!
//! The viewers identify a row with a thread, and their thread IDs have 32 bits: Perfetto moves an event with a larger
//! one to the process's first thread. Thread IDs of Linux are below 2^22.
//!
//! Times are microseconds of CLOCK_MONOTONIC, so traces of one boot can be compared.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use serde_json::{Value, json};
use spinio_io::stats::trace::Piece;

use super::gather::CompleteRequest;
use crate::{format, renamed_keys};

/// Rows that are no threads have IDs from here on, above those of threads.
const ROWS: u64 = 1 << 24;

/// Writes the whole trace.
pub fn write(out: &mut impl Write, all: &[CompleteRequest], programs: &HashMap<u32, String>) -> anyhow::Result<()> {
    let mut first = true;
    let mut event = |out: &mut dyn Write, value: Value| -> anyhow::Result<()> {
        out.write_all(if std::mem::replace(&mut first, false) { b"{\"traceEvents\":[\n" } else { b",\n" })?;
        serde_json::to_writer(out, &value)?;
        Ok(())
    };
    let pids: BTreeMap<_, _> = programs.iter().collect();
    for (pid, name) in pids {
        event(out, json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}))?;
    }
    let mut rows = Rows::default();
    let mut requests: Vec<&CompleteRequest> = all.iter().collect();
    requests.sort_by_key(|whole| whole.request.start);
    for whole in requests {
        let r = &whole.request;
        let (row, is_new) = rows.place(r.pid, RowKind::Requests(r.tid), r.start, r.duration);
        if is_new && row.is_extra {
            let name = format!("thread {}, {}", r.tid, row.number + 1);
            event(out, named(r.pid, row.tid, &name))?;
        }
        event(out, request(whole, row.tid))?;
    }
    let mut pieces: Vec<(&CompleteRequest, &Piece)> =
        all.iter().flat_map(|w| w.pieces.iter().map(move |p| (w, p))).collect();
    pieces.sort_by_key(|(_, p)| p.start);
    for (whole, p) in pieces {
        let (row, is_new) = rows.place(p.pid, RowKind::Pieces(p.route as u8), p.start, p.duration);
        if is_new {
            event(out, named(p.pid, row.tid, &format!("{} {}", p.route.name(), row.number + 1)))?;
        }
        let mut args = json!({
            "request": p.request, "direction": whole.request.direction.name(), "why": p.reason.text(),
            "offset": p.offset, "bytes": p.bytes, "thread": p.tid,
        });
        renamed_keys::add_reason(&mut args, p.reason);
        event(
            out,
            json!({
                "ph": "X", "cat": "segment", "name": format!("{} {}", p.route.name(), format::bytes(p.bytes)),
                "pid": p.pid, "tid": row.tid, "ts": micros(p.start), "dur": micros(p.duration),
                "args": args,
            }),
        )?;
    }
    if first {
        out.write_all(b"{\"traceEvents\":[")?;
    }
    out.write_all(b"\n],\"displayTimeUnit\":\"ns\"}\n")?;
    Ok(())
}

/// Gives a row its name.
fn named(pid: u32, tid: u64, name: &str) -> Value {
    json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
}

fn request(whole: &CompleteRequest, row: u64) -> Value {
    let r = &whole.request;
    let name = format!("{} {}", r.direction.name(), format::bytes(r.len));
    let mut args = json!({
        "request": r.id, "path": r.path, "fd": r.fd, "device": r.device, "offset": r.offset, "length": r.len,
        "bytes": r.result.ok(), "errno": r.result.err(),
    });
    if let Some((route, reason)) = r.route_reason {
        args["route"] = route.name().into();
        renamed_keys::add_reason(&mut args, reason);
    }
    json!({
        "ph": "X", "cat": "request", "name": name, "pid": r.pid, "tid": row,
        "ts": micros(r.start), "dur": micros(r.duration), "args": args,
    })
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

/// The kind of a row.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum RowKind {
    /// For a thread.
    Requests(u32),
    /// For a route.
    Pieces(u8),
}

/// The row of an event.
#[derive(Clone, Copy)]
struct Row {
    /// The thread ID that it is shown with.
    tid: u64,
    /// Its index among those of its kind.
    number: usize,
    /// It is not for a thread.
    is_extra: bool,
}

/// The rows of each process and kind, and the time until which each is busy.
#[derive(Default)]
struct Rows {
    busy: HashMap<(u32, RowKind), Vec<(Row, u64)>>,
    extra: u64,
}

impl Rows {
    /// The first row that is free when something starts, and whether it is a new one. Events of a kind are passed in
    /// the order of their starts.
    fn place(&mut self, pid: u32, kind: RowKind, start: u64, duration: u64) -> (Row, bool) {
        let rows = self.busy.entry((pid, kind)).or_default();
        let end = start.saturating_add(duration);
        if let Some((row, busy)) = rows.iter_mut().find(|(_, busy)| *busy <= start) {
            *busy = end;
            return (*row, false);
        }
        let number = rows.len();
        let row = match kind {
            RowKind::Requests(tid) if number == 0 => Row { tid: u64::from(tid), number, is_extra: false },
            _ => {
                self.extra += 1;
                Row { tid: ROWS + self.extra, number, is_extra: true }
            }
        };
        rows.push((row, end));
        (row, true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather::tests::{piece, request};
    use super::*;

    #[test]
    fn rows_have_all_events_without_overlap() {
        let pieces = vec![piece(1, 1_000_000), piece(1, 1_100_000), piece(1, 1_200_000), piece(1, 1_300_000)];
        // The second begins during the first, and ends after it; the third begins when that one ends.
        let (mut second, mut third) = (request(2), request(3));
        (second.start, third.start) = (1_200_000, 1_700_000);
        let more = [third, second].map(|request| CompleteRequest { request, pieces: vec![] });
        let all: Vec<CompleteRequest> =
            [CompleteRequest { request: request(1), pieces }].into_iter().chain(more).collect();
        let mut out = Vec::new();
        write(&mut out, &all, &HashMap::from([(7, "python3".to_owned())])).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let of = |cat: &str| events.iter().filter(|e| e["cat"] == cat).collect::<Vec<_>>();
        assert_eq!((of("request").len(), of("segment").len()), (3, 4));
        let mut rows: HashMap<u64, Vec<(f64, f64)>> = HashMap::new();
        for e in events.iter().filter(|e| e["ph"] == "X") {
            let start = e["ts"].as_f64().unwrap();
            rows.entry(e["tid"].as_u64().unwrap()).or_default().push((start, start + e["dur"].as_f64().unwrap()));
        }
        assert_eq!(rows.len(), 4, "two for requests; of pieces three overlap in no more than two places");
        assert!(rows.contains_key(&8), "a request is in the row of its thread: {rows:?}");
        let extra = rows.keys().filter(|tid| **tid != 8);
        assert!(extra.into_iter().all(|tid| (1 << 22..1 << 31).contains(tid)), "no thread's number: {rows:?}");
        assert!(rows.values().all(|row| row.windows(2).all(|w| w[0].1 <= w[1].0)), "{rows:?}");
        let named = events.iter().filter(|e| e["ph"] == "M").count();
        assert_eq!(named, 4, "a process and three rows have names");
    }

    #[test]
    fn an_empty_trace_is_one() {
        let mut out = Vec::new();
        write(&mut out, &[], &HashMap::new()).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["traceEvents"], json!([]));
    }
}
