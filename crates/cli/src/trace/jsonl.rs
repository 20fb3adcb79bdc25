//! One line of JSON per request.

use serde_json::{Value, json};
use spinio_plan::Reason;

use super::gather::CompleteRequest;
use crate::renamed_keys;

/// The line.
pub fn line(whole: &CompleteRequest) -> anyhow::Result<String> {
    let r = &whole.request;
    let segments: Vec<Value> = match r.route_reason {
        // A small request has one segment: itself.
        Some((route, reason)) => vec![segment(
            reason,
            json!({
                "route": route.name(),
                "offset": 0,
                "bytes": r.result.unwrap_or(0),
                "start_ns": r.start,
                "duration_ns": r.duration,
                "tid": r.tid,
            }),
        )],
        None => whole
            .pieces
            .iter()
            .map(|p| {
                segment(
                    p.reason,
                    json!({
                        "route": p.route.name(),
                        "offset": p.offset,
                        "bytes": p.bytes,
                        "start_ns": p.start,
                        "duration_ns": p.duration,
                        "tid": p.tid,
                    }),
                )
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

fn segment(reason: Reason, mut value: Value) -> Value {
    renamed_keys::add_reason(&mut value, reason);
    value
}

#[cfg(test)]
mod tests {
    use spinio_plan::Route;

    use super::super::gather::tests::{piece, request};
    use super::*;

    #[test]
    fn json_lines_parse() {
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
        let mut pinned = request(7);
        pinned.route_reason = Some((Route::Dma, Reason::Pinned));
        let value: Value =
            serde_json::from_str(&line(&CompleteRequest { request: pinned, pieces: vec![] }).unwrap()).unwrap();
        let segment = &value["segments"][0];
        assert_eq!((&segment["reason"], &segment["reason_old"]), (&json!("pinned"), &json!("held")));
    }
}
