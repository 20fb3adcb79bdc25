// control.h: calls that the proxy answers: socket, bind, listen, accept, connect, shutdown, names; and close.
//
//   leader: claims a mailbox (device memory), writes the request, rings, waits for the reply with its number
//
// Calls that wait have mailboxes of their own, so that they cannot keep others from closing what they wait for.
#ifndef SPINIO_NET_CONTROL_H
#define SPINIO_NET_CONTROL_H

#include <spinio/net/stream.h>

namespace spinio::net {

constexpr int SHUT_RECEIVE = 0, SHUT_SEND = 1, SHUT_BOTH = 2;

// A socket address, as Linux has it.
struct Address {
    alignas(8) unsigned char bytes[layout::address_bytes];
    unsigned length;

    // An IPv4 address and a port.
    __host__ __device__ static Address inet(unsigned a, unsigned b, unsigned c, unsigned d, unsigned port)
    {
        Address address = of(INET, 16);
        const unsigned parts[6] = {port >> 8, port, a, b, c, d};
        for (int i = 0; i < 6; i++)
            address.bytes[2 + i] = (unsigned char)parts[i];
        return address;
    }

    // An IPv6 address, as eight groups, and a port; scope: the number of the interface of a link-local address.
    __host__ __device__ static Address inet6(const unsigned short (&groups)[8], unsigned port, unsigned scope = 0)
    {
        Address address = of(INET6, 28);
        address.bytes[2] = (unsigned char)(port >> 8);
        address.bytes[3] = (unsigned char)port;
        for (int i = 0; i < 8; i++) {
            address.bytes[8 + i * 2] = (unsigned char)(groups[i] >> 8);
            address.bytes[9 + i * 2] = (unsigned char)groups[i];
        }
        for (int i = 0; i < 4; i++)
            address.bytes[24 + i] = (unsigned char)(scope >> i * 8);
        return address;
    }

    // The path of a UNIX socket; one that is too long makes calls fail with ENAMETOOLONG (Linux: EINVAL).
    __host__ __device__ static Address path(const char *text)
    {
        Address address = of(UNIX, 2);
        address.append(text);
        return address;
    }

    // A name in the abstract namespace.
    __host__ __device__ static Address abstract(const char *text)
    {
        Address address = of(UNIX, 3);
        address.append(text);
        return address;
    }

    // Of an IPv4 or IPv6 address.
    __host__ __device__ unsigned port() const { return unsigned(bytes[2]) << 8 | bytes[3]; }

private:
    __host__ __device__ static Address of(int family, unsigned length)
    {
        Address address = {};
        address.bytes[0] = (unsigned char)family;
        address.length = length;
        return address;
    }

