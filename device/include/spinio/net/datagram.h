// datagram.h: datagrams and packets: sendto, recvfrom, and what send and recv do with sockets of these types.
//
//   send   all: payload into the ring     leader: header, doorbell; waits until the proxy has sent it: its result
//   recv   leader: header of the next record     all: payload -> buffer     leader: consumed position
//
// `timeout` of the functions below: the time limit of the direction, less what its lock took; one limit for all waits of the call.
//
// crates/ring/src/datagram.rs has the format of a record. A socket sends one datagram at a time, so that each call gets the
// errno of its own datagram: EMSGSIZE, ECONNREFUSED, ENOENT ... as a program does. Several sockets send side by side.
#ifndef SPINIO_NET_DATAGRAM_H
#define SPINIO_NET_DATAGRAM_H

#include <spinio/net/control.h>

namespace spinio::net {

namespace detail {

__device__ inline uint64_t padded(uint64_t bytes) { return (bytes + 15) & ~uint64_t(15); }

// A word of a record, which may go around the end of the ring.
__device__ inline AliasedWord *record_word(const Handle &net, uint64_t place, uint64_t position, unsigned word)
{
    uint64_t at = (position + word * 8) & (ring_size(place) - 1);
    return reinterpret_cast<AliasedWord *>(ring_bytes(net, place) + at);
}

// Bytes of a record after its payload.
__device__ inline unsigned long_address(unsigned length)
{
    return length > layout::datagram_short_address ? unsigned(padded(length)) : 0;
}

// Waits until the datagram that ends at `tail` has left the ring: 0 or -errno.
__device__ inline int wait_for_result(const Handle &net, int s, int flags, uint64_t tail, uint64_t timeout, uint64_t &deadline)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t *line = device_line(net, s);
    deadline = deadline_of(timeout, deadline);
    Wait wait(net, s, flags, deadline, true);
    for (unsigned polls = 1;; polls++) {
        uint64_t word = load_acquire_system(line + 1);
        if (((word ^ tail) & layout::position_mask) == 0) {
            store_relaxed_device(&socket->sent, tail);
            return -int(word >> layout::position_bits);
        }
        if (polls % polls_a_stop == 0 && load_acquire_system(line) & layout::flag_err)
            return -int(load_acquire_system(line + 1) >> layout::position_bits);
        if (int failed = wait.again())
            return failed;
    }
}

// 0, or the errno that the system's call has for these arguments.
__device__ inline int check_datagram(const layout::DeviceSocket *socket, size_t bytes, const Address *to)
{
    const bool inet = domain_of(socket) != UNIX, four = domain_of(socket) == INET;
    bool has_peer = (to && to->length) || load_relaxed_device(&socket->connected);
    if (four && bytes > 0xffff)
        return -EMSGSIZE;
    if (!has_peer)
        return inet ? -EDESTADDRREQ : -ENOTCONN;
    if (const int failed = to ? check_address(*to) : 0)
        return failed;
    uint64_t record = layout::datagram_header + padded(bytes) + (to ? long_address(to->length) : 0);
    if ((inet && bytes > (four ? layout::longest_udp : layout::longest_udp6)) || bytes > 0xffffffff || record > ring_size(socket->send_ring))
        return -EMSGSIZE;
    return load_relaxed_device(&socket->shut) & shut_send ? -EPIPE : 0;
}

template <typename Group>
__device__ SPINIO_OUTLINE int64_t send_datagram(Group group, Handle net, int s, Outcome start, const void *buffer, size_t bytes, int flags, const Address *to, uint64_t timeout)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t place = socket->send_ring, deadline = 0;
    // A packet goes to the peer.
    if (type_of(socket) == SEQPACKET)
        to = nullptr;
    uint64_t tail = start.position;
    if (group.leads()) {
        start.value = flags & MORE ? -EOPNOTSUPP : bytes && !buffer ? -EFAULT : check_datagram(socket, bytes, to);
        // One whose call did not wait until it was sent. Its errno is lost.
        if (!start.value && load_relaxed_device(&socket->sent) != start.position) {
            int failed = wait_for_result(net, s, flags, start.position, timeout, deadline);
            if (load_relaxed_device(&socket->sent) != start.position)
                start.value = failed;
        }
    }
    start = group.share(start);
    if (!start.value) {
        auto from = const_cast<unsigned char *>(static_cast<const unsigned char *>(buffer));
        uint64_t payload = start.position + layout::datagram_header;
        copy_ring(group, ring_bytes(net, place), ring_size(place), payload, from, bytes, false);
        group.sync();
        if (group.leads()) {
            unsigned length = to ? to->length : 0, extra = long_address(length);
            uint64_t flag = flags & DONTWAIT ? uint64_t(layout::datagram_dontwait) << 40 : 0;
            auto words = to ? reinterpret_cast<const AliasedWord *>(to->bytes) : nullptr;
            *record_word(net, place, start.position, 0) = bytes | uint64_t(length) << 32 | flag;
            *record_word(net, place, start.position, 1) = length && !extra ? words[0] : 0;
            *record_word(net, place, start.position, 2) = length && !extra ? words[1] : 0;
            *record_word(net, place, start.position, 3) = bytes;
            for (unsigned i = 0; i < extra / 8; i++)
                *record_word(net, place, payload + padded(bytes), i) = words[i];
            const uint64_t end = (payload + padded(bytes) + extra) & layout::position_mask;
            start.value = ring(net, layout::doorbell_send, index_of(s), epoch_of(s), end);
            if (!start.value) {
                tail = end;
                start.value = wait_for_result(net, s, 0, tail, timeout, deadline);
                // After the time limit it is still in the ring, and will be sent.
                if (start.value == -EAGAIN && load_relaxed_device(&socket->sent) != tail)
                    start.value = 0;
            }
        }
        start.value = share(group, start.value);
    }
    if (group.leads())
        unlock(s, &socket->send_lock, tail);
    return start.value ? start.value : int64_t(bytes);
}

