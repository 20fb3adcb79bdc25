// stream.h: send and recv of connected sockets.
//
//   recv   leader: lock; reads the line until there are bytes   all: ring -> buffer   leader: consumed position; unlock
//   send   leader: lock; looks for room                         all: buffer -> ring   leader: doorbell; unlock
//          with MORE: no doorbell, but that a later call's position is after these bytes
//
// A barrier lies between the leader's look and the others' copies, and another one between these copies and what the
// leader publishes.
//
// A call is a chain of accesses of which each waits for the one before: 0.25 us a load of device memory, as much a store or
// compare-and-swap with release order, 1.2 us a load of host memory. So what a call needs of the socket is loaded at once, after the
// lock; a look that finds what it wants needs nothing else; and the group learns where the ring is from its leader.
#ifndef SPINIO_NET_STREAM_H
#define SPINIO_NET_STREAM_H

#include <spinio/net/check.h>
#include <spinio/net/group.h>
#include <spinio/net/line.h>
#include <spinio/net/message.h>
#include <spinio/net/peer.h>

namespace spinio::net {

struct Address;

namespace detail {

// datagram.h; the caller has locked the direction: `start`.
template <typename Group>
__device__ SPINIO_OUTLINE int64_t receive_datagram(Group group, Handle net, int s, Outcome start, void *buffer, size_t bytes, int flags, Address *from, uint64_t timeout);
template <typename Group>
__device__ SPINIO_OUTLINE int64_t send_datagram(Group group, Handle net, int s, Outcome start, const void *buffer, size_t bytes, int flags, const Address *to, uint64_t timeout);

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

// The same, of the line of a socket.
__device__ inline Arrived look_for_bytes(const Handle &net, int s, uint64_t consumed, uint64_t size)
{
    uint64_t word = load_acquire_system(device_line(net, s));
    return {arrived(word, consumed, size), (word & layout::flag_full) != 0};
}

// After a look in vain.
__device__ SPINIO_OUTLINE inline Arrived wait_for_more_bytes(Handle net, int s, int flags, uint64_t consumed, uint64_t size, uint64_t deadline)
{
    Wait wait(net, s, flags, deadline);
    for (;;) {
        if (int failed = wait.again())
            return {failed};
        const Arrived seen = look_for_bytes(net, s, consumed, size);
        if (seen.bytes != nothing)
            return seen;
    }
}

// Bytes that have arrived, 0 at the end of the stream, or -errno. On the leader.
__device__ inline Arrived wait_for_bytes(const Handle &net, int s, int flags, uint64_t consumed, uint64_t size, uint64_t timeout, uint64_t &deadline)
{
    Arrived seen = look_for_bytes(net, s, consumed, size);
    for (;;) {
        if (seen.bytes == nothing) {
            deadline = deadline_of(timeout, deadline);
            seen = wait_for_more_bytes(net, s, flags, consumed, size, deadline);
        }
        if (seen.bytes != has_failed)
            return seen;
        const uint64_t failed = load_acquire_system(device_line(net, s) + 1) >> layout::position_bits;
        // No error any more: the connection came in between. Linux has another errno for a stream of UNIX without a connection.
        const bool invalid = failed == ENOTCONN && device_socket(net, s)->kind == (UNIX << 4 | STREAM);
        seen.bytes = failed == 0 || failed == layout::connecting ? nothing : invalid ? -EINVAL : -int64_t(failed);
        if (seen.bytes != nothing)
            return seen;
    }
}

// Bytes for which there is room once the proxy has sent some, or -errno.
__device__ SPINIO_OUTLINE inline int64_t wait_until_sent(Handle net, int s, int flags, uint64_t tail, uint64_t deadline)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t size = ring_size(socket->send_ring);
    Wait wait(net, s, flags, deadline, true);
    for (;;) {
        // A shutdown of another group waits for this one.
        if (load_acquire_device(&socket->shut) & shut_send)
            return -EPIPE;
        const uint64_t word = load_acquire_system(device_line(net, s) + 1), failed = word >> layout::position_bits;
        const bool connects = failed == layout::connecting;
        // Linux has another errno for a TCP socket without a connection.
        if (failed && !connects)
            return failed == ENOTCONN && domain_of(socket) != UNIX ? -EPIPE : -int64_t(failed);
        uint64_t room = size - ((tail - word) & layout::position_mask);
        if (room > size)
            return -EPROTO;
        if (room && !connects) {
            store_relaxed_device(&socket->sent, word & layout::position_mask);
            return int64_t(room);
        }
        if (int failed = wait.again())
            return failed;
    }
}

// Bytes for which there is room after `tail`, or -errno.
__device__ inline int64_t wait_for_room(const Handle &net, int s, int flags, const Locked &locked, uint64_t tail, uint64_t size, uint64_t &deadline)
{
    if (locked.shut & shut_send)
        return -EPIPE;
    const uint64_t room = size - ((tail - locked.sent) & layout::position_mask);
    if (room)
        return int64_t(room);
    deadline = deadline_of(locked.timeout, deadline);
    return wait_until_sent(net, s, flags, tail, deadline);
}

// Where a ring is, in a word: its address, which is a multiple of 256, the logarithm of its size, and whether it has datagrams, or
// its other end is one of a peer. So all of a group learn it from their leader.
constexpr uint64_t ring_log2_mask = 0x3f, ring_datagrams = 0x40, ring_peer = 0x80, ring_flags = 0xff;

__device__ inline bool has_datagrams(uint64_t ring) { return ring & ring_datagrams; }
__device__ inline bool has_stream(uint64_t ring) { return ring && !has_datagrams(ring); }

struct Ring {
    unsigned char *bytes;
    uint64_t size;

