//! Rules of memory that CPU programs share with a net: the words of granules, on both sides, and the packets that agree on it.

use super::checks::Check::{self, Cargo, KernelRaces, Kernels, Models};
use super::{Mutant, hostile, quick, rule, unit};

const GRANULE: &str = "crates/ring/src/granule.rs";
const PEER: &str = "crates/ring/src/peer.rs";
const SOCKET: &str = "crates/net/src/socket.rs";
const DIRECTION: &str = "crates/net/src/socket/direction.rs";
const PROGRAM_SPAN: &str = "crates/net/src/socket/span.rs";
const MAPPED: &str = "crates/net/src/mapped_granule.rs";
const CHANNELS: &str = "crates/net/src/proxy/channels.rs";
const SHARED: &str = "crates/net/src/proxy/shared.rs";
const ENDS: &str = "crates/net/src/proxy/granule_ends.rs";
const RINGS: &str = "crates/net/src/proxy/rings.rs";
const DEVICE_MEMORY: &str = "crates/net/src/proxy/device_memory.rs";
const ANNOUNCED: &str = "crates/net/src/proxy/announced.rs";
const IMPORTS: &str = "crates/net/src/proxy/imports.rs";
const CONNECT: &str = "crates/net/src/proxy/connect.rs";
const LIFETIME: &str = "crates/net/src/proxy/lifetime.rs";
const KERNEL_PEER: &str = "device/include/spinio/net/peer.h";
const KERNEL_ENDS: &str = "device/include/spinio/net/ends.h";
const MESSAGE: &str = "crates/ring/src/message.rs";
const INTERLEAVINGS: &str = "crates/ring/src/interleavings.rs";
const KERNEL_MESSAGE: &str = "device/include/spinio/net/message.h";
const KERNEL_STREAM: &str = "device/include/spinio/net/stream.h";
const KERNEL_SPAN: &str = "device/include/spinio/net/span.h";
const KERNEL_EVENT: &str = "device/include/spinio/net/event.h";

const fn program(name: &'static str) -> Check {
    Cargo("spinio-net", &["--test", "programs"], name)
}