// The next record, on the leader: its words, and its size; or 0 at the end, or -errno.
__device__ inline int64_t wait_for_record(const Handle &net, int s, int flags, uint64_t consumed, uint64_t timeout, uint64_t (&header)[4], bool &full)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t deadline = 0;
    const Arrived there = wait_for_bytes(net, s, flags, consumed, ring_size(socket->receive_ring), timeout, deadline);
    full = there.full;
    if (there.bytes <= 0)
        return there.bytes;
    for (unsigned i = 0; i < 4; i++)
        header[i] = *record_word(net, socket->receive_ring, consumed, i);
    uint64_t length = header[0] >> 32 & 0xff;
    uint64_t record = layout::datagram_header + padded(uint32_t(header[0])) + long_address(unsigned(length));
    return record > uint64_t(there.bytes) || length > layout::address_bytes ? -EPROTO : int64_t(record);
}

template <typename Group>
__device__ SPINIO_OUTLINE int64_t receive_datagram(Group group, Handle net, int s, Outcome start, void *buffer, size_t bytes, int flags, Address *from, uint64_t timeout)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t place = socket->receive_ring, header[4] = {0, 0, 0, 0};
    bool full = false;
    int64_t record = 0;
    // Stored length 24 and length of the datagram, or -errno; consumed position.
    Outcome next = {0, 0, 0};
    if (group.leads()) {
        record = bytes && !buffer ? -EFAULT : wait_for_record(net, s, flags, start.position, timeout, header, full);
        uint64_t failed = header[0] >> 48;
        next = {record < 0 ? record : failed ? -int64_t(failed) : int64_t((header[0] & 0xffffff) | (header[3] & 0xffffffff) << 24), start.position, 0};
    }
    next = group.share(next);
    size_t stored = next.value < 0 ? 0 : size_t(next.value & 0xffffff), take = stored < bytes ? stored : bytes;
    uint64_t payload = next.position + layout::datagram_header;
    copy_ring(group, ring_bytes(net, place), ring_size(place), payload, static_cast<unsigned char *>(buffer), take, true);
    group.sync();
    if (group.leads()) {
        if (from && next.value >= 0) {
            unsigned length = unsigned(header[0] >> 32 & 0xff);
            auto words = reinterpret_cast<AliasedWord *>(from->bytes);
            from->length = length;
            for (unsigned i = 0; i < layout::address_bytes / 8; i++)
                words[i] = i < long_address(length) / 8 ? *record_word(net, place, payload + padded(stored), i) : 0;
            if (!long_address(length)) {
                words[0] = header[1];
                words[1] = header[2];
            }
        }
        // An error is told once, also to one that peeks.
        if (record > 0 && (next.value < 0 || !(flags & PEEK))) {
            start.position = (next.position + uint64_t(record)) & layout::position_mask;
            publish_consumed(net, s, start.position, full);
        }
        unlock(s, &socket->receive_lock, start.position);
    }
    group.sync();
    if (next.value < 0)
        return next.value;
    return flags & TRUNC ? next.value >> 24 : int64_t(take);
}

} // namespace detail

// Sends a datagram to an address, and returns its length once the system has taken it, or -errno. Of streams: to the peer.
template <typename Group>
__device__ int64_t sendto(Group group, const Handle &net, int s, const void *buffer, size_t bytes, int flags, const Address &to)
{
    SPINIO_CHECK_CALL(group, "sendto", net, s, buffer, bytes, flags, to);
    Outcome locked = {0, 0, 0};
    detail::Locked known;
    if (group.leads())
        locked = detail::lock_direction(net, s, flags, false, known);
    locked = group.share(locked);
    if (!locked.ring)
        return locked.value;
    layout::DeviceSocket *socket = detail::device_socket(net, s);
    if (detail::has_datagrams(locked.ring))
        return detail::send_datagram(group, net, s, locked, buffer, bytes, flags, &to, known.timeout);
    if (group.leads())
        detail::unlock(s, &socket->send_lock, locked.position);
    group.sync();
    return detail::domain_of(socket) == UNIX && to.length ? -EISCONN : send(group, net, s, buffer, bytes, flags);
}

// Receives a datagram, and returns how many of its bytes are in the buffer; the rest of it is gone. TRUNC: its length. The
// leader stores where it came from, with length 0 for streams and packets.
template <typename Group>
__device__ int64_t recvfrom(Group group, const Handle &net, int s, void *buffer, size_t bytes, int flags, Address *from)
{
    SPINIO_CHECK_CALL(group, "recvfrom", net, s, buffer, bytes, flags);
    Outcome locked = {0, 0, 0};
    detail::Locked known;
    if (group.leads())
        locked = detail::lock_direction(net, s, flags, true, known);
    locked = group.share(locked);
    if (!locked.ring)
        return locked.value;
    if (detail::has_datagrams(locked.ring))
        return detail::receive_datagram(group, net, s, locked, buffer, bytes, flags, from, known.timeout);
    if (group.leads()) {
        detail::unlock(s, &detail::device_socket(net, s)->receive_lock, locked.position);
        if (from)
            from->length = 0;
    }
    group.sync();
    return recv(group, net, s, buffer, bytes, flags);
}

} // namespace spinio::net

#endif