    __host__ __device__ void append(const char *text)
    {
        while (*text && length < layout::address_bytes)
            bytes[length++] = (unsigned char)*text++;
    }
};

namespace detail {

// 0, or what an address is that is too long: of a UNIX socket a path or name that has no end, which append() has cut.
__device__ inline int check_address(const Address &address)
{
    const unsigned longest_unix = 110;
    const bool is_unix = address.bytes[0] == UNIX && address.bytes[1] == 0;
    if (is_unix && address.length > longest_unix)
        return -ENAMETOOLONG;
    return address.length > layout::address_bytes ? -EINVAL : 0;
}

struct Request {
    layout::Call call;
    int s;
    uint32_t argument;
    int flags;
    const Address *address;
    uint64_t position = 0; // how far was sent: of a shutdown; microseconds, 0: none: of a connect
    uint64_t timeout = 0;  // nanoseconds, 0: none: of an accept, and of how long others wait for a mailbox
};

// Whether a call that waits for a mailbox ends: -errno, else 0. One that has the lock of a direction gives way to a close.
__device__ inline int end_of_claim(const Handle &net, const Request &request, uint64_t deadline, const uint64_t *posting)
{
    if (stopped(net))
        return -ESHUTDOWN;
    if (posting && load_relaxed_device(&device_socket(net, request.s)->state) != open_state(request.s))
        return -EBADF;
    return request.flags & DONTWAIT || is_after(deadline) ? -EAGAIN : 0;
}

// On the leader alone. `posting`: the lock of the sending direction, which the caller has until the request is on its way; the request
// comes after what was sent.
__device__ inline int call(const Handle &net, const Request &request, bool waits, Address *answer, uint64_t *posting = nullptr)
{
    unsigned first = waits ? layout::quick_mailboxes : 0;
    unsigned count = waits ? net.mailboxes - layout::quick_mailboxes : layout::quick_mailboxes;
    // Groups that wait for connections leave some to those that serve them.
    if (request.call == layout::call_accept)
        count -= count / 8;
    uint64_t *claims = device_words(net, layout::mailbox_claims(net.sockets));
    const uint64_t deadline = deadline_of(request.timeout, 0);
    Backoff waiting;
    unsigned mailbox = 0;
    for (unsigned at = blockIdx.x * 31 + Warp::linear(), polls = 0;; at++) {
        mailbox = first + at % count;
        if (compare_exchange_device(claims + mailbox * 2, 0, 1) == 0)
            break;
        if (++polls % count == 0) {
            const int failed = end_of_claim(net, request, deadline, posting);
            if (failed) {
                if (posting)
                    unlock(request.s, posting, position_of(posting));
                return failed;
            }
            waiting.pause();
        }
    }
    uint32_t number = uint32_t(++claims[mailbox * 2 + 1]);
    uint64_t *words = pinned_words(net, layout::mailboxes(net.sockets) + mailbox * layout::mailbox_bytes);
    unsigned length = 0;
    if (request.address) {
        length = request.address->length;
        auto bytes = reinterpret_cast<const AliasedWord *>(request.address->bytes);
        for (unsigned i = 0; i < layout::address_bytes / 8; i++)
            words[2 + i] = bytes[i];
    } else {
        words[2] = time_left(deadline);
    }
    words[1] = uint32_t(request.s) | uint64_t(request.argument) << 32;
    words[0] = uint64_t(request.call) | length << 8 | uint64_t(request.flags) << 16 | uint64_t(number) << 32;
    int result = ring(net, layout::doorbell_control, mailbox, 0, posting ? position_of(posting) : request.position);
    if (posting)
        unlock(request.s, posting, position_of(posting));
    uint64_t *reply = words + layout::line_bytes / 8;
    for (unsigned polls = 1; !result; polls++) {
        uint64_t word = load_acquire_system(reply);
        if (uint32_t(word >> 32) == number) {
            result = int(uint32_t(word));
            if (answer) {
                auto bytes = reinterpret_cast<AliasedWord *>(answer->bytes);
                answer->length = unsigned(reply[1] & 0xff);
                for (unsigned i = 0; i < layout::address_bytes / 8; i++)
                    bytes[i] = reply[2 + i];
            }
            break;
        }
        // The proxy answers all calls when the net is stopped: only its end lets a call wait in vain.
        if (polls % polls_a_stop == 0 && stopped(net) == 2)
            result = -ESHUTDOWN;
        waiting.pause();
    }
    store_release_device(claims + mailbox * 2, 0);
    return result;
}

template <typename Group>
__device__ int call_together(Group group, const Handle &net, const Request &request, bool waits = false, Address *answer = nullptr)
{
    int64_t result = 0;
    if (group.leads()) {
        result = request.call == layout::call_socket || request.call == layout::call_set ? 0 : find(net, request.s);
        if (request.address && !result)
            result = check_address(*request.address);
        if (!result)
            result = call(net, request, waits, answer);
    }
    return int(share(group, result));
}

} // namespace detail

// UNIX, INET or INET6; STREAM, DGRAM or, of UNIX, SEQPACKET; 0: a descriptor or -errno.
template <typename Group>
__device__ int socket(Group group, const Handle &net, int domain, int type, int protocol)
{
    SPINIO_CHECK_CALL(group, "socket", net, domain, type, protocol);
    if (protocol != 0)
        return -EPROTONOSUPPORT;
    uint32_t argument = uint32_t(domain) << 16 | (uint32_t(type) & 0xffff);
    return detail::call_together(group, net, {layout::call_socket, 0, argument, 0, nullptr});
}

template <typename Group>
__device__ int bind(Group group, const Handle &net, int s, const Address &address)
{
    SPINIO_CHECK_CALL(group, "bind", net, s, address);
    return detail::call_together(group, net, {layout::call_bind, s, 0, 0, &address});
}

template <typename Group>
__device__ int listen(Group group, const Handle &net, int s, int backlog)
{
    SPINIO_CHECK_CALL(group, "listen", net, s, backlog);
    return detail::call_together(group, net, {layout::call_listen, s, uint32_t(backlog), 0, nullptr});
}

namespace detail {

// As in Linux, a connection of TCP has the time limits that its listening socket has when it is accepted.
__device__ inline void inherit_time_limits(const Handle &net, int listener, int s)
{
    layout::DeviceSocket *from = device_socket(net, listener), *to = device_socket(net, s);
    const uint64_t receive = load_relaxed_device(&from->receive_timeout), send = load_relaxed_device(&from->send_timeout);
    if (!(receive | send) || domain_of(from) == UNIX || find(net, s))
        return;
    store_release_device(&to->receive_timeout, receive);
    store_release_device(&to->send_timeout, send);
}

} // namespace detail

// Waits for a connection, as long as the time limit of receiving says (set_timeout() or SO_RCVTIMEO): its descriptor or -errno. The leader
// stores the peer's address. -EAGAIN: the limit has passed; a connection that comes later is there for the next call.
template <typename Group>
__device__ int accept(Group group, const Handle &net, int s, Address *peer = nullptr, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "accept", net, s, flags);
    int64_t result = 0;
    if (group.leads()) {
        result = detail::find(net, s);
        if (!result) {
            const uint64_t timeout = load_relaxed_device(&detail::device_socket(net, s)->receive_timeout);
            result = detail::call(net, {layout::call_accept, s, blockIdx.x, flags & DONTWAIT, nullptr, 0, timeout}, true, peer);
            if (result > 0)
                detail::inherit_time_limits(net, s, int(result));
        }
    }
    return int(share(group, result));
}

