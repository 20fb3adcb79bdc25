// span.h: bytes of a stream in place, in the ring itself: no buffer, no copy.
//
//   reserve ── span: room in the send ring ──> the group stores there ──> commit(n): the first n bytes are sent
//   borrow  ── span: bytes that arrived    ──> the group loads them    ──> give_back(n): the first n bytes are received
//
// Between the two calls the group has the direction of the socket: send, recv and shutdown of this direction wait until it is given back,
// and with DONTWAIT get -EAGAIN. The other direction is free. What commit and give_back need to know is in the socket, so another
// kernel may make the second call. close takes spans away: none may be used any more, and the second call gets -EBADF.
//
// A span ends where the ring does: what is longer takes a second one. In a ring of another GPU or of a program (docs/gpunet.md) a span is to be
// stored to, not loaded: each load would cross the bus.
//
// Known flaw: a short message that a borrow finds is waited for until it is in the ring too, 1 to 2 us (message.h); one whose sender's
// process was killed in between is lost, where recv would find it.
#ifndef SPINIO_NET_SPAN_H
#define SPINIO_NET_SPAN_H

#include <spinio/net/stream.h>

namespace spinio::net {

struct Span {
    unsigned char *bytes;
    size_t size;
};

namespace detail {

// A message in words is waited for until it is in the ring: 0 or -errno.
__device__ inline int64_t wait_for_ring(const Handle &net, int s, const Locked &locked, uint64_t deadline)
{
    const Peer peer(net, locked.peer, locked.granule);
    Wait wait(net, s, 0, deadline);
    for (unsigned polls = 1; has_message(peer.look(&peer.theirs->tail)); polls++) {
        if (polls % polls_a_line == 0 && look_at_line(net, s))
            return -ECONNRESET;
        if (int failed = wait.again())
            return failed;
    }
    return 0;
}

// On the leader: bytes that can be loaded or stored at the position, or -errno. -moved: as in stream.h.
__device__ inline int64_t wait_for_span(const Handle &net, int s, int flags, bool receive, Locked &locked, Outcome at, uint64_t wanted)
{
    uint64_t deadline = 0;
    if (has_datagrams(at.ring))
        return -EOPNOTSUPP;
    if (!wanted)
        return -EINVAL;
    if (!receive) {
        const int64_t room = wait_to_send(net, s, flags, locked, at, wanted, deadline);
        const int64_t half = int64_t(Ring(at.ring).size / 2);
        return room == nowhere ? -EPIPE : room < half ? room : half;
    }
    Arrived there = wait_to_receive(net, s, flags, locked, at, deadline);
    if (there.message)
        if (int64_t failed = wait_for_ring(net, s, locked, deadline))
            return failed;
    return there.bytes;
}

// On the leader: takes the direction, and a span of it: how many bytes, 0 or -errno; without a span it gives the direction back.
__device__ inline Outcome take_span(const Handle &net, int s, bool receive, size_t bytes, int flags)
{
    Locked locked;
    Outcome at = lock_direction(net, s, flags, receive, locked);
    if (!at.ring)
        return at;
    layout::DeviceSocket *socket = device_socket(net, s);
    at.value = wait_for_span(net, s, flags, receive, locked, at, bytes);
    if (at.value <= 0) {
        if (at.value == -int(layout::moved))
            attach_peer(net, s);
        unlock(s, receive ? &socket->receive_lock : &socket->send_lock, at.position);
        return at;
    }
    if (receive && locked.peer)
        take_received(net, s, locked, at, look_at_received(net, locked, at));
    const Ring ring(at.ring);
    const uint64_t to_end = ring.size - (at.position & (ring.size - 1)), size = uint64_t(at.value) < bytes ? uint64_t(at.value) : bytes;
    at.value = int64_t(size < to_end ? size : to_end);
    (void)exchange_relaxed_device(receive ? &socket->borrowed : &socket->reserved, uint32_t(at.value));
    tell_wait(wait_word(net, s, !receive), at.position, layout::group_has_span);
    return at;
}

template <typename Group>
__device__ int64_t begin_span(Group group, const Handle &net, int s, bool receive, Span *span, size_t bytes, int flags)
{
    Outcome at;
    do {
        at = {0, 0, 0};
        if (group.leads())
            at = take_span(net, s, receive, bytes, flags);
        at = group.share(at);
    } while (at.value == -int(layout::moved));
    *span = {nullptr, 0};
    if (at.value > 0) {
        const Ring ring(at.ring);
        *span = {ring.bytes + (at.position & (ring.size - 1)), size_t(at.value)};
    }
    return at.value;
}

// The position of the direction if a group has a span of at least so many bytes of it: 0 or -errno.
__device__ inline Position find_span(const Handle &net, int s, bool receive, size_t bytes)
{
    if (int failed = find(net, s))
        return {failed, 0};
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t lock = load_acquire_device(receive ? &socket->receive_lock : &socket->send_lock);
    uint32_t *span = receive ? &socket->borrowed : &socket->reserved;
    const uint32_t size = lock & locked_bit ? load_relaxed_device(span) : 0;
    if (!size || bytes > size)
        return {-EINVAL, 0};
    // Unless a close was sooner.
    if (!exchange_relaxed_device(span, 0))
        return {-EBADF, 0};
    store_published(wait_word(net, s, !receive), 0);
    return {0, lock & layout::position_mask};
}

// On the leader, after the group has stored.
__device__ inline int64_t end_reserve(const Handle &net, int s, size_t bytes)
{
    Position at = find_span(net, s, false, bytes);
    if (at.failed)
        return at.failed;
    int64_t result = 0;
    if (bytes) {
        Locked locked;
        load_fields(net, s, false, locked);
        if (locked.peer) {
            const Peer peer(net, locked.peer, locked.granule);
            uint64_t deadline = 0;
            locked.ahead = load_ahead_system(&peer.theirs->consumed);
            result = look_after_copy(net, s, DONTWAIT, locked, at.position, deadline);
        }
        result = result == nowhere ? -EPIPE : result < 0 ? result : 0;
        if (!result) {
            publish_sent(net, s, locked, at.position, bytes);
            at.position = (at.position + bytes) & layout::position_mask;
        }
    }
    unlock(s, &device_socket(net, s)->send_lock, at.position);
    return result;
}

// On the leader, after the group has loaded.
__device__ inline int64_t end_borrow(const Handle &net, int s, size_t bytes)
{
    Position at = find_span(net, s, true, bytes);
    if (at.failed)
        return at.failed;
    layout::DeviceSocket *socket = device_socket(net, s);
    at.position = (at.position + bytes) & layout::position_mask;
    const uint64_t word = load_relaxed_device(&socket->peer);
    if (!word) {
        publish_consumed(net, s, at.position, load_acquire_system(device_line(net, s)) & layout::flag_full);
    } else {
        const Peer peer = peer_of(net, s, word);
        const uint64_t told = load_relaxed_device(&socket->told), left = (peer.look(&peer.theirs->tail) - at.position) & layout::position_mask;
        if (is_to_be_told(at.position, told, peer.size))
            publish_position(net, s, at.position, left);
    }
    unlock(s, &socket->receive_lock, at.position);
    return 0;
}

} // namespace detail

// Room for at most `bytes` in the ring that the socket sends from, at least 1; returns how many, or -errno: then nothing is reserved.
// -EOPNOTSUPP: it sends datagrams.
template <typename Group>
__device__ int64_t reserve(Group group, const Handle &net, int s, Span *span, size_t bytes, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "reserve", net, s, bytes, flags);
    return detail::begin_span(group, net, s, false, span, bytes, flags);
}

