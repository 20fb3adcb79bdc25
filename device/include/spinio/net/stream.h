// stream.h: send and recv of connected sockets.
//
//   recv   leader: lock; reads the line until there are bytes   all: ring -> buffer   leader: consumed position; unlock
//   send   leader: lock; looks for room                         all: buffer -> ring   leader: doorbell; unlock
//
// A barrier lies between the leader's look and the others' copies, and another one between these copies and what the
// leader publishes.
#ifndef SPINIO_NET_STREAM_H
#define SPINIO_NET_STREAM_H

#include <spinio/net/group.h>
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

// Bytes that have arrived after `consumed`, 0 at the end of the stream, -EPROTO, or one of these.
__device__ inline int64_t arrived(uint64_t word, uint64_t consumed, uint64_t size)
{
    uint64_t there = (word - consumed) & layout::position_mask;
    if (there > size)
        return -EPROTO;
    if (there)
        return int64_t(there);
    if (word & layout::flag_err)
        return has_failed;
    return word & layout::flag_eof ? 0 : nothing;
}

// Bytes that have arrived, 0 at the end of the stream, or -errno. On the leader.
__device__ inline int64_t wait_for_bytes(const Handle &net, int s, int flags, uint64_t consumed, uint64_t size, uint64_t &deadline, bool &full)
{
    uint64_t *line = device_line(net, s);
    Wait wait(net, s, flags, load_relaxed_device(&device_socket(net, s)->receive_timeout), deadline);
    for (;;) {
        uint64_t word = load_acquire_system(line);
        full = word & layout::flag_full;
        int64_t value = arrived(word, consumed, size);
        if (value == has_failed)
            return -int64_t(load_acquire_system(line + 1) >> layout::position_bits);
        if (value != nothing)
            return value;
        if (int failed = wait.again())
            return failed;
    }
}

// Bytes for which there is room once the proxy has sent some, or -errno.
__device__ SPINIO_NET_OUTLINE inline int64_t wait_until_sent(const Handle &net, int s, int flags, uint64_t &deadline)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t size = ring_size(socket->send_ring);
    Wait wait(net, s, flags, load_relaxed_device(&socket->send_timeout), deadline, true);
    for (;;) {
        // A shutdown of another group waits for this one.
        if (load_acquire_device(&socket->shut) & shut_send)
            return -EPIPE;
        uint64_t word = load_acquire_system(device_line(net, s) + 1);
        if (word >> layout::position_bits)
            return -int64_t(word >> layout::position_bits);
        uint64_t room = size - ((socket->tail - word) & layout::position_mask);
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

// Bytes for which there is room, or -errno.
__device__ inline int64_t wait_for_room(const Handle &net, int s, int flags, uint64_t &deadline)
{
    const layout::DeviceSocket *socket = device_socket(net, s);
    if (load_relaxed_device(&socket->shut) & shut_send)
        return -EPIPE;
    const uint64_t room = ring_size(socket->send_ring) - ((socket->tail - socket->sent) & layout::position_mask);
    return room ? int64_t(room) : wait_until_sent(net, s, flags, deadline);
}

// Of the word that says where a ring is: it has a stream, or datagrams. With the bit of a peer it is that of a connection inside
// the net.
constexpr uint64_t stream_bit = uint64_t(1) << 61, datagram_bit = uint64_t(1) << 62;

// The word of a peer has other bits.
__device__ inline bool has_datagrams(uint64_t word) { return (word & (datagram_bit | layout::peer_bit)) == datagram_bit; }
__device__ inline bool has_stream(uint64_t word) { return word && !has_datagrams(word); }

// Locks a direction, on the leader: 0 or -errno, the position, and where the ring is; never 0 if it is locked.
__device__ inline Outcome lock_direction(const Handle &net, int s, int flags, bool receive)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const int failed = lock(net, s, receive ? &socket->receive_lock : &socket->send_lock, !(flags & DONTWAIT));
    if (failed)
        return {failed, 0, 0};
    const uint64_t peer = load_relaxed_device(&socket->peer);
    const uint64_t position = receive ? socket->consumed : socket->tail, place = receive ? socket->receive_ring : socket->send_ring;
    if (type_of(socket) != STREAM)
        return {0, position, (place & layout::position_mask) | datagram_bit};
    // Another call may have attached it meanwhile, which has the other lock.
    return {0, position, peer ? load_acquire_device(&socket->peer) : (place & layout::position_mask) | stream_bit};
}

struct Ring {
    unsigned char *bytes;
    uint64_t size;
};