// Waits until it is connected, as long as the time limit of sending says (set_timeout() or SO_SNDTIMEO). Of streams, DONTWAIT and after
// the limit: -EINPROGRESS. Then `send` and `recv` wait for it, `poll` and event sets tell OUT once it is there or has failed, and
// getsockopt of OPTION_ERROR tells why (options.h). A packet socket is not connected after the limit: -EAGAIN.
template <typename Group>
__device__ int connect(Group group, const Handle &net, int s, const Address &address, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "connect", net, s, address, flags);
    // Before the request: another group may use the socket as soon as an event tells that it is connected.
    uint64_t timeout = 0;
    if (group.leads() && !detail::find(net, s)) {
        layout::DeviceSocket *socket = detail::device_socket(net, s);
        timeout = load_relaxed_device(&socket->send_timeout);
        if ((flags & DONTWAIT || timeout) && detail::type_of(socket) == STREAM)
            store_relaxed_device(&socket->connected, 2);
    }
    const uint64_t microseconds = timeout / 1000 + (timeout % 1000 != 0);
    int result =
        detail::call_together(group, net, {layout::call_connect, s, blockIdx.x, flags & DONTWAIT, &address, microseconds & layout::position_mask, timeout}, true);
    // Known here only for datagrams and packets; family 0 of a datagram socket takes its peer away.
    if (group.leads() && !result)
        store_relaxed_device(&detail::device_socket(net, s)->connected, (address.bytes[0] | address.bytes[1]) != 0);
    // Its other end may be in this net too.
    if (group.leads() && !result)
        detail::connected_peer(net, s);
    group.sync();
    return result;
}

// The leader stores the address.
template <typename Group>
__device__ int getsockname(Group group, const Handle &net, int s, Address *address)
{
    SPINIO_CHECK_CALL(group, "getsockname", net, s);
    return detail::call_together(group, net, {layout::call_socket_name, s, 0, 0, nullptr}, false, address);
}

template <typename Group>
__device__ int getpeername(Group group, const Handle &net, int s, Address *address)
{
    SPINIO_CHECK_CALL(group, "getpeername", net, s);
    return detail::call_together(group, net, {layout::call_peer_name, s, 0, 0, nullptr}, false, address);
}

namespace detail {

// On the leader: no group sends any more, and what was sent is in the ring. One that waits for room sees it, and gives the lock
// back, which this call has until it is answered. Failed: the socket is not one of the proxy.
__device__ inline Position begin_end_of_sending(const Handle &net, int s)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    if (find(net, s) || load_acquire_device(&socket->peer))
        return {-EBADF, 0};
    or_acquire_device(&socket->shut, shut_send);
    const Position locked = lock(net, s, &socket->send_lock, Patience::endless);
    // A shutdown that had the lock before may have failed, and have taken the bit back.
    if (!locked.failed)
        or_acquire_device(&socket->shut, shut_send);
    return locked;
}

} // namespace detail

