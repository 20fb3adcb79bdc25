//! `spinio net`: the sockets that GPU kernels hold, as `ss` shows those of programs.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/spinio/4711.net ...   a text in JSON, locked by its process (crates/net/src/proxy/publish.rs)
//!      └─> a line for each socket, with the reason of its transport; what the reasons mean; what connections stayed with Linux for;
//!          a line for each group that has waited for longer than a second
//! ```
//!
//! No process is asked: a stopped one is shown too, as it was when it last wrote.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::time::Duration;

use clap::Args;
use comfy_table::Cell;
use serde_json::{Value, json};
use spinio_io::stats::{LONGEST_TEXT, pid_of, published_text};
use spinio_sys::linux;

use crate::color::{OutputStyle, TextRole};
use crate::exit::{self, Exit};
use crate::{format, output, processes, stat, table, table_dirs};

/// How long a group waits before it is shown.
const LONG_NS: u64 = 1_000_000_000;

/// What `spinio net` takes.
#[derive(Debug, Args)]
pub struct Net {
    /// The process; without it all that this user may see
    #[arg(value_parser = stat::pid)]
    pid: Option<u32>,
    /// Print JSON: a list of nets, each with its sockets and the groups that wait
    #[arg(long)]
    json: bool,
}

/// Runs it.
pub fn run(options: &Net) -> anyhow::Result<Exit> {
    let nets = list(options.pid);
    if let Some(pid) = options.pid.filter(|_| nets.is_empty()) {
        let why = "it has no net, ended, belongs to another user, or was started with SPINIO_STATS";
        return Err(exit::error(Exit::Failed, format!("No sockets of kernels in process {pid}: {why}")));
    }
    let text = match options.json {
        true => format!("{:#}\n", Value::Array(nets)),
        false => render(&OutputStyle::stdout(), &nets),
    };
    output::print(&text)?;
    Ok(Exit::Ok)
}

/// The nets of living processes, in the order of these.
fn list(pid: Option<u32>) -> Vec<Value> {
    let now = linux::monotonic_ns();
    let mut found = Vec::new();
    let wanted = |name: &str| pid_of(name, "net").is_some_and(|of| pid.is_none_or(|pid| pid == of));
    table_dirs::visit(wanted, |table| {
        if let Some(net) = read(&table.file)
            && table.may_speak_for(u32::try_from(number(&net["process"])).unwrap_or(0))
        {
            found.push((table.path, with_seconds(net, now)));
        }
    });
    found.sort_by_cached_key(|(path, net)| (net["process"].as_u64(), path.clone()));
    found.into_iter().map(|(_, net)| net).collect()
}