__device__ inline Ring ring_at(const Handle &net, int s, uint64_t word, bool receive)
{
    if (!(word & layout::peer_bit))
        return {ring_bytes(net, word & layout::position_mask), ring_size(word)};
    const Peer peer = peer_of(net, s, word);
    return {receive ? peer.receive_ring : peer.send_ring, peer.size};
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

// Bytes were received: the proxy may use their places. No fence: the group has its bytes, so its loads are complete, and the
// word says nothing of what it has stored.
__device__ inline void give_back(const Handle &net, int s, uint64_t consumed, bool full)
{
    store_relaxed_device(&device_socket(net, s)->consumed, consumed);
    store_published(host_line(net, s), consumed | uint64_t(epoch_of(s)) << layout::position_bits);
    // If it fails, the net is stopped.
    if (full)
        (void)ring(net, layout::doorbell_credit, index_of(s), epoch_of(s), 0);
}

// Waits for bytes at the position, on the leader: how many become the value.
__device__ inline Outcome wait_to_receive(const Handle &net, int s, int flags, Outcome there, uint64_t &deadline, bool &full)
{
    there.value = there.word & layout::peer_bit ? wait_for_peer(net, s, flags, deadline)
                                                : wait_for_bytes(net, s, flags, there.position, ring_size(there.word), deadline, full);
    return there;
}

// What recv does; -moved: the socket has become an end of a connection inside the net, and now the group knows.
template <typename Group>
__device__ int64_t receive_stream(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags)
{
    auto to = static_cast<unsigned char *>(buffer);
    size_t done = 0;
    uint64_t deadline = 0;
    Outcome there = {0, 0, 0};
    do {
        bool full = false;
        if (group.leads()) {
            if (!there.word)
                there = lock_direction(net, s, flags, true);
            if (bytes && has_stream(there.word))
                there = wait_to_receive(net, s, flags, there, deadline, full);
        }
        there = group.share(there);
        if (!there.word)
            return there.value;
        if (has_datagrams(there.word))
            return receive_datagram(group, net, s, buffer, bytes, flags, nullptr);
        if (there.value <= 0)
            break;
        const size_t take = bytes - done < size_t(there.value) ? bytes - done : size_t(there.value);
        const Ring ring = ring_at(net, s, there.word, true);
        copy_ring(group, ring.bytes, ring.size, there.position, to + done, take, true);
        group.sync();
        done += take;
        if (flags & PEEK)
            break;
        there.position = (there.position + take) & layout::position_mask;
        if (group.leads()) {
            if (there.word & layout::peer_bit)
                publish_consumed(net, s, there.word, there.position, uint64_t(there.value) - take);
            else
                give_back(net, s, there.position, full);
        }
    } while (flags & WAITALL && done < bytes);
    if (group.leads()) {
        if (there.value == -int(layout::moved))
            attach_peer(net, s);
        unlock(s, &device_socket(net, s)->receive_lock);
    }
    return done ? int64_t(done) : there.value;
}

// Bytes are in the ring. What the lock of the direction is for is published with them. If it fails, the net is stopped: the line
// says so.
__device__ inline void publish_sent(const Handle &net, int s, uint64_t word, uint64_t tail)
{
    if (word & layout::peer_bit)
        return publish_tail(net, s, word, tail);
    store_relaxed_device(&device_socket(net, s)->tail, tail);
    (void)ring(net, layout::doorbell_send, index_of(s), epoch_of(s), tail);
}

// What send does; -moved: as above.
template <typename Group>
__device__ int64_t send_stream(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags)
{
    auto from = const_cast<unsigned char *>(static_cast<const unsigned char *>(buffer));
    size_t done = 0;
    uint64_t deadline = 0;
    Outcome room = {0, 0, 0};
    do {
        if (group.leads()) {
            if (!room.word)
                room = lock_direction(net, s, flags, false);
            if (bytes && has_stream(room.word))
                room.value = room.word & layout::peer_bit ? wait_for_room_of_peer(net, s, flags, deadline) : wait_for_room(net, s, flags, deadline);
        }
        room = group.share(room);
        if (!room.word)
            return room.value;
        if (has_datagrams(room.word))
            return send_datagram(group, net, s, buffer, bytes, flags, nullptr);
        if (room.value == nowhere)
            done = bytes;
        if (room.value <= 0 || room.value == nowhere)
            break;
        const Ring ring = ring_at(net, s, room.word, false);
        size_t take = bytes - done < size_t(room.value) ? bytes - done : size_t(room.value);
        // Half a ring at most, so that the proxy sends one half while this group writes the other one.
        if (take > ring.size / 2)
            take = ring.size / 2;
        copy_ring(group, ring.bytes, ring.size, room.position, from + done, take, false);
        group.sync();
        room.position = (room.position + take) & layout::position_mask;
        done += take;
        if (group.leads())
            publish_sent(net, s, room.word, room.position);
    } while (done < bytes);
    if (group.leads()) {
        if (room.value == -int(layout::moved))
            attach_peer(net, s);
        // The last act was a compare-and-swap of the doorbells or of a watch; shared memory has neither.
        if (done == bytes && (room.word & (layout::peer_bit | layout::shared_bit)) != (layout::peer_bit | layout::shared_bit))
            unlock_published(s, &device_socket(net, s)->send_lock);
        else
            unlock(s, &device_socket(net, s)->send_lock);
    }
    return done ? int64_t(done) : room.value;
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

// How long later calls of recv and send wait in all, in nanoseconds, before they return -EAGAIN, or fewer bytes than asked for; 0:
// without a limit.
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
