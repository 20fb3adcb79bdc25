// stream.h: send and recv of connected sockets.
//
//   recv   leader: lock   first warp: reads the line until there are bytes   all: ring -> buffer   leader: consumed position; unlock
//                                     they are in the line too: lanes -> buffer
//   send   leader: lock; looks for room   all: buffer -> ring, or host line   leader: doorbell; unlock
//
// A barrier lies between the leader's look and the others' copies, and another one between these copies and what the
// leader publishes. A message of at most 98 bytes goes inside a line (inline.h) if all that was sent before is known to be
// sent. Single threads and blocks of less than 32 threads receive through the ring.
#ifndef SPINIO_NET_STREAM_H
#define SPINIO_NET_STREAM_H

#include <spinio/net/group.h>
#include <spinio/net/inline.h>
#include <spinio/net/line.h>
#include <spinio/net/peer.h>

namespace spinio::net {

struct Address;

namespace detail {

// datagram.h; the caller has locked the direction.
template <typename Group>
__device__ int64_t receive_datagram(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags, Address *from);
template <typename Group>
__device__ int64_t send_datagram(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags, const Address *to);

// What the first word of a line can say beside a count of bytes: nothing yet, or that the errno is in the second word.
constexpr int64_t nothing = INT64_MIN, has_failed = INT64_MIN + 1;

// Bytes that have arrived, 0 at the end of the stream, -EPROTO, or one of these.
__device__ inline int64_t arrived(const layout::DeviceSocket *socket, uint64_t word)
{
    uint64_t there = (word - socket->consumed) & layout::position_mask;
    if (there > ring_size(socket->receive_ring))
        return -EPROTO;
    if (there)
        return int64_t(there);
    if (word & layout::flag_err)
        return has_failed;
    return word & layout::flag_eof ? 0 : nothing;
}

// Polls of whole lines, which cost the bus more, before it is their first words only.
constexpr unsigned wide_polls = 64;

// Bytes that have arrived, 0 at the end of the stream, or -errno. All lanes of a warp call, and have the line.
__device__ inline int64_t wait_for_line(const Handle &net, int s, int flags, WideLine &line)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t *words = device_line(net, s);
    const unsigned lane = Warp::linear() % 32;
    Wait wait(net, s, flags, load_acquire_device(&socket->receive_timeout));
    for (unsigned polls = 0;; polls++) {
        line = WideLine::read(words, polls < wide_polls ? 16 : 2);
        int64_t value = arrived(socket, line.received);
        if (value > 0 && polls >= wide_polls)
            line = WideLine::read(words);
        if (value == has_failed)
            // It may be newer than the lane's second word.
            return -int64_t(load_acquire_system_once(words + 1, lane == 0) >> layout::position_bits);
        if (value != nothing) {
            // A sender need not look whether all was sent.
            if (lane == 1 && !(line.mine >> layout::position_bits))
                store_release_device(&socket->sent_seen, line.mine);
            return value;
        }
        int64_t failed = 0;
        if (lane == 0) {
            failed = wait.again();
            // On the emulated device a block sleeps only if nothing but polls happens.
            while (spinio::emulated && !failed && load_acquire_system(words) == line.received)
                failed = wait.again();
        }
        failed = int64_t(__shfl_sync(0xffffffffu, (unsigned long long)failed, 0));
        if (failed)
            return failed;
    }
}

// The same by one thread.
__device__ inline int64_t wait_for_bytes(const Handle &net, int s, int flags, bool &full)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t *line = device_line(net, s);
    Wait wait(net, s, flags, load_acquire_device(&socket->receive_timeout));
    for (;;) {
        uint64_t word = load_acquire_system(line);
        full = word & layout::flag_full;
        int64_t value = arrived(socket, word);
        if (value == has_failed)
            return -int64_t(load_acquire_system(line + 1) >> layout::position_bits);
        if (value != nothing)
            return value;
        if (int failed = wait.again())
            return failed;
    }
}

// Bytes for which there is room, or -errno.
__device__ inline int64_t wait_for_room(const Handle &net, int s, int flags)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    if (socket->shut)
        return -EPIPE;
    uint64_t size = ring_size(socket->send_ring);
    uint64_t room = size - ((socket->tail - socket->sent) & layout::position_mask);
    if (room)
        return int64_t(room);
    Wait wait(net, s, flags, load_acquire_device(&socket->send_timeout), true);
    for (;;) {
        uint64_t word = load_acquire_system(device_line(net, s) + 1);
        if (word >> layout::position_bits)
            return -int64_t(word >> layout::position_bits);
        room = size - ((socket->tail - word) & layout::position_mask);
        if (room > size)
            return -EPROTO;
        if (room) {
            socket->sent = word & layout::position_mask;
            return int64_t(room);
        }
        if (int failed = wait.again())
            return failed;
    }
}

