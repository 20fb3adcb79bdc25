//! Rules of calls that leave something to later ones: send with MORE, connect that does not wait, accept with a time limit; and of
//! programs that poll.

use super::checks::Check::Kernels;
use super::{Mutant, rule};

const STREAM: &str = "device/include/spinio/net/stream.h";
const CONTROL: &str = "device/include/spinio/net/control.h";
const EVENT: &str = "device/include/spinio/net/event.h";
const POLL: &str = "device/include/spinio/net/poll.h";
const PROXY: &str = "crates/net/src/proxy/mod.rs";
const PROXY_CONNECT: &str = "crates/net/src/proxy/connect.rs";
const PROXY_CONTROL: &str = "crates/net/src/proxy/control.rs";
const PROXY_DOORBELLS: &str = "crates/net/src/proxy/doorbells.rs";
const PROXY_EVENTS: &str = "crates/net/src/proxy/events.rs";
const PROGRAM_POLL: &str = "crates/net/src/socket/poll.rs";
const PROXY_LIMITS: &str = "crates/net/src/proxy/time_limits.rs";

pub(super) const RULES: &[Mutant] = &[
    rule(
        "more-message",
        "bytes of a send with MORE are no short message, which is there at once",
        STREAM,
        ["room.value > 0 && locked.peer && !(flags & MORE);", "room.value > 0 && locked.peer;"],
        &[Kernels("net_more")],
    ),
    rule(
        "more-release",
        "what sends with MORE have left is sent before the program takes the socket",
        CONTROL,
        [
            "    if (group.leads() && !result)\n        result = detail::ring(net, layout::doorbell_send,",
            "    if (false)\n        result = detail::ring(net, layout::doorbell_send,",
        ],
        &[Kernels("net_more")],
    ),
    rule(
        "more-file",
        "so it is before a file",
        PROXY_DOORBELLS,
        ["        if shuts || request.call == Ok(Call::SendFile) {\n", "        if shuts {\n"],
        &[Kernels("net_more")],
    ),
    rule(
        "connect-room",
        "a socket whose connection is being made has no room",
        STREAM,
        ["        if (room && !connects) {\n", "        if (room) {\n"],
        &[Kernels("net_options")],
    ),
    rule(
        "connect-poll",
        "so poll does not say that it has",
        POLL,
        ["    if (errno_of_line == layout::connecting)\n        return false;\n", ""],
        &[Kernels("net_options")],
    ),
    rule(
        "connect-told",
        "an end that is connected later is told to its event set before a kernel has armed it",
        PROXY_CONNECT,
        ["        socket.tells_connected = socket.meeting.end.as_ref().is_some_and(|end| !end.place.shared);\n", ""],
        &[Kernels("net_options")],
    ),
    rule(
        "connect-end",
        "a kernel that arms such an end knows it",
        EVENT,
        [
            "            detail::find_late_end(net, s);\n        }\n        if (!result && load",
            "        }\n        if (!result && load",
        ],
        &[Kernels("net_options")],
    ),
    rule(
        "accept-limit",
        "an accept tells the proxy how long it waits",
        CONTROL,
        ["words[2] = time_left(deadline);", "words[2] = 0;"],
        &[Kernels("net_accept")],
    ),
    rule(
        "accept-mailbox",
        "that is also how long it waits for a mailbox",
        CONTROL,
        ["request.flags & DONTWAIT || is_after(deadline) ? -EAGAIN : 0;", "request.flags & DONTWAIT ? -EAGAIN : 0;"],
        &[Kernels("net_accept")],
    ),
    rule(
        "accept-own",
        "the limit of one call ends no other",
        PROXY_LIMITS,
        ["let is_late = |accept: &Accept| accept.deadline <= now;", "let is_late = |_: &Accept| true;"],
        &[Kernels("net_accept")],
    ),
    rule(
        "accept-first",
        "a connection that is there comes before a limit that has passed",
        PROXY_LIMITS,
        [
            "                self.accept_all(index, now);\n            }\n            let Some(socket)",
            "            }\n            let Some(socket)",
        ],
        &[Kernels("net_accept")],
    ),
    rule(
        "accept-wake",
        "the proxy sleeps until the first limit at most",
        PROXY,
        ["sleep.min(self.next_deadline.saturating_sub(now))", "sleep"],
        &[Kernels("net_accept")],
    ),
    rule(
        "accept-inherit",
        "a connection of TCP has the time limits of its listening socket",
        CONTROL,
        ["if (!(receive | send) || domain_of(from) == UNIX || find(net, s))", "if (true)"],
        &[Kernels("net_accept")],
    ),
    rule(
        "accept-room",
        "groups that wait for connections leave mailboxes to those that serve them",
        CONTROL,
        ["count -= count / 8;", "count -= 0;"],
        &[Kernels("net_connect")],
    ),
    rule(
        "connect-limit",
        "connect ends after its time limit, and goes on",
        PROXY_CONNECT,
        ["return self.limit(descriptor.index, deadline);", "return;"],
        &[Kernels("net_connect")],
    ),
    rule(
        "connect-packets",
        "a packet socket does not connect after its call",
        PROXY_CONNECT,
        [
            "if let Some(caller) = socket.connect.take().and_then(|connect| connect.caller) {",
            "if let Some(caller) = socket.connect.as_mut().and_then(|connect| connect.caller.take()) {",
        ],
        &[Kernels("net_connect")],
    ),
    rule(
        "event-once",
        "what is true of an end counts only until an event was made of it",
        PROXY_EVENTS,
        ["self.sockets.get(descriptor).is_some_and(|socket| socket.watch.is_armed())", "true"],
        &[Kernels("net_nets")],
    ),
    rule(
        "shut-datagrams",
        "datagrams whose sends have returned are sent before the direction ends",
        PROXY_CONTROL,
        ["let waits = socket.send_ring.pending() > 0 &&", "let waits = false &&"],
        &[Kernels("net_datagrams")],
    ),
    rule(
        "poll-anchor",
        "a program that polls hears of the end of the TCP or UNIX connection",
        PROGRAM_POLL,
        ["                        *anchor = shared.failure.look(descriptor.fd);\n", ""],
        &[Kernels("net_program_poll")],
    ),
    rule(
        "poll-hup",
        "it hears of a hangup once neither direction goes on",
        PROGRAM_POLL,
        ["look.level(memory.size(), socket.is_unix) & !HUP;", "look.level(memory.size(), socket.is_unix);"],
        &[Kernels("net_program_poll")],
    ),
];
