// message.h: short messages between two ends in device memory. crates/ring/src/message.rs explains and models them.
//
//   send   leader: tail with end_message      all: bytes -> words; bytes -> ring      leader: tail, as of any bytes
//   recv   leader: sees the first tail        all: words -> bytes
//
//   word of a message   7 bytes | tag 8: 0x80 and the low 7 bits of the position after the message
//
// Bytes in a ring are published by a store that waits until they have arrived: 64 bytes there and back took 5.5 us between two H100,
// and 1.8 us in words that each say by themselves that they are there (benches/runs/2026-11-26-messages). So a message that fits into the
// words goes both ways: first so, for a reader that waits; then through the ring, as if there were no words. A reader that sees the second
// tail needs to know nothing of this.
//
// The bytes lie at the end of the words, so that nothing has to say how many they are. All words are written each time, and
// looked at each time: so the reader has seen all of one message, and each word is of that or of the next one, whose tag is another one:
// with bytes between them that went through the ring alone, two messages may end where the tags repeat, and the second one has no words.
//
// What the other end has received comes with its bytes, and may be newer than its word, which is told at last: the newer one counts
// (newer_consumed() in peer.h).
//
// Rules: the words are written only after the other end has said that it has received all that was sent before; they are cleared
// before the first bytes of a connection are published.
#ifndef SPINIO_NET_MESSAGE_H
#define SPINIO_NET_MESSAGE_H

#include <spinio/net/group.h>
#include <spinio/net/line.h>

namespace spinio::net::detail {

// Before the first bytes of a connection: words of an earlier use of the memory are of no message.
__device__ inline void clear_message(const Peer &peer)
{
    store_relaxed_device(&peer.mine->received, 0);
    for (unsigned i = 0; i < layout::message_words; i++)
        store_relaxed_device(&peer.mine->message[i], 0);
}

// The same, if those are the bytes after `tail`: also where the other end has said something already, as it has to an end that receives
// before it sends.
__device__ inline void open_message(const Handle &net, const Locked &locked, uint64_t tail)
{
    const Peer peer(net, locked.peer, locked.granule);
    if (peer.direct() && tail == peer.first)
        clear_message(peer);
}

// Where the words are, if the bytes after `tail` go as a message too, or 0: all that was sent before is received, as the other end said to
// an earlier call, and the tag is not that of the last message. If there was none, that is one in 128 for nothing.
__device__ inline uint64_t place_of_message(const Handle &net, const Locked &locked, uint64_t tail, uint64_t bytes)
{
    const Peer peer(net, locked.peer, locked.granule);
    const bool known = (locked.taken & ~layout::end_watched) == peer.word_of(tail, 0) && tail != peer.first;
    // A load of `sent` that comes too early still has the last message: what has the same tag is at least a send and an answer later.
    const bool other_tag = message_tag(tail + bytes) != message_tag(locked.sent);
    return peer.direct() && known && other_tag && bytes <= layout::message_bytes ? uint64_t(uintptr_t(peer.mine->message)) : 0;
}

// Where those of the other end are.
__device__ inline uint64_t message_of(const Handle &net, const Locked &locked)
{
    return uint64_t(uintptr_t(Peer(net, locked.peer, locked.granule).theirs->message));
}

// A message that ends at `tail` is there, or its words will be soon. What this end has received goes with it.
__device__ inline void publish_message(const Peer &peer, uint64_t tail, uint64_t received)
{
    store_published(&peer.mine->received, received | message_tag(tail));
    const uint64_t word = peer.word_of(tail, layout::end_message);
    if (peer.shared)
        return store_published(&peer.mine->tail, word);
    // The tail that follows tells an end that watches.
    if (exchange_relaxed_device(&peer.mine->tail, word) & layout::end_watched)
        or_device(&peer.mine->tail, layout::end_watched);
}

// The words of a message of so many bytes that ends at `tail`.
template <typename Group>
__device__ void store_message(Group group, uint64_t words, const unsigned char *from, size_t bytes, uint64_t tail)
{
    auto to = reinterpret_cast<uint64_t *>(uintptr_t(words));
    const int before = int(layout::message_bytes - bytes);
    for (unsigned i = group.rank(); i < layout::message_words; i += group.size()) {
        uint64_t word = message_tag(tail);
        for (int k = 0; k < int(layout::message_word_bytes); k++) {
            const int at = int(i * layout::message_word_bytes) + k - before;
            if (at >= 0)
                word |= uint64_t(from[at]) << 8 * k;
        }
        store_published(to + i, word);
    }
}

// Copies the first `bytes` of the `there` last ones of the message that ends at `tail`: whether its words have come. Their stores and
// that of the tail have no order, so they may come later, but not much: after 200 ms they are no words of this protocol.
template <typename Group>
__device__ bool load_message(Group group, uint64_t words, unsigned char *to, size_t there, size_t bytes, uint64_t tail)
{
    constexpr uint64_t patience = 200'000'000;
    auto from = reinterpret_cast<const uint64_t *>(uintptr_t(words));
    const int before = int(layout::message_bytes - there);
    for (unsigned i = group.rank(); i < layout::message_words; i += group.size()) {
        uint64_t word = load_ahead_system(from + i), deadline = 0;
        Backoff waiting;
        for (unsigned looks = 1; (word ^ message_tag(tail)) >> 56; looks++, word = load_ahead_system(from + i)) {
            waiting.pause();
            if (looks % polls_a_stop)
                continue;
            deadline = deadline_of(patience, deadline);
            if (nanoseconds() > deadline)
                return false;
        }
        for (int k = 0; k < int(layout::message_word_bytes); k++) {
            const int at = int(i * layout::message_word_bytes) + k - before;
            if (at >= 0 && at < int(bytes))
                to[at] = static_cast<unsigned char>(word >> 8 * k);
        }
    }
    return true;
}

// What the other end had received as it sent the bytes up to `tail`, as it said with them; on the leader, before the group copies them.
// 0: it has not said so, or not yet.
__device__ inline uint64_t look_at_received(const Handle &net, const Locked &locked, Outcome there)
{
    const Peer peer(net, locked.peer, locked.granule);
    return peer.direct() && there.value > 0 ? load_ahead_system(&peer.theirs->received) : 0;
}

// After the copy, for which the load need not be waited for. What the other end says by itself, later or at the same time, is as much or more.
__device__ inline void take_received(const Handle &net, int s, const Locked &locked, Outcome there, uint64_t received)
{
    const bool ordered = !there.message, is_said = received >> 63;
    if (is_said && (ordered || (received ^ message_tag(there.position + uint64_t(there.value))) >> 56 == 0))
        store_relaxed_device(&device_socket(net, s)->taken, (received & layout::position_mask) | (locked.peer & layout::generation_mask));
}

} // namespace spinio::net::detail

#endif
