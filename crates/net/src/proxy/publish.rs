//! What `spinio net` shows: the sockets of the net as a text in JSON, in a file of the process (`spinio_stats`).
//!
//! ```text
//!   kernel ── waits for long, or has a span: its block, into a word of the socket and direction ──┐
//!   proxy ── states, addresses, rings, calls that wait ───────────────────────────────────────────┴─ 4 times a second, if anything changed ──> file
//! ```
//!
//! The proxy does this in its own time: a text that takes long is made less often, so that it costs 1 part of 200 at most.
//! Where no directory is private, or `SPINIO_STATS` is set, there is no file.
//!
//! Known flaws: a wait begins for the tools when the proxy sees it first, up to a quarter of a second late. Groups that wait for the
//! other end of a connection inside the net are not shown.

use std::fmt::Write;

use spinio_ring::layout::{Descriptor, event_words};
use spinio_ring::line::{CONNECTING, EOF, ERR};
use spinio_ring::wait::Waiter;
use spinio_ring::{Position, Word};
use spinio_sys::linux;
use spinio_sys::linux::socket::{self, AF_INET, AF_INET6, SocketAddress};

use super::Proxy;
use super::caller::Caller;
use super::sockets::{DGRAM, SEQPACKET, Socket, State};
use crate::NetAddress;

/// Between two texts, at least.
const PUBLISH_NS: u64 = 250_000_000;
/// A text takes at most this part of the time.
const PART: u64 = 200;

impl Proxy {
    /// Publishes the sockets, if it is time.
    pub(super) fn publish(&mut self, now: u64) {
        if now < self.publisher.due || self.publisher.file.is_none() {
            return;
        }
        let text = self.describe(now);
        if text != self.publisher.text {
            if let Some(file) = &mut self.publisher.file {
                let _ = file.write(&text);
            }
            self.publisher.text = text;
        }
        let took = linux::monotonic_ns().saturating_sub(now);
        self.publisher.due = now + PUBLISH_NS.max(took * PART);
    }

    fn describe(&mut self, now: u64) -> String {
        let mut out = format!(
            "{{\"process\":{},\"device\":{},\"stopped\":{},\"ring_bytes\":{},\"sockets\":[",
            linux::getpid(),
            quoted(&self.publisher.device),
            self.stopped,
            self.sockets.ring_bytes,
        );
        let mut comma = "";
        for index in self.sockets.indices() {
            let descriptor = self.sockets.descriptor(index);
            let words = [0, 1].map(|direction: usize| self.memory.waits(index)[direction].load_acquire());
            let Some(socket) = self.sockets.at(index) else { continue };
            out += comma;
            comma = ",";
            socket_text(&mut out, socket, descriptor, words, now);
        }
        out += "],\"sets\":[";
        comma = "";
        for number in 0..self.sets.count() {
            let word = self.memory.event_words(number.into())[event_words::WAITS].load_acquire();
            let waits = self.publisher.sets[usize::from(number)].look(word, Position::of(0), now);
            let _ = write!(out, "{comma}{{\"set\":{},\"waits\":[", number + 1);
            if let Some((waiter, since)) = waits {
                wait_text(&mut out, "wait", waiter, since);
            }
            out += "]}";
            comma = ",";
        }
        out += "]}\n";
        out
    }
}

