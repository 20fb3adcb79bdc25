//! Rules of the kernels' side: device/include/spinio/net.

use super::checks::Check::{Races, Rules};
use super::{Mutant, quick, rule};

const GROUP: &str = "device/include/spinio/net/group.h";
const STREAM: &str = "device/include/spinio/net/stream.h";
const LINE: &str = "device/include/spinio/net/line.h";
const DOORBELL: &str = "device/include/spinio/net/doorbell.h";
const EVENT: &str = "device/include/spinio/net/event.h";
const CONTROL: &str = "device/include/spinio/net/control.h";
const DATAGRAM: &str = "device/include/spinio/net/datagram.h";

pub(super) const RULES: &[Mutant] = &[
    rule(
        "share-first",
        "a barrier lies between what the leader tells and its readers",
        GROUP,
        [
            "            message = outcome.message;\n        }\n        __syncthreads();\n",
            "            message = outcome.message;\n        }\n",
        ],
        &[Races("source")],
    ),
    rule(
        "share-second",
        "what the leader tells next is stored after all have read the last",
        GROUP,
        ["        // The next share may begin only after all have read.\n        __syncthreads();\n", ""],
        // Of two calls without a barrier of their own: those for bytes have one.
        &[Races("calls")],
    ),
    rule(
        "share-warp",
        "what the leader of a warp has seen is seen by all lanes: shuffles do not order memory",
        GROUP,
        [
            "        // Shuffles do not order memory: what the leader has seen is seen by all after this.\n        __syncwarp();\n",
            "",
        ],
        &[Races("source")],
    ),
    rule(
        "share-tile",
        "so is what the leader of a tile has seen, by the lanes of the tile",
        GROUP,
        ["        // As in a warp.\n        lanes.sync();\n", ""],
        &[Races("source")],
    ),
    quick(rule(
        "consumed-after-copies",
        "a barrier lies between the copies out of the ring and the consumed position",
        STREAM,
        [
            "there.position, to + done, take, true);\n            group.sync();\n",
            "there.position, to + done, take, true);\n",
        ],
        &[Races("sink")],
    )),
    quick(rule(
        "consumed-release",
        "the consumed position is stored with release order",
        STREAM,
        ["store_published(host_line(net, s), consumed", "store_relaxed_device(host_line(net, s), consumed"],
        &[Races("sink")],
    )),
    rule(
        "received-acquire",
        "the received position is loaded with acquire order",
        STREAM,
        [
            "    uint64_t word = load_acquire_system(device_line(net, s));\n    return {arrived",
            "    uint64_t word = load_relaxed_device(device_line(net, s));\n    return {arrived",
        ],
        &[Races("sink")],
    ),
    rule(
        "sent-acquire",
        "the sent position is loaded with acquire order before its bytes are overwritten",
        STREAM,
        [
            "        const uint64_t word = load_acquire_system(device_line(net, s) + 1), failed",
            "        const uint64_t word = load_relaxed_device(device_line(net, s) + 1), failed",
        ],
        &[Races("source")],
    ),
    quick(rule(
        "send-after-copies",
        "a barrier lies between the copies into the ring and the doorbell",
        STREAM,
        [
            "room.position, from + done, take, false);\n        group.sync();\n",
            "room.position, from + done, take, false);\n",
        ],
        &[Races("source")],
    )),
    rule(
        "send-room",
        "a new socket has no room before it has seen its line",
        LINE,
        ["socket->sent = (first - ring_size(socket->send_ring)) & layout::position_mask;", "socket->sent = first;"],
        &[Rules("words")],
    ),
    rule(
        "send-position",
        "an impossible sent position is EPROTO",
        STREAM,
        ["        if (room > size)\n            return -EPROTO;\n", ""],
        &[Rules("words")],
    ),
    rule(
        "send-half",
        "a send takes half of the ring at most",
        STREAM,
        ["            take = ring.size / 2;\n", "            take = ring.size;\n"],
        &[Rules("whole")],
    ),
    rule(
        "received-position",
        "an impossible received position is EPROTO",
        STREAM,
        ["    if (there > size)\n        return -EPROTO;\n", ""],
        &[Rules("words")],
    ),
    rule(
        "received-before-error",
        "bytes that have arrived come before an error",
        STREAM,
        [
            "    if (there)\n        return int64_t(there);\n    if (word & layout::flag_err)\n        return has_failed;\n",
            "    if (word & layout::flag_err)\n        return has_failed;\n    if (there)\n        return int64_t(there);\n",
        ],
        &[Rules("words")],
    ),
    rule(
        "credit-if-full",
        "a credit is rung for a proxy that waits for room",
        STREAM,
        [
            "    if (full)\n        (void)ring(net, layout::doorbell_credit",
            "    if (full && consumed == ~uint64_t(0))\n        (void)ring(net, layout::doorbell_credit",
        ],
        &[Rules("words")],
    ),
    rule(
        "credit-only-if-full",
        "no credit is rung for a proxy that does not wait",
        STREAM,
        [
            "    if (full)\n        (void)ring(net, layout::doorbell_credit",
            "    if (full || consumed)\n        (void)ring(net, layout::doorbell_credit",
        ],
        &[Rules("words")],
    ),
    rule(
        "lock",
        "one group at a time uses a direction of a socket",
        LINE,
        [
            "return lock >> layout::position_bits == epoch_of(s);",
            "return (lock & ~locked_bit) >> layout::position_bits == epoch_of(s);",
        ],
        &[Rules("lines")],
    ),
    rule(
        "lock-closed",
        "a call that waits for a lock ends once the descriptor is closed",
        LINE,
        [
            "        if (int failed = find(net, s))\n            return {failed, 0};\n",
            "        if (int failed = polls == 1 ? find(net, s) : 0)\n            return {failed, 0};\n",
        ],
        &[Rules("lines")],
    ),
    quick(rule(
        "epoch",
        "a descriptor of another epoch is EBADF",
        LINE,
        [
            "        if (load_acquire_system(record + layout::record_state) != open_state(s))\n            return -EBADF;\n",
            "",
        ],
        &[Rules("lines")],
    )),
    rule(
        "fill-once",
        "one group fills in a new socket, and the others wait until it has",
        LINE,
        [
            "        if (compare_exchange_device(&socket->state, state, filling) != state)\n            continue;\n",
            "        (void)filling;\n",
        ],
        &[Races("lines")],
    ),
    rule(
        "fill-release",
        "a new socket is open for other groups after it was filled in",
        LINE,
        [
            "        store_release_device(&socket->state, open_state(s));\n        store_release_device(&socket->receive_lock",
            "        store_relaxed_device(&socket->state, open_state(s));\n        store_release_device(&socket->receive_lock",
        ],
        &[Races("lines")],
    ),
    rule(
        "stop",
        "a wait looks at the stop word",
        LINE,
        ["        if (stopped(net))\n            return -ESHUTDOWN;\n        return is_late", "        return is_late"],
        &[Rules("words")],
    ),
    quick(rule(
        "entry-release",
        "the words of a doorbell are stored after what it is about",
        DOORBELL,
        [
            "    emulation::count_release();\n#endif\n}\n\n__device__ inline void store_published(uint64_t *at, uint64_t value)\n{\n#if defined(__CUDACC__)\n    asm volatile(\"st.relaxed.sys.global.u64 [%0], %1;\" ::\"l\"(__cvta_generic_to_global(at)), \"l\"((unsigned long long)value) : \"memory\");\n#else\n    __atomic_store_n(at, value, __ATOMIC_RELEASE);",
            "    emulation::count_release();\n#endif\n}\n\n__device__ inline void store_published(uint64_t *at, uint64_t value)\n{\n#if defined(__CUDACC__)\n    asm volatile(\"st.relaxed.sys.global.u64 [%0], %1;\" ::\"l\"(__cvta_generic_to_global(at)), \"l\"((unsigned long long)value) : \"memory\");\n#else\n    __atomic_store_n(at, value, __ATOMIC_RELAXED);",
        ],
        &[Races("source")],
    )),
    rule(
        "fence",
        "a doorbell for bytes in a ring has one fence",
        DOORBELL,
        ["    publish();\n    return enter(", "    return enter("],
        &[Rules("claims")],
    ),
    rule(
        "claim",
        "a place of the doorbell queue is claimed by compare-and-swap",
        DOORBELL,
        [
            "        if (compare_exchange_relaxed_device(tail, ticket, ticket + 1) != ticket)\n            continue;\n",
            "        store_release_device(tail, ticket + 1);\n",
        ],
        &[Rules("claims"), Races("claims")],
    ),
    quick(rule(
        "refuse",
        "a full doorbell queue refuses",
        DOORBELL,
        [
            "            if (ticket - head >= layout::doorbells) {",
            "            if (ticket - head > layout::doorbells) {",
        ],
        &[Rules("claims")],
    )),
    rule(
        "lap",
        "each round of the doorbell queue has the other lap",
        DOORBELL,
        [
            "ticket / layout::doorbells % 2 ? 0 : layout::lap_bit",
            "ticket / layout::doorbells % 2 ? layout::lap_bit : layout::lap_bit",
        ],
        &[Rules("claims")],
    ),
    quick(rule(
        "event-claim-kernel",
        "an event is claimed by compare-and-swap, after it was read",
        EVENT,
        [
            "        if (compare_exchange_device(&set->head, head, head + there) != head)\n            continue;\n",
            "        store_release_device(&set->head, head + there);\n",
        ],
        &[Rules("events"), Races("events")],
    )),
    rule(
        "event-lap-kernel",
        "an event counts once its lap is of this round",
        EVENT,
        ["        if ((e0 & layout::lap_bit) != lap)", "        if (!e0 && lap)"],
        &[Rules("events")],
    ),
    rule(
        "event-acquire",
        "the first word of an event is loaded with acquire order",
        EVENT,
        ["uint64_t e0 = load_acquire_system(entry), lap", "uint64_t e0 = load_relaxed_device(entry), lap"],
        &[Races("events")],
    ),
    rule(
        "event-tail",
        "the copies of events are published with release order",
        EVENT,
        ["        store_release_device(&set->tail, tail);", "        store_relaxed_device(&set->tail, tail);"],
        &[Races("events")],
    ),
    rule(
        "event-lock-kernel",
        "one group at a time reads host memory",
        EVENT,
        [
            "locked = locked || compare_exchange_device(&set->lock, 0, 1) == 0;",
            "locked = locked || compare_exchange_device(&set->lock, 0, 1) <= 1;",
        ],
        &[Races("events")],
    ),
    rule(
        "event-said",
        "the proxy learns of room in quarters of the event ring",
        EVENT,
        [
            "        store_release_system(event_words(net, number) + layout::event_taken, tail);",
            "        store_release_system(event_words(net, number) + layout::event_taken, tail - 1);",
        ],
        &[Rules("room")],
    ),
    rule(
        "event-closed",
        "events of closed sockets are left out",
        EVENT,
        ["            if (find(net, ready[i].s))\n                continue;\n", ""],
        &[Rules("events")],
    ),
    rule(
        "rearm-after-receive",
        "a barrier lies between what the group has done and the doorbell that arms the socket",
        EVENT,
        ["    // What the group has received before has to be consumed for the proxy too.\n    group.sync();\n", ""],
        &[Races("rearm")],
    ),
    rule(
        "close-position",
        "a close says how far was sent",
        CONTROL,
        [
            "detail::position_of(&detail::device_socket(net, s)->send_lock));\n    }\n    return int(share(group, result));",
            "0);\n    }\n    return int(share(group, result));",
        ],
        &[Rules("close")],
    ),
    rule(
        "shutdown-position",
        "a shutdown says how far was sent",
        CONTROL,
        ["ended.failed ? 0 : ended.position;", "0;"],
        &[Rules("close")],
    ),
    rule(
        "mailbox-claim",
        "a mailbox has one call at a time",
        CONTROL,
        [
            "        if (compare_exchange_device(claims + mailbox * 2, 0, 1) == 0)",
            "        if (compare_exchange_device(claims + mailbox * 2, 0, 1) <= 1)",
        ],
        &[Races("calls")],
    ),
    rule(
        "mailbox-release",
        "a mailbox is given back with release order",
        CONTROL,
        ["    store_release_device(claims + mailbox * 2, 0);", "    store_relaxed_device(claims + mailbox * 2, 0);"],
        &[Races("calls")],
    ),
    rule(
        "reply-acquire",
        "a reply is loaded with acquire order",
        CONTROL,
        ["        uint64_t word = load_acquire_system(reply);", "        uint64_t word = load_relaxed_device(reply);"],
        &[Races("calls")],
    ),
    quick(rule(
        "reply-number-kernel",
        "a reply counts only with the number of the request",
        CONTROL,
        ["        if (uint32_t(word >> 32) == number) {", "        if (word) {"],
        &[Rules("calls")],
    )),
    rule(
        "datagram-after-copies",
        "a barrier lies between the copy of a datagram into the ring and its doorbell",
        DATAGRAM,
        [
            "ring_size(place), payload, from, bytes, false);\n        group.sync();\n",
            "ring_size(place), payload, from, bytes, false);\n",
        ],
        &[Races("datagrams")],
    ),
    rule(
        "datagram-consumed",
        "a barrier lies between the copy of a datagram and the consumed position",
        DATAGRAM,
        [
            "static_cast<unsigned char *>(buffer), take, true);\n    group.sync();\n",
            "static_cast<unsigned char *>(buffer), take, true);\n",
        ],
        &[Races("datagrams")],
    ),
    rule(
        "datagram-record",
        "a record that is longer than what has arrived is EPROTO",
        DATAGRAM,
        [
            "return record > uint64_t(there.bytes) || length > layout::address_bytes ? -EPROTO",
            "return length > layout::address_bytes ? -EPROTO",
        ],
        &[Rules("datagrams")],
    ),
];
