//! Rules of memory that CPU programs share with a net: the words of granules, on both sides, and the packets that agree on it.

use super::checks::Check::{self, Cargo, Kernels, Models};
use super::{Mutant, hostile, quick, rule, unit};

const GRANULE: &str = "crates/ring/src/granule.rs";
const PEER: &str = "crates/ring/src/peer.rs";
const SOCKET: &str = "crates/net/src/socket.rs";
const HANDSHAKE: &str = "crates/net/src/handshake.rs";
const CHANNELS: &str = "crates/net/src/proxy/channels.rs";
const SHARED: &str = "crates/net/src/proxy/shared.rs";
const KERNEL_PEER: &str = "device/include/spinio/net/peer.h";
const KERNEL_ENDS: &str = "device/include/spinio/net/ends.h";

const fn program(name: &'static str) -> Check {
    Cargo("spinio-net", &["--test", "programs"], name)
}

pub(super) const RULES: &[Mutant] = &[
    quick(rule(
        "granule-watch",
        "the proxy looks at the words of a program after its watch is stored: a fence lies between",
        GRANULE,
        ["events.into());\n    fence(SeqCst);", "events.into());"],
        &[Models("program_that_has_sent_rings")],
    )),
    quick(rule(
        "granule-wants",
        "a program looks at the watch after its words are stored: a fence lies between",
        GRANULE,
        ["    fence(SeqCst);\n    words[END_WORDS + WATCH]", "    words[END_WORDS + WATCH]"],
        &[Models("program_that_has_sent_rings")],
    )),
    rule(
        "granule-generation",
        "a word of an earlier use of a granule says nothing",
        PEER,
        ["if mark.generation == generation { mark } else {", "if true { mark } else {"],
        &[unit("words_of_another_generation"), program("words_of_an_earlier_use")],
    ),
    rule(
        "granule-unread",
        "a program that has ended with unread bytes has broken the connection",
        GRANULE,
        ["let reset = if unread { RESET } else { 0 };", "let reset = if unread { 0 } else { 0 };"],
        &[unit("events_and_last_words")],
    ),
    rule(
        "program-tail",
        "what the kernel has sent fits the ring, or it is EPROTO",
        SOCKET,
        ["if there > shared.memory.size {", "if false {"],
        &[program("impossible_words_of_a_net")],
    ),
    rule(
        "program-consumed",
        "what the kernel has received fits the ring, or it is EPROTO",
        SOCKET,
        ["if used > shared.memory.size {", "if false {"],
        &[program("impossible_words_of_a_net")],
    ),
    rule(
        "program-room",
        "a program sends only where the kernel has taken the last bytes",
        SOCKET,
        ["Ok(Some((shared.memory.size - used) as usize))", "Ok(Some(shared.memory.size as usize))"],
        &[program("program_sends_only_where")],
    ),
    rule(
        "program-unread",
        "a close tells that bytes were not received",
        SOCKET,
        ["let reset = if unread { RESET } else { 0 };", "let reset = if unread { 0 } else { 0 };"],
        &[program("close_says_that_bytes")],
    ),
    rule(
        "program-seal",
        "a program maps only memory that cannot shrink",
        HANDSHAKE,
        ["|| !linux::cannot_shrink(file.0)", "|| false"],
        &[program("memory_that_can_shrink")],
    ),
    rule(
        "program-length",
        "a program maps only memory that is as long as it should be",
        HANDSHAKE,
        ["size < bytes as _", "size < 0"],
        &[program("memory_that_can_shrink")],
    ),
    rule(
        "granule-left-by-program",
        "a granule is used again only after the program has left",
        CHANNELS,
        ["!granule.1.kernel && !granule.1.program", "!granule.1.kernel"],
        &[hostile("memory_of_a_program_is_used_again")],
    ),
    rule(
        "granule-left-by-kernel",
        "a granule is used again only after the kernel has left",
        CHANNELS,
        ["!granule.1.kernel && !granule.1.program", "!granule.1.program"],
        &[hostile("memory_of_a_program_is_used_again")],
    ),
    rule(
        "granule-owner",
        "a granule is for one process until that has ended",
        CHANNELS,
        ["own.or_else(unused)", "own.or_else(unused).or_else(|| free().next())"],
        &[Kernels("net_shared")],
    ),
    rule(
        "granule-packet",
        "a packet that may not come now breaks the connection",
        SHARED,
        [
            "            _ => false,\n        }\n    }\n\n    /// The connection of a channel",
            "            _ => true,\n        }\n    }\n\n    /// The connection of a channel",
        ],
        &[Kernels("net_shared")],
    ),
    rule(
        "granule-anchor",
        "bytes that come through Linux break a connection over shared memory",
        SHARED,
        ["Ok(1..) => self.violation(index),", "Ok(1..) => {}"],
        &[Kernels("net_shared")],
    ),
    rule(
        "granule-last-words",
        "the proxy says what a process that was killed did not say",
        SHARED,
        ["                self.write_last_words(place);\n", ""],
        &[Kernels("net_shared")],
    ),
    // Streams whose other end is a socket of the same net, or a program over shared memory.
    rule(
        "peer-generation",
        "a word of an earlier use of the memory says nothing",
        KERNEL_ENDS,
        ["return is_of(word) ? word : first;", "return word ? word : first;"],
        &[Kernels("net_peer")],
    ),
    rule(
        "peer-tail",
        "what the other end has sent fits the ring, or it is EPROTO",
        KERNEL_PEER,
        ["        if (there > peer.size)\n", "        if (false)\n"],
        &[Kernels("net_shared")],
    ),
    rule(
        "peer-consumed",
        "what the other end has received fits the ring, or it is EPROTO",
        KERNEL_PEER,
        ["        if (used > peer.size)\n", "        if (false)\n"],
        &[Kernels("net_peer")],
    ),
];