    __device__ explicit Ring(uint64_t ring)
        : bytes(reinterpret_cast<unsigned char *>(uintptr_t(ring & ~ring_flags))), size(uint64_t(1) << (ring & ring_log2_mask))
    {
    }
};

// Where the ring of the direction of a socket is, whose fields are loaded.
__device__ inline uint64_t ring_of(const Handle &net, const Locked &locked, bool receive, uint64_t place, uint64_t kind)
{
    if (locked.peer) {
        const Peer peer(net, locked.peer, locked.granule);
        return uint64_t(uintptr_t(receive ? peer.receive_ring : peer.send_ring)) | (locked.peer & ring_log2_mask) | ring_peer;
    }
    const uint64_t ring = uint64_t(uintptr_t(ring_bytes(net, place & layout::position_mask))) | (place & ring_log2_mask);
    return (kind & 15) == STREAM ? ring : ring | ring_datagrams;
}

// Locks a direction, on the leader: 0 or -errno, the position, and where the ring is; never 0 if it is locked.
//
// The lock is taken and the fields are loaded at the same time. If another call has had it just before, it has left the position and, at
// most, newer counterparts of what others have said.
__device__ inline Outcome lock_direction(const Handle &net, int s, int flags, bool receive, Locked &locked)
{
    if (!may_be_open(net, s))
        return {-EBADF, 0, 0};
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t *word = receive ? &socket->receive_lock : &socket->send_lock;
    const uint64_t *places = receive ? &socket->receive_ring : &socket->send_ring;
    const uint64_t old = or_relaxed_device(word, locked_bit);
    uint64_t place = load_relaxed_device(places), kind = load_relaxed_device(&socket->kind);
    load_fields(net, s, receive, locked);
    uint64_t position = old & layout::position_mask;
    if (!is_free(s, old)) {
        // It is free, but of another socket.
        if (!(old & locked_bit))
            (void)compare_exchange_relaxed_device(word, old | locked_bit, old);
        const Position later = lock(net, s, word, flags & DONTWAIT ? Patience::none : Patience::limited);
        if (later.failed < 0)
            return {later.failed, 0, 0};
        position = later.position;
        place = load_relaxed_device(places);
        kind = load_relaxed_device(&socket->kind);
        load_fields(net, s, receive, locked);
        // One limit for all waits of the call.
        if (later.failed)
            locked.timeout = uint64_t(later.failed);
    }
    // Another call may attach it meanwhile, which has the other lock: the granule is there before the word.
    if (locked.peer & layout::shared_bit && !locked.granule) {
        locked.peer = load_acquire_device(&socket->peer);
        locked.granule = load_relaxed_device(&socket->granule);
    }
    return {0, position, ring_of(net, locked, receive, place, kind)};
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
__device__ inline void publish_consumed(const Handle &net, int s, uint64_t consumed, bool full)
{
    store_published(host_line(net, s), consumed | uint64_t(epoch_of(s)) << layout::position_bits);
    // If it fails, the net is stopped.
    if (full)
        (void)ring(net, layout::doorbell_credit, index_of(s), epoch_of(s), 0);
}

// Whether what was received of a peer is told now: once a quarter of the ring is free. Otherwise a later call does it, which waits.
__device__ inline bool is_to_be_told(uint64_t position, uint64_t told, uint64_t size)
{
    return ((position - told) & layout::position_mask) >= size / 4;
}

// The same of what a call will have received.
__device__ inline bool many_untold(const Locked &locked, Outcome there, uint64_t most)
{
    if (there.value <= 0)
        return false;
    const uint64_t take = most < uint64_t(there.value) ? most : uint64_t(there.value);
    return is_to_be_told(there.position + take, locked.told, Ring(there.ring).size);
}

// Waits for bytes at the position, on the leader.
__device__ inline Arrived wait_to_receive(const Handle &net, int s, int flags, const Locked &locked, Outcome there, uint64_t &deadline)
{
    if (!locked.peer)
        return wait_for_bytes(net, s, flags, there.position, Ring(there.ring).size, locked.timeout, deadline);
    const Arrived seen = look_for_bytes_of_peer(Peer(net, locked.peer, locked.granule), there.position);
    if (seen.bytes)
        return seen;
    if (locked.shut & shut_receive)
        return {0};
    deadline = deadline_of(locked.timeout, deadline);
    return wait_for_peer(net, s, flags, there.position, locked.told != there.position, deadline);
}

// Before a socket is armed: what was received is no reason for an event. A group that has the lock does so itself, before it waits.
__device__ SPINIO_OUTLINE inline void publish_received(Handle net, int s)
{
    Locked locked;
    const Outcome there = lock_direction(net, s, DONTWAIT, true, locked);
    if (!there.ring)
        return;
    if (locked.peer && locked.told != there.position)
        publish_position(net, s, there.position, 0);
    unlock(s, &device_socket(net, s)->receive_lock, there.position);
}

// Waits for room at the position, on the leader: for how many bytes, or -errno.
__device__ inline int64_t wait_to_send(const Handle &net, int s, int flags, Locked &locked, Outcome room, uint64_t wanted, uint64_t &deadline)
{
    if (!locked.peer)
        return wait_for_room(net, s, flags, locked, room.position, Ring(room.ring).size, deadline);
    const int64_t bytes = look_for_room_of_peer(net, s, locked, room.position, wanted);
    if (bytes)
        return bytes;
    deadline = deadline_of(locked.timeout, deadline);
    return wait_for_room_of_peer(net, s, flags, room.position, deadline);
}

// What recv does; -moved: the socket has become an end of a connection inside the net, and now the group knows.
template <typename Group>
__device__ int64_t receive_stream(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags)
{
    auto to = static_cast<unsigned char *>(buffer);
    size_t done = 0;
    uint64_t deadline = 0;
    Outcome there = {0, 0, 0};
    Locked locked = {};
    do {
        bool full = false, untold = false;
        uint64_t received = 0;
        if (group.leads()) {
            if (!there.ring)
                there = lock_direction(net, s, flags, true, locked);
            else
                load_fields(net, s, true, locked);
            if (bytes && !buffer) {
                there.value = -EFAULT;
            } else if (bytes && has_stream(there.ring)) {
                const Arrived seen = wait_to_receive(net, s, flags, locked, there, deadline);
                there.value = seen.bytes;
                there.message = seen.message ? message_of(net, locked) : 0;
                full = seen.full;
            }
            untold = many_untold(locked, there, bytes - done);
            if (locked.peer)
                received = look_at_received(net, locked, there);
        }
        there = group.share(there);
        if (!there.ring)
            return there.value;
        if (has_datagrams(there.ring))
            return receive_datagram(group, net, s, there, buffer, bytes, flags, nullptr, locked.timeout);
        if (there.value <= 0)
            break;
        const size_t take = bytes - done < size_t(there.value) ? bytes - done : size_t(there.value);
        if (there.message) {
            const bool complete = load_message(group, there.message, to + done, size_t(there.value), take, there.position + uint64_t(there.value));
            if (group.any(!complete)) {
                there.value = -EPROTO;
                break;
            }
        } else {
            const Ring ring(there.ring);
            copy_ring(group, ring.bytes, ring.size, there.position, to + done, take, true);
            group.sync();
        }
        done += take;
        if (group.leads() && received)
            take_received(net, s, locked, there, received);
        if (flags & PEEK)
            break;
        there.position = (there.position + take) & layout::position_mask;
        if (group.leads() && !(there.ring & ring_peer))
            publish_consumed(net, s, there.position, full);
        else if (group.leads() && untold)
            publish_position(net, s, there.position, uint64_t(there.value) - take);
    } while (flags & WAITALL && done < bytes);
    if (group.leads()) {
        if (there.value == -int(layout::moved))
            attach_peer(net, s);
        if (there.ring & ring_peer)
            unlock_ordered(s, &device_socket(net, s)->receive_lock, there.position);
        else
            unlock(s, &device_socket(net, s)->receive_lock, there.position);
    }
    return done ? int64_t(done) : there.value;
}

// So many bytes after `position` are in the ring. If it fails, the net is stopped: the line says so.
__device__ inline void publish_sent(const Handle &net, int s, const Locked &locked, uint64_t position, size_t bytes)
{
    const uint64_t tail = (position + bytes) & layout::position_mask;
    if (!locked.peer)
        return (void)ring(net, layout::doorbell_send, index_of(s), epoch_of(s), tail);
    open_message(net, locked, position);
    publish_tail(net, s, locked, tail);
}

// Whether so many bytes after `position`, sent with MORE, are left to a later call: until the bytes that are left are a quarter of the
// ring. So a call that waits for room needs to publish none: the other end can free three quarters.
__device__ inline bool is_left_to_later(int flags, uint64_t position, uint64_t bytes, uint64_t size)
{
    return flags & MORE && (position & (size / 4 - 1)) + bytes < size / 4;
}

// Bytes that are left to a later call, of any group: its position says that they are there.
__device__ inline void leave_to_later(const Handle &net, const Locked &locked, uint64_t position)
{
    if (locked.peer)
        open_message(net, locked, position);
    publish();
}

// What send does; -moved: as above.
template <typename Group>
__device__ int64_t send_stream(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags)
{
    auto from = const_cast<unsigned char *>(static_cast<const unsigned char *>(buffer));
    size_t done = 0;
    uint64_t deadline = 0;
    Outcome room = {0, 0, 0};
    Locked locked = {};
    do {
        if (group.leads()) {
            if (!room.ring)
                room = lock_direction(net, s, flags, false, locked);
            else
                load_fields(net, s, false, locked);
            if (bytes && has_stream(room.ring)) {
                room.value = wait_to_send(net, s, flags, locked, room, bytes - done, deadline);
                const bool as_message = room.value > 0 && locked.peer && !(flags & MORE);
                room.message = as_message ? place_of_message(net, locked, room.position, bytes - done) : 0;
            }
        }
        room = group.share(room);
        if (!room.ring)
            return room.value;
        if (has_datagrams(room.ring))
            return send_datagram(group, net, s, room, buffer, bytes, flags, nullptr, locked.timeout);
        if (room.value == nowhere)
            done = bytes;
        if (room.value <= 0 || room.value == nowhere)
            break;
        const Ring ring(room.ring);
        size_t take = bytes - done < size_t(room.value) ? bytes - done : size_t(room.value);
        // Half a ring at most, so that the proxy sends one half while this group writes the other one.
        if (take > ring.size / 2)
            take = ring.size / 2;
        if (room.message) {
            store_message(group, room.message, from + done, take, room.position + take);
            if (group.leads()) {
                publish_message(Peer(net, locked.peer, locked.granule), room.position + take, locked.received);
                store_relaxed_device(&device_socket(net, s)->sent, (room.position + take) & layout::position_mask);
            }
        }
        copy_ring(group, ring.bytes, ring.size, room.position, from + done, take, false);
        group.sync();
        if (room.ring & ring_peer) {
            const uint64_t published = room.position + (room.message ? take : 0);
            if (group.leads() && locked.looks_ahead)
                room.value = look_after_copy(net, s, flags, locked, published, deadline);
            room.value = share(group, room.value);
            if (room.value == nowhere)
                done = bytes;
            if (room.value <= 0 || room.value == nowhere) {
                // The other end may have received a message: its bytes stay before those of a later tail.
                if (room.message && group.leads())
                    publish();
                room.position = published & layout::position_mask;
                break;
            }
        }
        if (group.leads() && done + take == bytes && is_left_to_later(flags, room.position, take, ring.size))
            leave_to_later(net, locked, room.position);
        else if (group.leads())
            publish_sent(net, s, locked, room.position, take);
        room.position = (room.position + take) & layout::position_mask;
        done += take;
    } while (done < bytes);
    if (group.leads()) {
        if (room.value == -int(layout::moved))
            attach_peer(net, s);
        unlock_ordered(s, &device_socket(net, s)->send_lock, room.position);
    }
    return done ? int64_t(done) : room.value;
}

} // namespace detail

// Receives at most `bytes`; returns how many, 0 at the end of the stream, or -errno. WAITALL: all of them, unless the
// stream ends. PEEK: those that are there, also with WAITALL; they can be received again.
template <typename Group>
__device__ int64_t recv(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "recv", net, s, buffer, bytes, flags);
    for (;;) {
        int64_t result = detail::receive_stream(group, net, s, buffer, bytes, flags);
        if (result != -int(layout::moved))
            return result;
    }
}

// Sends `bytes` and returns as many, fewer only if some were sent before an error or before DONTWAIT found no room;
// or -errno. They are in the ring then: the proxy sends them on, also after close(). MORE: the other end gets them with those of a later
// send without it, of any group, or sooner; after them nothing may be waited for that the other end does only once it has them. Of a
// socket of datagrams, MORE is -EOPNOTSUPP.
template <typename Group>
__device__ int64_t send(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "send", net, s, buffer, bytes, flags);
    if (!buffer && bytes)
        return -EFAULT;
    for (;;) {
        int64_t result = detail::send_stream(group, net, s, buffer, bytes, flags);
        if (result != -int(layout::moved))
            return result;
    }
}

// How long later calls of recv and accept, and of send, wait in all, in nanoseconds, before they return -EAGAIN, or fewer bytes than asked
// for; 0: without a limit.
template <typename Group>
__device__ int set_timeout(Group group, const Handle &net, int s, uint64_t receive_ns, uint64_t send_ns)
{
    SPINIO_CHECK_CALL(group, "set_timeout", net, s, receive_ns, send_ns);
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