// Whether all bytes are known to be sent: the host line is free then.
__device__ inline bool all_sent(layout::DeviceSocket *socket)
{
    if (socket->sent != socket->tail && load_acquire_device(&socket->sent_seen) == socket->tail)
        socket->sent = socket->tail;
    return socket->sent == socket->tail;
}

// 0; 1 if the other end is in this net too; or -errno.
template <typename Group>
__device__ int64_t lock_direction(Group group, const Handle &net, int s, int flags, bool receive)
{
    int64_t failed = 0;
    if (group.leads()) {
        failed = find(net, s);
        if (!failed) {
            layout::DeviceSocket *socket = device_socket(net, s);
            failed = lock(net, s, receive ? &socket->receive_lock : &socket->send_lock, !(flags & DONTWAIT));
            if (!failed && load_acquire_device(&socket->peer))
                failed = 1;
        }
    }
    return share(group, failed);
}

// Copies between a ring and a buffer, around the end of the ring.
template <typename Group>
__device__ void copy_ring(Group group, unsigned char *ring, uint64_t size, uint64_t position, unsigned char *buffer, size_t bytes, bool out)
{
    size_t at = position & (size - 1);
    size_t first = bytes < size - at ? bytes : size_t(size) - at;
    if (out) {
        count_ring_bytes(group.leads() ? bytes : 0);
        copy(group, buffer, ring + at, first);
        copy(group, buffer + first, ring, bytes - first);
    } else {
        copy(group, ring + at, buffer, first);
        copy(group, ring, buffer + first, bytes - first);
    }
}

// Bytes were received: the proxy may use their places.
__device__ inline void give_back(const Handle &net, int s, uint64_t consumed, bool full)
{
    store_relaxed_device(&device_socket(net, s)->consumed, consumed);
    store_release_system(host_line(net, s), consumed | uint64_t(epoch_of(s)) << layout::position_bits);
    // If it fails, the net is stopped.
    if (full)
        (void)ring(net, layout::doorbell_credit, index_of(s), epoch_of(s), 0);
}

// What recv does; -moved: the socket has become an end of a connection inside the net, and now the group knows.
template <typename Group>
__device__ int64_t receive_stream(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags)
{
    const int64_t locked = lock_direction(group, net, s, flags, true);
    if (locked < 0)
        return locked;
    layout::DeviceSocket *socket = device_socket(net, s);
    if (type_of(socket) != STREAM)
        return receive_datagram(group, net, s, buffer, bytes, flags, nullptr);
    // The other end is in this net: the ring is in device memory.
    const bool inner = locked > 0;
    const uint64_t size = inner ? Peer(net, load_relaxed_device(&socket->peer)).size : ring_size(socket->receive_ring);
    unsigned char *ring = inner ? Peer(net, load_relaxed_device(&socket->peer)).receive_ring : ring_bytes(net, socket->receive_ring);
    auto to = static_cast<unsigned char *>(buffer);
    const bool wide = !inner && group.wide() && !(net.flags & layout::handle_no_inline);
    size_t done = 0;
    int64_t result = 0;
    while (done < bytes) {
        bool full = false;
        Pair there = {0, 0};
        WideLine line = {};
        if (wide && group.rank() < 32) {
            there = {wait_for_line(net, s, flags, line), socket->consumed};
            full = line.received & layout::flag_full;
            // The others have to know where the bytes are.
            if (there.value > 0 && line.has(uint64_t(there.value)))
                there.position |= layout::lap_bit;
        } else if (!wide && group.leads()) {
            there = {inner ? wait_for_peer(net, s, flags) : wait_for_bytes(net, s, flags, full), socket->consumed};
        }
        there = group.share(there);
        const bool inside = there.position & layout::lap_bit;
        there.position &= layout::position_mask;
        result = there.value;
        if (result <= 0)
            break;
        size_t take = bytes - done < size_t(result) ? bytes - done : size_t(result);
        if (!inside)
            copy_ring(group, ring, size, there.position, to + done, take, true);
        else if (group.rank() < 32)
            line.copy_to(to + done, uint64_t(there.value), take);
        group.sync();
        done += take;
        if (flags & PEEK)
            break;
        if (group.leads()) {
            uint64_t consumed = (there.position + take) & layout::position_mask;
            if (inner)
                publish_consumed(net, s, consumed, uint64_t(result) - take);
            else
                give_back(net, s, consumed, full);
        }
        if (!(flags & WAITALL))
            break;
    }
    if (group.leads()) {
        if (result == -int(layout::moved))
            attach_peer(net, s);
        unlock(&socket->receive_lock);
    }
    return done ? int64_t(done) : result;
}