pub(super) const RULES: &[Mutant] = &[
    rule(
        "announce-own",
        "memory is offered for the connection of the socket that was announced, and for no other one",
        SHARED,
        ["|| connects())", "|| true)"],
        &[Cargo(
            "spinio-net",
            &["--test", "doors"],
            "connection_of_another_socket_than_the_announced_one_stays_with_linux",
        )],
    ),
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
        ["if there > shared.memory.size() {", "if false {"],
        &[program("impossible_words_of_a_net")],
    ),
    rule(
        "program-consumed",
        "what the kernel has received fits the ring, or it is EPROTO",
        SOCKET,
        ["if used > shared.memory.size() {", "if false {"],
        &[program("impossible_words_of_a_net")],
    ),
    rule(
        "program-room",
        "a program sends only where the kernel has taken the last bytes",
        SOCKET,
        ["Ok(Some((shared.memory.size() - used) as usize))", "Ok(Some(shared.memory.size() as usize))"],
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
        "a program or a net maps only memory that cannot shrink",
        MAPPED,
        ["|| !linux::cannot_shrink(file)", "|| false"],
        &[program("memory_that_can_shrink")],
    ),
    rule(
        "program-length",
        "a program or a net maps only memory that is as long as it should be",
        MAPPED,
        ["size < bytes {", "size < 1 {"],
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
            "            _ => false,\n        }\n    }\n\n    /// The other side may connect.",
            "            _ => true,\n        }\n    }\n\n    /// The other side may connect.",
        ],
        &[Kernels("net_shared")],
    ),
    rule(
        "granule-anchor",
        "bytes that come through Linux break a connection over shared memory",
        ENDS,
        ["Ok(1..) => self.violation(index),", "Ok(1..) => {}"],
        &[Kernels("net_shared")],
    ),
    rule(
        "granule-last-words",
        "the proxy says what a process that was killed did not say",
        ENDS,
        ["                self.write_last_words(place);\n", ""],
        &[Kernels("net_shared")],
    ),
    // Kernels of two nets.
    rule(
        "nets-go",
        "a kernel that connects to another net moves no byte before both have agreed",
        CONNECT,
        ["if errno == 0 && self.waits_for_go(index) {", "if false {"],
        &[Kernels("net_doors"), Kernels("net_nets")],
    ),
    rule(
        "nets-first",
        "streams of two nets begin at one position, or they share no memory",
        ANNOUNCED,
        ["file.filter(|_| fits && first == self.first)", "file.filter(|_| fits)"],
        &[Kernels("net_doors")],
    ),
    rule(
        "nets-one-connection",
        "memory of another net is for one connection at a time",
        IMPORTS,
        ["!import.used && import", "import"],
        &[Kernels("net_doors")],
    ),
    rule(
        "nets-packet",
        "a packet of another net that may not come breaks the connection",
        ANNOUNCED,
        ["(Stage::Running(_), _) => self.violation(index),", "(Stage::Running(_), _) => {}"],
        &[Kernels("net_doors")],
    ),
    rule(
        "nets-leave",
        "a socket that is closed tells the other net that it uses the memory no more",
        LIFETIME,
        ["            self.drop_announced(number);\n", ""],
        &[Kernels("net_doors")],
    ),
    rule(
        "nets-last-words",
        "the words of a process that was killed are written into its own end",
        ENDS,
        ["let theirs = granule::end(!place.second);", "let theirs = granule::end(place.second);"],
        &[Kernels("net_shared")],
    ),
    rule(
        "nets-look",
        "an armed socket that no doorbell tells of is looked at until it is due",
        ENDS,
        ["            self.looked_at.push(index);\n", ""],
        &[Kernels("net_nets")],
    ),
    rule(
        "nets-renew",
        "a name that was chosen for one address is not used for another one",
        CONNECT,
        ["            self.forget_announced(index);\n", "            self.end_announced(index);\n"],
        &[Kernels("net_nets")],
    ),
    // Device memory of two nets.
    rule(
        "remote-generation",
        "each use of device memory has a generation that no part of it had before",
        RINGS,
        ["(last < LAST_GENERATION).then(|| last + 1)", "(last < LAST_GENERATION).then_some(1)"],
        &[Kernels("net_doors")],
    ),
    rule(
        "remote-agreed",
        "bytes go through device memory only if both have mapped it",
        DEVICE_MEMORY,
        ["Packet::Go { peer: remote.is_some() }", "Packet::Go { peer: channel.near != Slot::None }"],
        &[Kernels("net_doors")],
    ),
    rule(
        "remote-not-offered",
        "a net that uses device memory which it was not offered has broken the connection",
        ANNOUNCED,
        ["if peer && place.remote.is_none() {", "if false {"],
        &[Kernels("net_doors")],
    ),
    rule(
        "remote-drains",
        "device memory is used again only after the kernel that stores into it has left",
        SHARED,
        ["let drains = ", "let drains = false && "],
        &[Kernels("net_doors")],
    ),
    rule(
        "remote-copy",
        "what a kernel stores into device memory of another net is said to the proxies too",
        KERNEL_ENDS,
        ["        if (my_copy)\n", "        if (false)\n"],
        &[Kernels("net_nets")],
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
        ["        if (there > (message ? layout::message_bytes : peer.size))\n", "        if (false)\n"],
        &[Kernels("net_shared")],
    ),
    rule(
        "peer-consumed",
        "what the other end has received fits the ring, or it is EPROTO",
        KERNEL_PEER,
        ["        if (used > peer.size)\n", "        if (false)\n"],
        &[Kernels("net_peer_events")],
    ),
    rule(
        "peer-exchange",
        "a watched word and its successor are exchanged at once: either the armed end sees the new one, or the other end that it is watched",
        PEER,
        [
            "        if at.compare_exchange(old, word) {\n            return old & WATCHED != 0;\n        }\n",
            "        at.store_release(word);\n        return old & WATCHED != 0;\n",
        ],
        &[Models("armed_end_is_told_of_a_byte")],
    ),
    rule(
        "peer-watched-arm",
        "an end that is armed says so in the other end's words",
        KERNEL_PEER,
        ["            or_device(&peer.theirs->tail, layout::end_watched);\n", ""],
        &[Kernels("net_peer_events")],
    ),
    rule(
        "peer-watched-send",
        "a send to a watched end tells it",
        KERNEL_PEER,
        ["    if (old & layout::end_watched)\n        tell_peer(net, s, locked.peer, IN);\n", "    (void)old;\n"],
        &[Kernels("net_peer_events")],
    ),
    rule(
        "peer-watched-later",
        "a writer that is not told yet stays watched",
        KERNEL_PEER,
        ["            or_device(&peer.mine->consumed, layout::end_watched);\n", "            ;\n"],
        &[Kernels("net_credit")],
    ),
    rule(
        "peer-looks-after-copy",
        "a send that relied on an earlier look learns of the other end's close before it publishes",
        KERNEL_PEER,
        [
            "    const int64_t room = room_of_peer(peer, locked, tail, locked.taken);\n    if (!room) {",
            "    const int64_t room = 1;\n    if (!room) {",
        ],
        &[Kernels("net_peer_events")],
    ),
    rule(
        "peer-untold-wait",
        "a reader that waits has told of all that it has received",
        KERNEL_PEER,
        [
            "            publish_position(net, s, consumed, 0);\n            untold = false;\n",
            "            untold = false;\n",
        ],
        &[Kernels("net_credit")],
    ),
    rule(
        "peer-untold-arm",
        "what was received before a socket is armed makes no event",
        KERNEL_EVENT,
        ["            detail::publish_received(net, s);\n            detail::find", "            detail::find"],
        &[Kernels("net_credit")],
    ),
    // Short messages.
    rule(
        "message-early",
        "a message that was taken before the proxy of its writer knows of it is no event",
        GRANULE,
        ["when(sent.position != consumed.position && !early,", "when(sent.position != consumed.position,"],
        &[unit("events_and_last_words")],
    ),
    quick(rule(
        "message-tag",
        "a word of a message that is of another one is waited for",
        MESSAGE,
        ["        if (word ^ tag(end)) >> TAG_SHIFT != 0 {", "        if word == 0 {"],
        &[unit("each_word_says_whether")],
    )),
    quick(rule(
        "message-clear",
        "the words of an earlier use of the memory are cleared before the first bytes",
        INTERLEAVINGS,
        ["                message::clear(&*words);\n", ""],
        &[Models("message_is_taken_from_its_words")],
    )),
    quick(rule(
        "message-answered",
        "a message is written only after the reader has taken all that was sent before",
        INTERLEAVINGS,
        [
            "                while Mark::now(ends[peer::CONSUMED].load_acquire(), 1, first).position != first.after(1) {",
            "                while false {",
        ],
        &[Models("message_is_taken_from_its_words")],
    )),
    quick(rule(
        "message-other-tag",
        "a message is not written if its words would have the tag of the last one",
        MESSAGE,
        ["    tag(end) != tag(last)\n", "    tag(end) | tag(last) != 0\n"],
        &[unit("words_of_last_message_pass_only"), Models("words_of_the_last_message_are_not_taken")],
    )),
    quick(rule(
        "message-flag",
        "the first tail of a message sends the reader to the words: the ring is not complete yet",
        INTERLEAVINGS,
        ["            if tail & (peer::MESSAGE | peer::CLOSED) == peer::MESSAGE {", "            if false {"],
        &[Models("message_is_taken_from_its_words")],
    )),
    rule(
        "message-clear-kernel",
        "a kernel clears them also if it has received before it sends",
        KERNEL_MESSAGE,
        [
            "    if (peer.direct() && tail == peer.first)\n",
            "    if (peer.direct() && tail == peer.first && !peer.is_of(locked.taken))\n",
        ],
        &[Kernels("net_message")],
    ),
    rule(
        "message-known",
        "a kernel writes the words of a message only if the other end has received all before it",
        KERNEL_MESSAGE,
        ["    return peer.direct() && known && other_tag", "    return peer.direct() && other_tag"],
        &[Kernels("net_message")],
    ),
    rule(
        "message-other-tag-kernel",
        "so it is by a kernel",
        KERNEL_MESSAGE,
        ["message_tag(tail + bytes) != message_tag(locked.sent)", "message_tag(tail + bytes) != 0"],
        &[Kernels("net_message")],
    ),
    rule(
        "message-last-end",
        "a kernel remembers where the last message ended",
        KERNEL_STREAM,
        [
            "                store_relaxed_device(&device_socket(net, s)->sent, (room.position + take) & layout::position_mask);\n",
            "",
        ],
        &[Kernels("net_message")],
    ),
    rule(
        "message-received-early",
        "the other end may have received a message before its send knows of it",
        KERNEL_STREAM,
        ["room.position + (room.message ? take : 0)", "room.position"],
        &[Kernels("net_message")],
    ),
    rule(
        "message-room",
        "what the other end has said with its bytes is not forgotten for what its word said before",
        KERNEL_PEER,
        ["    return is_behind ? ", "    return false ? "],
        &[Kernels("net_message")],
    ),
    // Spans.
    quick(rule(
        "span-stores",
        "a barrier lies between the stores of a group into a span and their publication",
        KERNEL_SPAN,
        [
            "    group.sync();\n    return int(share(group, group.leads() ? detail::end_reserve",
            "    return int(share(group, group.leads() ? detail::end_reserve",
        ],
        &[KernelRaces("net_spans")],
    )),
    rule(
        "span-loads",
        "a barrier lies between the loads of a group from a span and their publication",
        KERNEL_SPAN,
        [
            "    group.sync();\n    return int(share(group, group.leads() ? detail::end_borrow",
            "    return int(share(group, group.leads() ? detail::end_borrow",
        ],
        &[KernelRaces("net_spans")],
    ),
    rule(
        "span-size",
        "no more than the span is sent or received",
        KERNEL_SPAN,
        ["    if (!size || bytes > size)\n", "    if (!size)\n"],
        &[Kernels("net_spans")],
    ),
    rule(
        "program-span-lock",
        "while a program has a span no other call has its direction",
        DIRECTION,
        ["        while side.span > 0 {\n", "        while false {\n"],
        &[Kernels("net_spans")],
    ),
    rule(
        "program-span-size",
        "a program sends or receives no more than its span",
        DIRECTION,
        ["if bytes > side.span || side.span == 0 {", "if side.span == 0 {"],
        &[Kernels("net_spans")],
    ),
    rule(
        "program-span-ring",
        "a span of a program ends where the ring does",
        PROGRAM_SPAN,
        ["side.span = there.min(most).min(whole);", "side.span = there.min(most);"],
        &[Kernels("net_scripts")],
    ),
];
