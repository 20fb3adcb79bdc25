//! A line of JSON for each request.

use serde_json::{Value, json};

use super::gather::CompleteRequest;
use crate::names;

/// The line.
pub fn line(whole: &CompleteRequest) -> anyhow::Result<String> {
    let r = &whole.request;
    let segments: Vec<Value> = match r.route_reason {
        // A small one is its own only piece.
        Some((route, reason)) => vec![json!({
            "route": route.name(),
            "reason": names::reason(reason),
            "offset": 0,
            "bytes": r.result.unwrap_or(0),
            "start_ns": r.start,
            "duration_ns": r.duration,
            "tid": r.tid,
        })],
        None => whole
            .pieces
            .iter()
            .map(|p| {
                json!({
                    "route": p.route.name(),
                    "reason": names::reason(p.reason),
                    "offset": p.offset,
                    "bytes": p.bytes,
                    "start_ns": p.start,
                    "duration_ns": p.duration,
                    "tid": p.tid,
                })
            })
            .collect(),
    };
    let value = json!({
        "pid": r.pid,
        "tid": r.tid,
        "id": r.id,
        "direction": r.direction.name(),
        "fd": r.fd,
        "path": r.path,
        "device": r.device,
        "offset": r.offset,
        "length": r.len,
        "bytes": r.result.ok(),
        "errno": r.result.err(),
        "start_ns": r.start,
        "duration_ns": r.duration,
        "segments": segments,
    });
    Ok(serde_json::to_string(&value)? + "\n")
}

#[cfg(test)]
mod tests {
    use spinio_plan::{Reason, Route};

    use super::super::gather::tests::{piece, request};
    use super::*;

    #[test]
    fn lines_can_be_read_again() {
        let whole = CompleteRequest { request: request(5), pieces: vec![piece(5, 10)] };
        let value: Value = serde_json::from_str(&line(&whole).unwrap()).unwrap();
        assert_eq!(
            (&value["path"], &value["bytes"], &value["errno"]),
            (&json!("/data/a \"b\""), &json!(3 << 20), &Value::Null)
        );
        assert_eq!(value["segments"][0]["reason"], "absent");
        let mut small = request(6);
        (small.route_reason, small.result) = (Some((Route::Copy, Reason::Small)), Err(5));
        let value: Value =
            serde_json::from_str(&line(&CompleteRequest { request: small, pieces: vec![] }).unwrap()).unwrap();
        assert_eq!((&value["errno"], &value["segments"][0]["route"]), (&json!(5), &json!("copy")));
    }
}