// Ends a direction, SHUT_SEND after what was sent before.
template <typename Group>
__device__ int shutdown(Group group, const Handle &net, int s, int how)
{
    SPINIO_CHECK_CALL(group, "shutdown", net, s, how);
    detail::Position ended = {-EBADF, 0};
    if (group.leads() && (how == SHUT_SEND || how == SHUT_BOTH))
        ended = detail::begin_end_of_sending(net, s);
    // As a close says it.
    const uint64_t sent = ended.failed ? 0 : ended.position;
    int result = detail::call_together(group, net, {layout::call_shutdown, s, uint32_t(how), 0, nullptr, sent});
    layout::DeviceSocket *socket = detail::device_socket(net, s);
    if (!ended.failed) {
        // It has no connection yet.
        if (result)
            and_release_device(&socket->shut, ~detail::shut_send);
        detail::unlock(s, &socket->send_lock, ended.position);
    }
    if (group.leads() && !result && !detail::find(net, s)) {
        detail::find_late_end(net, s);
        const bool has_end = load_acquire_device(&socket->peer);
        if (has_end && how != SHUT_SEND)
            detail::shutdown_peer(net, s, true);
        if (has_end && how != SHUT_RECEIVE)
            detail::shutdown_peer(net, s, false);
    }
    group.sync();
    return result;
}

namespace detail {

// On the leader: no call uses the descriptor any more, and no later one will: 0 or -EBADF.
__device__ inline int end_use(const Handle &net, int s)
{
    if (int failed = find(net, s))
        return failed;
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t closed = uint64_t(epoch_of(s)) << 2 | layout::state_closed;
    if (compare_exchange_device(&socket->state, open_state(s), closed) != open_state(s))
        return -EBADF;
    // Those that have a lock see that the descriptor is closed. None may use the rings once the proxy has them.
    uint64_t *locks[2] = {&socket->receive_lock, &socket->send_lock};
    for (uint64_t *word : locks) {
        Backoff waiting;
        for (;;) {
            const uint64_t old = load_relaxed_device(word);
            // The position stays.
            if (is_free(s, old) && compare_exchange_device(word, old, old & layout::position_mask) == old)
                break;
            uint32_t *span = word == &socket->receive_lock ? &socket->borrowed : &socket->reserved;
            if (load_relaxed_device(span) && exchange_relaxed_device(span, 0)) {
                store_published(wait_word(net, s, span == &socket->reserved), 0);
                store_release_device(word, old & layout::position_mask);
                break;
            }
            waiting.pause();
        }
    }
    // The proxy resets a connection of which not all was received.
    if (type_of(socket) == STREAM && !load_acquire_device(&socket->peer))
        store_release_system(host_line(net, s), position_of(&socket->receive_lock) | uint64_t(epoch_of(s)) << layout::position_bits);
    return 0;
}

// Whether the other end is in this net too; also before a group knows it.
__device__ inline bool has_peer(const Handle &net, int s)
{
    return find(net, s) == 0 && load_acquire_system(record_of(net, s) + layout::record_receive) & layout::peer_bit;
}

} // namespace detail

// Closes the descriptor: calls that wait for it return -EBADF. What was sent before is still sent.
template <typename Group>
__device__ int close(Group group, const Handle &net, int s)
{
    SPINIO_CHECK_CALL(group, "close", net, s);
    int64_t result = 0;
    if (group.leads()) {
        if (!detail::find(net, s))
            detail::find_late_end(net, s);
        result = detail::end_use(net, s);
        if (!result && load_acquire_device(&detail::device_socket(net, s)->peer))
            detail::close_peer(net, s);
        // Its doorbell says how far was sent: the proxy may see it before those of groups that had the lock earlier.
        if (!result)
            result = detail::ring(net, layout::doorbell_close, detail::index_of(s), detail::epoch_of(s), detail::position_of(&detail::device_socket(net, s)->send_lock));
    }
    return int(share(group, result));
}

// Ends the use of the descriptor by kernels, as close does, but keeps the socket: the program can take it, as soon as it
// knows that this has returned, with spinio_net_release(). -EOPNOTSUPP: a connection inside the net stays there.
template <typename Group>
__device__ int release(Group group, const Handle &net, int s)
{
    SPINIO_CHECK_CALL(group, "release", net, s);
    int64_t result = 0;
    if (group.leads())
        result = detail::has_peer(net, s) ? -EOPNOTSUPP : detail::end_use(net, s);
    // What sends with MORE have left is sent too.
    if (group.leads() && !result)
        result = detail::ring(net, layout::doorbell_send, detail::index_of(s), detail::epoch_of(s), detail::position_of(&detail::device_socket(net, s)->send_lock));
    return int(share(group, result));
}

} // namespace spinio::net

#endif
