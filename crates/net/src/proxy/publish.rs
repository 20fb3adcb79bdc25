//! What `spinio net` shows: the sockets of the net as a text in JSON, in a file of the process (`spinio_stats`).
//!
//! ```text
//!   kernel ── waits for long, or has a span: its block, into a word of the socket and direction ──┐
//!   proxy ── states, transports, rings, calls that wait ──────────────────────────────────────────┴─ 4 times a second, if anything changed ──> file
//! ```
//!
//! The proxy does this in its own time: a text that takes long is made less often, so that it costs 1 part of 200 at most.
//! Where no directory is private, or `SPINIO_STATS` is set, there is no file.
//!
//! Known flaws: a wait begins for the tools when the proxy sees it first, up to a quarter of a second late. Of
//! sockets whose bytes do not go through Linux, bytes and groups that wait for the other end are not shown.

use std::fmt::Write;

use spinio_ring::layout::{Descriptor, event_words};
use spinio_ring::line::{CONNECTING, EOF, ERR};
use spinio_ring::wait::Waiter;
use spinio_ring::{Position, Word};
use spinio_sys::linux;
use spinio_sys::linux::socket::{self, AF_INET, AF_INET6, SocketAddress};

use super::Proxy;
use super::announcement::Announced;
use super::caller::Caller;
use super::channels::Shared;
use super::sockets::{DGRAM, SEQPACKET, STREAM, Socket, State};
use crate::NetAddress;
use crate::kept::Kept;

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
            "{{\"process\":{},\"device\":{},\"stopped\":{},\"ring_bytes\":{},\"connections\":{{",
            linux::getpid(),
            quoted(&self.publisher.device),
            self.stopped,
            self.sockets.ring_bytes,
        );
        let is_wanted = |name: &str| ["upgraded", "peer", "shared"].contains(&name) || name.starts_with("kept_by_");
        let fields = self.counters.stats().fields();
        for (at, (name, value)) in fields.iter().filter(|(name, _)| is_wanted(name)).enumerate() {
            let _ = write!(out, "{}\"{name}\":{value}", if at == 0 { "" } else { "," });
        }
        out += "},\"sockets\":[";
        let mut comma = "";
        for index in self.sockets.indices() {
            let descriptor = self.sockets.descriptor(index);
            let words = [0, 1].map(|direction: usize| self.memory.waits(index)[direction].load_acquire());
            let Some(socket) = self.sockets.at(index) else { continue };
            out += comma;
            comma = ",";
            let other = other_process(&self.shared, &self.announced, socket, descriptor);
            socket_text(&mut out, socket, descriptor, other, words, now);
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

/// The process at the other end of shared memory, and whether it is another net.
fn other_process(
    shared: &Shared,
    announced: &[Option<Announced>],
    socket: &Socket,
    descriptor: Descriptor,
) -> Option<(u32, bool)> {
    let asked = socket.meeting.announced.and_then(|number| announced.get(number as usize)?.as_ref());
    let came = || shared.channels.iter().flatten().find(|channel| channel.socket == Some(descriptor));
    match asked {
        Some(announced) => Some((announced.process, true)),
        None if socket.meeting.end.as_ref().is_some_and(|end| end.place.shared) => {
            came().map(|channel| (channel.process, channel.other_net))
        }
        None => None,
    }
}

/// How the bytes of a socket go, and why: a word, and a sentence. Of one that has no connection, nothing.
fn way_of(socket: &Socket, other: Option<(u32, bool)>) -> (&'static str, &'static str, &'static str) {
    let Some(end) = &socket.meeting.end else {
        let kept = match socket.state {
            State::Unconnected | State::Listening | State::Connecting => None,
            _ if socket.kind != STREAM => Some(Kept::Type),
            // What has met no other net has a plain socket at the other end.
            State::Connected | State::Upgraded | State::Failed => Some(socket.meeting.kept.unwrap_or(Kept::Plain)),
        };
        return ("kernel", kept.map_or("", Kept::word), kept.map_or("", Kept::sentence));
    };
    match (end.place.remote.is_some(), end.place.shared, other) {
        (true, ..) => ("peer", "net", "the kernel of another net, which stores into this device's memory"),
        (false, true, Some((_, false))) => ("shared", "program", "a program with spinio_socket_connect()"),
        (false, true, _) => (
            "shared",
            "pinned",
            "the kernel of another net; the two devices share no memory of theirs, or none was left",
        ),
        (false, false, _) => ("loopback", "inside", "both ends are in this net"),
    }
}

fn socket_text(
    out: &mut String,
    socket: &mut Socket,
    descriptor: Descriptor,
    other: Option<(u32, bool)>,
    words: [u64; 2],
    now: u64,
) {
    let fd = socket.raw_fd();
    let address = |name: fn(linux::Fd) -> Result<SocketAddress, spinio_sys::Errno>| {
        let name = fd.and_then(|fd| name(fd).ok());
        name.map_or_else(String::new, |name| text_of(name.bytes()))
    };
    let (transport, why, reason) = way_of(socket, other);
    let _ = write!(
        out,
        "{{\"socket\":{},\"type\":\"{}\",\"state\":\"{}\",\"local\":{},\"peer\":{},\"transport\":\"{transport}\",\
         \"why\":\"{why}\",\"reason\":\"{reason}\",\"peer_process\":{},\
         \"unread\":{},\"unsent\":{},\"ring_bytes\":{},\"set\":{},\"errno\":{},\"waits\":[",
        descriptor.number(),
        type_of(socket),
        state_of(socket),
        quoted(&address(socket::getsockname)),
        quoted(&address(socket::getpeername)),
        other.map_or(0, |(process, _)| process),
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