fn socket_text(out: &mut String, socket: &mut Socket, descriptor: Descriptor, words: [u64; 2], now: u64) {
    let fd = socket.raw_fd();
    let address = |name: fn(linux::Fd) -> Result<SocketAddress, spinio_sys::Errno>| {
        let name = fd.and_then(|fd| name(fd).ok());
        name.map_or_else(String::new, |name| text_of(name.bytes()))
    };
    let _ = write!(
        out,
        "{{\"socket\":{},\"type\":\"{}\",\"state\":\"{}\",\"local\":{},\"peer\":{},\"transport\":\"{}\",\
         \"unread\":{},\"unsent\":{},\"ring_bytes\":{},\"set\":{},\"errno\":{},\"waits\":[",
        descriptor.number(),
        type_of(socket),
        state_of(socket),
        quoted(&address(socket::getsockname)),
        quoted(&address(socket::getpeername)),
        match &socket.meeting.end {
            Some(end) if end.place.remote.is_some() => "peer",
            Some(end) if end.place.shared => "shared",
            Some(_) => "loopback",
            None => "kernel",
        },
        if socket.rings.is_some() { socket.receive_ring.unread() } else { 0 },
        if socket.rings.is_some() { socket.send_ring.pending() } else { 0 },
        if socket.rings.is_some() { socket.receive_ring.size() } else { 0 },
        socket.watch.set,
        if socket.errno == CONNECTING { 0 } else { socket.errno },
    );
    let begin = out.len();
    let mut put = |call: &str, waiter: Waiter, since: u64| {
        if out.len() > begin {
            out.push(',');
        }
        wait_text(out, call, waiter, since);
    };
    for ((seen, word), call) in socket.waits.iter_mut().zip(words).zip(["borrow", "reserve"]) {
        if let Some((waiter, since)) = seen.look_for_span(word, now) {
            put(call, waiter, since);
        }
    }
    if socket.state == State::Upgraded {
        // Its positions are in device memory.
        *out += "]}";
        return;
    }
    let receives = socket.waits[0].look(words[0], socket.receive_ring.received(), now);
    let may_receive = socket.receive_ring.unread() == 0 && socket.flags & (EOF | ERR) == 0;
    if let Some((waiter, since)) = receives.filter(|_| may_receive) {
        put("recv", waiter, since);
    }
    let sends = socket.waits[1].look(words[1], socket.send_ring.tail(), now);
    if let Some((waiter, since)) = sends.filter(|_| socket.send_ring.pending() > 0 && socket.errno == 0) {
        put("send", waiter, since);
    }
    let accepts = socket.accepts.iter().map(|accept| ("accept", &accept.caller));
    let connects = socket.connect.iter().filter_map(|connect| Some(("connect", connect.caller.as_ref()?)));
    for (call, caller) in accepts.chain(connects) {
        if let Caller::Mailbox { block, since, .. } = caller {
            put(call, Waiter { block: *block, thread: 0 }, *since);
        }
    }
    *out += "]}";
}

fn wait_text(out: &mut String, call: &str, waiter: Waiter, since: u64) {
    let Waiter { block, thread } = waiter;
    let _ = write!(out, "{{\"for\":\"{call}\",\"block\":{block},\"thread\":{thread},\"since_monotonic_ns\":{since}}}");
}

/// As `ss` calls it.
fn type_of(socket: &Socket) -> &'static str {
    match (socket.domain, socket.kind) {
        (AF_INET | AF_INET6, DGRAM) => "udp",
        (AF_INET | AF_INET6, _) => "tcp",
        (_, DGRAM) => "u_dgr",
        (_, SEQPACKET) => "u_seq",
        _ => "u_str",
    }
}

/// As `ss` calls it.
fn state_of(socket: &Socket) -> &'static str {
    match socket.state {
        _ if socket.closing.is_some() => "CLOSING",
        State::Unconnected => "UNCONN",
        State::Listening => "LISTEN",
        State::Connecting => "SYN-SENT",
        State::Connected if socket.kind == DGRAM => "UNCONN",
        State::Connected | State::Upgraded => "ESTAB",
        State::Failed => "FAILED",
    }
}

/// Without the scheme of streams, which the type tells.
fn text_of(address: &[u8]) -> String {
    if address.len() <= 2 {
        return String::new();
    }
    let text = NetAddress::of(address).to_string();
    ["tcp://", "unix://", "unix:"].iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(&text).to_owned()
}

/// As a string of JSON.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_quoted_as_json_wants_it() {
        assert_eq!(quoted("a \"b\" \\ \n\u{e9}"), "\"a \\\"b\\\" \\\\ \\u000a\u{e9}\"");
        assert_eq!(text_of(NetAddress::parse("tcp://[::1]:8").unwrap().bytes()), "[::1]:8");
        assert_eq!(text_of(NetAddress::parse("unix:///tmp/a").unwrap().bytes()), "/tmp/a");
    }
}