// What send does; -moved: as above.
template <typename Group>
__device__ int64_t send_stream(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags)
{
    const int64_t locked = lock_direction(group, net, s, flags, false);
    if (locked < 0)
        return locked;
    layout::DeviceSocket *socket = device_socket(net, s);
    if (type_of(socket) != STREAM)
        return send_datagram(group, net, s, buffer, bytes, flags, nullptr);
    const bool inner = locked > 0;
    const uint64_t size = inner ? Peer(net, load_relaxed_device(&socket->peer)).size : ring_size(socket->send_ring);
    unsigned char *ring = inner ? Peer(net, load_relaxed_device(&socket->peer)).send_ring : ring_bytes(net, socket->send_ring);
    auto from = const_cast<unsigned char *>(static_cast<const unsigned char *>(buffer));
    size_t done = 0;
    int64_t result = 0;
    while (done < bytes) {
        Pair room = {0, 0};
        if (group.leads()) {
            room = {inner ? wait_for_room_of_peer(net, s, flags) : wait_for_room(net, s, flags), socket->tail};
            if (!inner && room.value > 0 && bytes - done <= layout::inline_bytes && !(net.flags & layout::handle_no_inline) && all_sent(socket))
                room.position |= (socket->send_phase = socket->send_phase % 31 + 1) << layout::position_bits;
        }
        room = group.share(room);
        result = room.value;
        if (result == nowhere)
            done = bytes;
        if (result < 0 || result == nowhere)
            break;
        const unsigned phase = unsigned(room.position >> layout::position_bits);
        room.position &= layout::position_mask;
        size_t take = bytes - done < size_t(result) ? bytes - done : size_t(result);
        // Half a ring at most, so that the proxy sends one half while this group writes the other one.
        if (take > size / 2)
            take = size / 2;
        if (phase)
            store_inline(group, host_line(net, s), from + done, unsigned(take), phase);
        else
            copy_ring(group, ring, size, room.position, from + done, take, false);
        group.sync();
        int64_t failed = 0;
        if (group.leads()) {
            uint64_t tail = (room.position + take) & layout::position_mask;
            if (inner)
                publish_tail(net, s, tail);
            else if (phase)
                failed = ring_inline(net, index_of(s), epoch_of(s), tail, unsigned(take), phase);
            else
                failed = detail::ring(net, layout::doorbell_send, index_of(s), epoch_of(s), tail);
            if (!inner && !failed)
                store_relaxed_device(&socket->tail, tail);
        }
        result = share(group, failed);
        if (result < 0)
            break;
        done += take;
    }
    if (group.leads()) {
        if (result == -int(layout::moved))
            attach_peer(net, s);
        unlock(&socket->send_lock);
    }
    return done ? int64_t(done) : result;
}

} // namespace detail

// Receives at most `bytes`; returns how many, 0 at the end of the stream, or -errno. WAITALL: all of them, unless the
// stream ends. PEEK: they can be received again.
template <typename Group>
__device__ int64_t recv(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags = 0)
{
    for (;;) {
        int64_t result = detail::receive_stream(group, net, s, buffer, bytes, flags);
        if (result != -int(layout::moved))
            return result;
    }
}

// Sends `bytes` and returns as many, fewer only if some were sent before an error or before DONTWAIT found no room;
// or -errno. They are in the ring then: the proxy sends them on, also after close().
template <typename Group>
__device__ int64_t send(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags = 0)
{
    for (;;) {
        int64_t result = detail::send_stream(group, net, s, buffer, bytes, flags);
        if (result != -int(layout::moved))
            return result;
    }
}

// How long later calls of recv and send wait, in nanoseconds, before they return -EAGAIN; 0: without a limit.
template <typename Group>
__device__ int set_timeout(Group group, const Handle &net, int s, uint64_t receive_ns, uint64_t send_ns)
{
    int64_t failed = 0;
    if (group.leads()) {
        failed = detail::find(net, s);
        if (!failed) {
            store_release_device(&detail::device_socket(net, s)->receive_timeout, receive_ns);
            store_release_device(&detail::device_socket(net, s)->send_timeout, send_ns);
        }
    }
    return int(share(group, failed));
}

} // namespace spinio::net

#endif
