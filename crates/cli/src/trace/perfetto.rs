//! The trace as ui.perfetto.dev and chrome://tracing read it: Chrome's trace event format.
//!
//! ```text
//!   process 4711  python3
//!     thread 4711            |== read 8 MiB ==|    |= read 8 MiB =|     a thread makes one request at a time
//!     direct 1               |--|--|--|--|                             pieces of a route overlap, so each route
//!     direct 2               |---|--|---|                              has as many rows as are busy at once
//!     copy 1                 |-----|
//! ```
//!
//! Times are microseconds of CLOCK_MONOTONIC, so traces of one boot lie beside each other.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use serde_json::{Value, json};
use spinio_io::stats::trace::Piece;

use super::gather::Whole;
use crate::{names, units};

/// Numbers of rows of pieces begin here, above those of threads.
const ROWS: u64 = 1 << 32;

/// Writes the whole trace.
pub fn write(out: &mut impl Write, all: &[Whole], programs: &HashMap<u32, String>) -> anyhow::Result<()> {
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
    for whole in all {
        event(out, request(whole))?;
    }
    let mut rows = Rows::default();
    let mut pieces: Vec<(&Whole, &Piece)> = all.iter().flat_map(|w| w.pieces.iter().map(move |p| (w, p))).collect();
    pieces.sort_by_key(|(_, p)| p.start);
    for (whole, p) in pieces {
        let (row, is_new) = rows.place(p);
        let tid = ROWS + ((p.route as u64) << 16) + row as u64;
        if is_new {
            let name = format!("{} {}", p.route.name(), row + 1);
            event(out, json!({"ph": "M", "name": "thread_name", "pid": p.pid, "tid": tid, "args": {"name": name}}))?;
        }
        event(
            out,
            json!({
                "ph": "X", "cat": "segment", "name": format!("{} {}", p.route.name(), units::bytes(p.bytes)),
                "pid": p.pid, "tid": tid, "ts": micros(p.start), "dur": micros(p.duration),
                "args": {
                    "request": p.request, "direction": whole.request.direction.name(), "reason": names::reason(p.reason),
                    "why": p.reason.text(), "offset": p.offset, "bytes": p.bytes, "thread": p.tid,
                },
            }),
        )?;
    }
    if first {
        out.write_all(b"{\"traceEvents\":[")?;
    }
    out.write_all(b"\n],\"displayTimeUnit\":\"ns\"}\n")?;
    Ok(())
}

fn request(whole: &Whole) -> Value {
    let r = &whole.request;
    let name = format!("{} {}", r.direction.name(), units::bytes(r.len));
    let mut args = json!({
        "request": r.id, "path": r.path, "fd": r.fd, "device": r.device, "offset": r.offset, "length": r.len,
        "bytes": r.result.ok(), "errno": r.result.err(),
    });
    if let Some((route, reason)) = r.way {
        args["route"] = route.name().into();
        args["reason"] = names::reason(reason).into();
    }
    json!({
        "ph": "X", "cat": "request", "name": name, "pid": r.pid, "tid": r.tid,
        "ts": micros(r.start), "dur": micros(r.duration), "args": args,
    })
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

/// Until when each row of a route is busy.
#[derive(Default)]
struct Rows(HashMap<(u32, u8), Vec<u64>>);

impl Rows {
    /// The first row that is free when a piece starts, and whether it is a new one. Pieces come by their starts.
    fn place(&mut self, p: &Piece) -> (usize, bool) {
        let rows = self.0.entry((p.pid, p.route as u8)).or_default();
        let end = p.start.saturating_add(p.duration);
        match rows.iter().position(|busy| *busy <= p.start) {
            Some(row) => {
                rows[row] = end;
                (row, false)
            }
            None => {
                rows.push(end);
                (rows.len() - 1, true)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather::tests::{piece, request};
    use super::*;

    #[test]
    fn rows_never_overlap_and_everything_is_there() {
        let pieces = vec![piece(1, 1_000_000), piece(1, 1_100_000), piece(1, 1_200_000), piece(1, 1_300_000)];
        let all = [Whole { request: request(1), pieces }, Whole { request: request(2), pieces: vec![] }];
        let mut out = Vec::new();
        write(&mut out, &all, &HashMap::from([(7, "python3".to_owned())])).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let of = |cat: &str| events.iter().filter(|e| e["cat"] == cat).collect::<Vec<_>>();
        assert_eq!((of("request").len(), of("segment").len()), (2, 4));
        let mut rows: HashMap<u64, Vec<(f64, f64)>> = HashMap::new();
        for e in of("segment") {
            let start = e["ts"].as_f64().unwrap();
            rows.entry(e["tid"].as_u64().unwrap()).or_default().push((start, start + e["dur"].as_f64().unwrap()));
        }
        assert_eq!(rows.len(), 2, "three overlap in no more than two places");
        assert!(rows.values().all(|row| row.windows(2).all(|w| w[0].1 <= w[1].0)), "{rows:?}");
        let named = events.iter().filter(|e| e["ph"] == "M").count();
        assert_eq!(named, 3, "a process and two rows have names");
    }

    #[test]
    fn an_empty_trace_is_one() {
        let mut out = Vec::new();
        write(&mut out, &[], &HashMap::new()).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["traceEvents"], json!([]));
    }
}