/// The net of a file, if its process runs.
fn read(file: &File) -> Option<Value> {
    // It may be written just now, or not yet have a text.
    for _ in 0..100 {
        if !processes::is_locked(file) {
            return None;
        }
        if let Some(net) = parse(file) {
            return Some(net);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

fn parse(mut file: &File) -> Option<Value> {
    use std::io::{Seek, SeekFrom};
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).ok()?;
    file.take(LONGEST_TEXT as u64 + 64).read_to_end(&mut bytes).ok()?;
    serde_json::from_str(published_text(&bytes)?).ok()
}

/// With `seconds` of each wait.
fn with_seconds(mut net: Value, now: u64) -> Value {
    for of in ["sockets", "sets"] {
        for owner in net[of].as_array_mut().into_iter().flatten() {
            for wait in owner["waits"].as_array_mut().into_iter().flatten() {
                let since = wait["since_monotonic_ns"].as_u64().unwrap_or(now);
                wait["seconds"] = json!(now.saturating_sub(since) as f64 / 1e9);
            }
        }
    }
    net
}

fn render(paint: &OutputStyle, nets: &[Value]) -> String {
    let mut text = String::new();
    for net in nets {
        let gap = if text.is_empty() { "" } else { "\n" };
        let stopped = if net["stopped"] == true { ", stopped" } else { "" };
        let title = format!("process {}, {}{stopped}", number(&net["process"]), word(&net["device"]));
        let _ = writeln!(text, "{gap}{}", paint.text(TextRole::Head, &title));
        let sockets = net["sockets"].as_array().map_or(&[][..], Vec::as_slice);
        if sockets.is_empty() {
            text += "no sockets\n";
        } else {
            let _ = writeln!(text, "{}", table::text(&sockets_table(paint, sockets)));
        }
        text += &reasons(sockets);
        text += &kept(&net["connections"]);
        for set in net["sets"].as_array().into_iter().flatten() {
            let name = format!("event set {}", number(&set["set"]));
            text += &waits(&set["waits"], &name);
        }
        for socket in sockets {
            text += &waits(&socket["waits"], &format!("socket {}", number(&socket["socket"])));
        }
    }
    if nets.is_empty() {
        text += "no process has a net: kernels call sockets after spinio_net_open() (docs/gpunet.md)\n";
    }
    text
}

fn sockets_table(paint: &OutputStyle, sockets: &[Value]) -> comfy_table::Table {
    let head = ["socket", "type", "state", "unread", "unsent", "of", "set", "via", "why", "local", "peer"];
    let mut table = table::new(paint, &head);
    for socket in sockets {
        let bytes = |key: &str| format::bytes(number(&socket[key]));
        let set = number(&socket["set"]);
        table.add_row([
            Cell::new(number(&socket["socket"])),
            Cell::new(word(&socket["type"])),
            Cell::new(word(&socket["state"])),
            Cell::new(bytes("unread")),
            Cell::new(bytes("unsent")),
            Cell::new(bytes("ring_bytes")),
            Cell::new(if set == 0 { "-".to_owned() } else { set.to_string() }),
            Cell::new(word(&socket["transport"])),
            Cell::new(why(socket)),
            Cell::new(or_star(word(&socket["local"]))),
            Cell::new(or_star(word(&socket["peer"]))),
        ]);
    }
    table::align_columns(&mut table, &[0, 3, 4, 5, 6]);
    table
}

/// The reason of a socket's transport in a word, and the process at the other end of shared memory.
fn why(socket: &Value) -> String {
    match (socket["why"].as_str(), number(&socket["peer_process"])) {
        (None | Some(""), _) => "-".to_owned(),
        (Some(_), 0) => word(&socket["why"]),
        (Some(_), process) => format!("{} {process}", word(&socket["why"])),
    }
}

/// What the words of the column mean, those that are there.
fn reasons(sockets: &[Value]) -> String {
    let mut words = BTreeMap::new();
    for socket in sockets.iter().filter(|socket| socket["why"].as_str().is_some_and(|why| !why.is_empty())) {
        words.insert(word(&socket["why"]), word(&socket["reason"]));
    }
    words.iter().fold(String::new(), |text, (why, reason)| text + &format!("  {why}: {reason}\n"))
}

/// How many connections could have left Linux and did not, by reason, since the net was opened.
fn kept(connections: &Value) -> String {
    let counts = connections.as_object().into_iter().flatten();
    let counts = counts.filter_map(|(name, count)| Some((name.strip_prefix("kept_by_")?, number(count))));
    let counts: Vec<_> = counts.filter(|(_, count)| *count > 0).collect();
    if counts.is_empty() {
        return String::new();
    }
    let listed: Vec<_> = counts.iter().map(|(why, count)| format!("{} {count}", format::printable(why))).collect();
    format!("  stayed with Linux since the net was opened: {}\n", listed.join(", "))
}

/// A line for each group that has waited for long.
fn waits(waits: &Value, what: &str) -> String {
    let mut text = String::new();
    for wait in waits.as_array().into_iter().flatten() {
        let nanos = wait["seconds"].as_f64().unwrap_or(0.0) * 1e9;
        if nanos >= LONG_NS as f64 {
            let thread = match number(&wait["thread"]) {
                0 => String::new(),
                thread => format!(", thread {thread},"),
            };
            let (call, block, time) = (word(&wait["for"]), number(&wait["block"]), format::time(nanos));
            let _ = match &*call {
                // No other call of this direction goes on meanwhile.
                "reserve" | "borrow" => {
                    writeln!(text, "  block {block}{thread} has kept what {call} gave it of {what} for {time}")
                }
                _ => writeln!(text, "  block {block}{thread} has waited {time} in {call} of {what}"),
            };
        }
    }
    text
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// Names of sockets are other programs'.
fn word(value: &Value) -> String {
    format::printable(value.as_str().unwrap_or("?"))
}

fn or_star(text: String) -> String {
    if text.is_empty() { "*".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_and_long_waits_are_shown_and_short_ones_are_not() {
        let wait = |call: &str, thread: u32, since: u64| json!({"for": call, "block": 3, "thread": thread, "since_monotonic_ns": since});
        let net = json!({
            "process": 7, "device": "emulated:0", "stopped": false,
            "sockets": [
                {"socket": 65536, "type": "tcp", "state": "ESTAB", "local": "127.0.0.1:80", "peer": "\u{1b}[2J",
                 "transport": "kernel", "why": "plain", "reason": "a plain socket", "peer_process": 0, "unread": 5, "unsent": 0, "ring_bytes": 65536, "set": 0, "errno": 0,
                 "waits": [wait("send", 64, 1_000_000_000), wait("recv", 0, 9_500_000_000), wait("reserve", 0, 2_000_000_000)]},
                {"socket": 65537, "type": "u_str", "state": "ESTAB", "local": "", "peer": "", "transport": "shared", "why": "program",
                 "reason": "a program", "peer_process": 4711, "unread": 0, "unsent": 0, "ring_bytes": 0, "set": 0, "errno": 0, "waits": []},
                {"socket": 65538, "type": "tcp", "state": "LISTEN", "local": "", "peer": "", "transport": "kernel", "why": "", "reason": "",
                 "peer_process": 0, "unread": 0, "unsent": 0, "ring_bytes": 0, "set": 0, "errno": 0, "waits": []},
            ],
            "connections": {"upgraded": 4, "kept_by_memory": 3, "kept_by_name": 0, "kept_by_time": 1},
            "sets": [{"set": 1, "waits": [wait("wait", 0, 0)]}],
        });
        let text = render(&OutputStyle { colour: false, width: 120 }, &[with_seconds(net, 10_000_000_000)]);
        assert!(text.starts_with("process 7, emulated:0\n"), "{text}");
        assert!(text.contains("127.0.0.1:80") && text.contains("?[2J") && !text.contains('\u{1b}'), "{text}");
        assert!(
            text.contains("  block 3, thread 64, has waited 9") && text.contains("in send of socket 65536"),
            "{text}"
        );
        assert!(text.contains("has kept what reserve gave it of socket 65536 for 8"), "{text}");
        assert!(text.contains("in wait of event set 1") && !text.contains("in recv"), "{text}");
        let row = |start: &str| text.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
        assert!(row("65536").contains(" plain ") && row("65537").contains(" program 4711 "), "{text}");
        assert!(row("65538").contains(" kernel   - "), "a socket that listens has no reason: {text}");
        assert_eq!((row("plain:"), row("program:")), ("  plain: a plain socket", "  program: a program"));
        assert!(text.contains("  stayed with Linux since the net was opened: memory 3, time 1\n"), "{text}");
        assert!(render(&OutputStyle { colour: false, width: 80 }, &[]).starts_with("no process has a net"));
    }
}
