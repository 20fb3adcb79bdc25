// layout.h: where each structure of a net is. crates/ring/src/layout.rs has the same in Rust, and a test compares the two.
//
// This file needs no CUDA, so that the test can compile it alone.
#ifndef SPINIO_NET_LAYOUT_H
#define SPINIO_NET_LAYOUT_H

#include <spinio/standard.h>

#if defined(__CUDACC__)
#define SPINIO_NET_BOTH __host__ __device__
#else
#define SPINIO_NET_BOTH
#endif

namespace spinio::net {

// The argument of a kernel that uses sockets, by value: spinio_net_handle().
struct Handle {
    uint64_t pinned, device;
    uint32_t sockets, mailboxes;
    uint64_t peers; // the window with memory of connections to other devices; 0: there is none
    uint64_t rings; // in device memory: of connections inside the net
    uint64_t first; // the position at which streams begin
    uint64_t files; // where the file buffers are; 0: kernels may open no files
    uint64_t waits; // where the words of groups that wait are
};

namespace layout {

constexpr size_t page = 4096;
constexpr unsigned doorbells = 4096;
constexpr size_t doorbell_bytes = 16, record_bytes = 64, line_bytes = 128, mailbox_bytes = 256, claim_bytes = 16;
constexpr size_t end_bytes = 128;
constexpr unsigned quick_mailboxes = 64;
constexpr unsigned address_bytes = 112;

constexpr unsigned event_sets_of_a_net = 16, events = 256;
constexpr size_t event_words_bytes = page / event_sets_of_a_net;

// Words of an event set in pinned memory.
constexpr unsigned event_taken = 0, event_waits = 1, event_made = 16;

// The word of a group that waits for long, two for a socket: receiving, sending.
constexpr size_t wait_bytes = 16;
constexpr uint64_t group_waits = uint64_t(1) << 63, group_has_span = uint64_t(1) << 52;

// Files: the buffers through which their bytes travel, and the index of the first one.
constexpr unsigned file_buffers = 16, first_file = 65536 - 256;
constexpr size_t file_buffer_bytes = 128 << 10, path_bytes = 4095;

// Words of the header, and of the first page of device memory.
constexpr unsigned header_stop = 1, header_doorbell_head = 16;
constexpr unsigned claims_doorbell_tail = 0, claims_doorbell_head = 1, claims_file_buffers = 64, claims_stop = 128;

// Records of datagrams: crates/ring/src/datagram.rs explains them.
constexpr unsigned datagram_header = 32, datagram_short_address = 16, datagram_dontwait = 1;
constexpr size_t longest_udp = 65507, longest_udp6 = 65527;

// Words of a record.
constexpr unsigned record_state = 0, record_receive = 1, record_send = 2, record_first = 3, record_granule = 4;

// Fields of words.
constexpr unsigned position_bits = 48;
constexpr uint64_t position_mask = (uint64_t(1) << position_bits) - 1;
constexpr uint64_t lap_bit = uint64_t(1) << 63;
constexpr uint64_t flag_eof = uint64_t(1) << 60, flag_err = uint64_t(1) << 61, flag_full = uint64_t(1) << 62;

enum Doorbell : uint64_t {
    doorbell_send = 1,
    doorbell_credit = 3,
    doorbell_rearm,
    doorbell_armed,
    doorbell_close,
    doorbell_control,
    doorbell_ready = 40,
};
enum Call : uint64_t {
    call_socket = 1,
    call_bind,
    call_listen,
    call_accept,
    call_connect,
    call_shutdown,
    call_socket_name,
    call_peer_name,
    call_set_option,
    call_get_option,
    call_set = 16,
    call_add,
    call_open_file = 32,
    call_close_file,
    call_read_file,
    call_write_file,
    call_stat_file,
    call_send_file
};

// What kernels know of a socket; the proxy never sees it.
struct DeviceSocket {
    uint64_t state; // epoch * 4 + one of the numbers below
    uint64_t receive_lock, send_lock; // and positions: line.h
    uint64_t told; // the position up to which it has received, as it was last published
    uint64_t sent; // the position up to which the proxy has sent; of an end of a connection inside the net, where its last message ended
    uint64_t receive_ring, send_ring; // as in the record
    uint64_t shut;
    uint64_t receive_timeout, send_timeout; // nanoseconds, 0: none
    uint64_t kind;      // type 4 | domain 8
    uint64_t connected; // 1: datagrams need no address; 2: of a stream, connect has returned before it was there
    uint64_t peer;      // 0, or which end of a connection inside the net it is: peer_... below
    uint64_t granule;   // where the granule of such an end is, if it is in one
    uint64_t taken;     // what the other end of such an end was last seen to say that it has received
    // Bytes that a group has in the rings (span.h) while it has the lock but is in no call. The call that exchanges them for 0 gives the
    // lock back: of that group, or a close.
    uint32_t reserved, borrowed;
};

// Connections inside a net: crates/ring/src/peer.rs explains them. The word of a record that says which end a socket is:
// logarithm of the ring's size 8 | pair 32 | side 1 | remote 1, and in the high bits the generation 13 and a bit that it is one.
constexpr unsigned peer_pair_bit = 8, peer_side_bit = 40, generation_bits = 13;
constexpr uint64_t generation_mask = ((uint64_t(1) << generation_bits) - 1) << position_bits;
constexpr uint64_t peer_bit = lap_bit;
// The pair is in a granule: crates/ring/src/granule.rs. End 0 has connected, and may be a program or a kernel of another net.
constexpr uint64_t shared_bit = uint64_t(1) << 62;
// Its rings are in device memory, each in that of its reader: instead of the pair, two numbers of 16 bits, of places in the window.
// The words are in both: in a page before the ring that the other end reads, and in the granule, for the proxies.
constexpr uint64_t remote_bit = uint64_t(1) << 41;
constexpr size_t peer_bytes = 2 << 20;

// The errno in the line of a socket that has become an end of a connection inside the net.
constexpr unsigned moved = 0xffff;
// The errno in the line of a socket whose connection is being made, without a call that waits for it.
constexpr unsigned connecting = 0xfffe;

// An end, in device memory. Its own groups write the words; those of the other end take the watch.
struct PeerEnd {
    uint64_t tail;     // bytes that it has sent: position, generation, end_watched, end_closed, end_reset or end_message
    uint64_t consumed; // bytes that it has received: the same, end_watched, end_closed, end_shut
    uint64_t watch;    // what it wants to be told: events 16 | number of the arming 32 | generation
    uint64_t received; // bytes that it had received as it wrote the message below: position 48, tag 8
    uint64_t message[12]; // message.h
};
constexpr unsigned message_words = 12, message_word_bytes = 7, message_bytes = message_words * message_word_bytes;
constexpr uint64_t end_watched = uint64_t(1) << 61, end_closed = uint64_t(1) << 62, end_reset = uint64_t(1) << 63, end_shut = uint64_t(1) << 63;
constexpr uint64_t end_flags = end_watched | end_closed | end_reset;
// Of a tail that is not closed: what was sent last is a short message, whose bytes may not be in the ring yet.
constexpr uint64_t end_message = uint64_t(1) << 63;

// Of a notice, as a position has it: events 16 | number of the arming 32.
constexpr unsigned notice_events_bits = 16;

// An event set in device memory: claims, then the copies of entries. crates/ring/src/event.rs explains it.
struct DeviceSet {
    uint64_t lock, head, tail, said;
    uint64_t known;   // 1 once a group has seen that the proxy has made the set
    uint64_t stopped; // 1 once a group has seen that the net is stopped
    uint64_t reserved[10];
    uint64_t copies[events * 2];
};
constexpr uint64_t state_filling = 1, state_open = 2, state_closed = 3;

SPINIO_NET_BOTH constexpr size_t round_up(size_t value, size_t to)
{
    return (value + to - 1) / to * to;
}

SPINIO_NET_BOTH constexpr size_t records(unsigned)
{
    return page + doorbells * doorbell_bytes;
}

SPINIO_NET_BOTH constexpr size_t device_lines(unsigned sockets)
{
    return round_up(records(sockets) + sockets * record_bytes, line_bytes);
}

SPINIO_NET_BOTH constexpr size_t host_lines(unsigned sockets)
{
    return device_lines(sockets) + sockets * line_bytes;
}

SPINIO_NET_BOTH constexpr size_t mailboxes(unsigned sockets)
{
    return host_lines(sockets) + sockets * line_bytes;
}

SPINIO_NET_BOTH constexpr size_t device_sockets(unsigned)
{
    return page;
}

SPINIO_NET_BOTH constexpr size_t mailbox_claims(unsigned sockets)
{
    return device_sockets(sockets) + sockets * sizeof(DeviceSocket);
}

SPINIO_NET_BOTH constexpr size_t event_sets(unsigned sockets, unsigned count)
{
    return round_up(mailboxes(sockets) + count * mailbox_bytes, page);
}

SPINIO_NET_BOTH constexpr size_t device_sets(unsigned sockets, unsigned count)
{
    return round_up(mailbox_claims(sockets) + count * claim_bytes, line_bytes);
}

// Of a granule with rings of so many bytes.
SPINIO_NET_BOTH constexpr size_t granule_bytes(size_t ring_bytes)
{
    return page + 2 * ring_bytes;
}

SPINIO_NET_BOTH constexpr size_t device_ends(unsigned sockets, unsigned count)
{
    return device_sets(sockets, count) + event_sets_of_a_net * sizeof(DeviceSet);
}

static_assert(sizeof(PeerEnd) == end_bytes, "the layout is part of the protocol");
static_assert(sizeof(DeviceSet) == line_bytes + page, "the layout is part of the protocol");
static_assert(sizeof(Handle) == 64 && sizeof(DeviceSocket) == 128, "the layout is part of the protocol");

} // namespace layout

} // namespace spinio::net

#undef SPINIO_NET_BOTH

#endif