// Sends the first `bytes` of what was reserved, 0: none; 0 or -errno. -EINVAL: nothing is reserved, or less; nothing has changed then.
// After other errors nothing is sent, and nothing is reserved any more.
template <typename Group>
__device__ int commit(Group group, const Handle &net, int s, size_t bytes)
{
    SPINIO_CHECK_CALL(group, "commit", net, s, bytes);
    group.sync();
    return int(share(group, group.leads() ? detail::end_reserve(net, s, bytes) : 0));
}

// At most `bytes` that have arrived, at least 1; returns how many, 0 at the end of the stream, or -errno: then nothing is borrowed.
template <typename Group>
__device__ int64_t borrow(Group group, const Handle &net, int s, Span *span, size_t bytes, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "borrow", net, s, bytes, flags);
    return detail::begin_span(group, net, s, true, span, bytes, flags);
}

// The first `bytes` of what was borrowed are received, 0: none, the others can be received again; 0 or -errno. -EINVAL: nothing is
// borrowed, or less; nothing has changed then.
template <typename Group>
__device__ int give_back(Group group, const Handle &net, int s, size_t bytes)
{
    SPINIO_CHECK_CALL(group, "give_back", net, s, bytes);
    group.sync();
    return int(share(group, group.leads() ? detail::end_borrow(net, s, bytes) : 0));
}

} // namespace spinio::net

#endif
