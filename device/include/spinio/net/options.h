// options.h: setsockopt and getsockopt, with Linux's levels, options and values.
//
//   time limits (SO_RCVTIMEO, SO_SNDTIMEO)   the device socket: as set_timeout()
//   SO_ERROR                                 the proxy, or the words of an end: why a connection failed
//   others                                   the socket of Linux
//
// A value has its exact size: 4 bytes, or a timeval of 16; else -EINVAL. -ENOPROTOOPT: an option that is not among those below;
// -EOPNOTSUPP: one of another domain.
#ifndef SPINIO_NET_OPTIONS_H
#define SPINIO_NET_OPTIONS_H

#include <spinio/net/check.h>
#include <spinio/net/control.h>

namespace spinio::net {

// As <sys/socket.h>, <netinet/in.h> and <netinet/tcp.h> number them.
constexpr int LEVEL_SOCKET = 1, LEVEL_IP = 0, LEVEL_TCP = 6, LEVEL_IPV6 = 41;

// Of LEVEL_SOCKET. OPTION_ERROR: the error of a connect that did not wait, once, or of a broken connection.
constexpr int OPTION_REUSEADDR = 2, OPTION_TYPE = 3, OPTION_ERROR = 4, OPTION_DONTROUTE = 5, OPTION_BROADCAST = 6, OPTION_SNDBUF = 7, OPTION_RCVBUF = 8,
              OPTION_KEEPALIVE = 9, OPTION_PRIORITY = 12, OPTION_REUSEPORT = 15, OPTION_RCVTIMEO = 20, OPTION_SNDTIMEO = 21, OPTION_ACCEPTCONN = 30,
              OPTION_MARK = 36, OPTION_PROTOCOL = 38, OPTION_DOMAIN = 39;
// Of LEVEL_TCP.
constexpr int OPTION_NODELAY = 1, OPTION_KEEPIDLE = 4, OPTION_KEEPINTVL = 5, OPTION_KEEPCNT = 6, OPTION_USER_TIMEOUT = 18;
// Of LEVEL_IP, and of LEVEL_IPV6.
constexpr int OPTION_TOS = 1, OPTION_TTL = 2, OPTION_V6ONLY = 26, OPTION_TCLASS = 67;

namespace detail {

// A timeval: seconds, microseconds; and the others.
constexpr unsigned time_bytes = 16, option_bytes = 4;
constexpr uint64_t longest_seconds = 1'000'000'000;

// The field of a time limit, or null.
__device__ inline uint64_t *time_limit(const Handle &net, int s, int level, int option)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    if (level != LEVEL_SOCKET || (option != OPTION_RCVTIMEO && option != OPTION_SNDTIMEO))
        return nullptr;
    return option == OPTION_RCVTIMEO ? &socket->receive_timeout : &socket->send_timeout;
}

__device__ inline uint64_t number_at(const unsigned char *bytes)
{
    uint64_t number = 0;
    for (int i = 0; i < 8; i++)
        number |= uint64_t(bytes[i]) << i * 8;
    return number;
}

__device__ inline void put_number(unsigned char *bytes, uint64_t number)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(number >> i * 8);
}

__device__ inline int set_time_limit(uint64_t *limit, const unsigned char *value, unsigned length)
{
    if (length != time_bytes)
        return -EINVAL;
    const uint64_t seconds = number_at(value), microseconds = number_at(value + 8);
    if (microseconds >= 1'000'000)
        return -EDOM;
    // As in Linux, less than none: no call waits. 0 here says that there is no limit.
    if (int64_t(seconds) < 0) {
        store_release_device(limit, 1);
        return 0;
    }
    const uint64_t whole = seconds < longest_seconds ? seconds : longest_seconds;
    store_release_device(limit, whole * 1'000'000'000 + microseconds * 1000);
    return 0;
}

__device__ inline int get_time_limit(const uint64_t *limit, unsigned char *value, unsigned *length)
{
    if (*length < time_bytes)
        return -EINVAL;
    const uint64_t nanoseconds = load_relaxed_device(limit);
    put_number(value, nanoseconds / 1'000'000'000);
    put_number(value + 8, nanoseconds % 1'000'000'000 / 1000);
    *length = time_bytes;
    return 0;
}

__device__ inline Request option_request(layout::Call call, int s, int level, int option, const Address *value)
{
    return {call, s, uint32_t(level) << 16 | (uint32_t(option) & 0xffff), 0, value};
}

__device__ inline bool is_option(int level, int option) { return ((unsigned(level) | unsigned(option)) >> 16) == 0; }

// On the leader.
__device__ SPINIO_OUTLINE inline int set_option(Handle net, int s, int level, int option, const unsigned char *value, unsigned length)
{
    if (int failed = find(net, s))
        return failed;
    if (uint64_t *limit = time_limit(net, s, level, option))
        return set_time_limit(limit, value, length);
    if (!is_option(level, option))
        return -ENOPROTOOPT;
    Address words = {};
    words.length = length < layout::address_bytes ? length : unsigned(layout::address_bytes);
    for (unsigned i = 0; i < words.length; i++)
        words.bytes[i] = value[i];
    return call(net, option_request(layout::call_set_option, s, level, option, &words), false, nullptr);
}

// Whether the other end of a connection in memory has reset it: the proxy does not see that.
__device__ inline bool is_reset_by_peer(const Handle &net, int s)
{
    if (!load_acquire_device(&device_socket(net, s)->peer))
        return false;
    const Peer peer = attached_peer(net, s);
    return is_reset(peer.look(&peer.theirs->tail));
}

// On the leader.
__device__ SPINIO_OUTLINE inline int get_option(Handle net, int s, int level, int option, unsigned char *value, unsigned *length)
{
    if (int failed = find(net, s))
        return failed;
    if (const uint64_t *limit = time_limit(net, s, level, option))
        return get_time_limit(limit, value, length);
    if (!is_option(level, option))
        return -ENOPROTOOPT;
    // Before SO_ERROR takes the error.
    if (*length < option_bytes)
        return -EINVAL;
    Address words = {};
    if (int failed = call(net, option_request(layout::call_get_option, s, level, option, nullptr), false, &words))
        return failed;
    if (level == LEVEL_SOCKET && option == OPTION_ERROR && is_reset_by_peer(net, s))
        words.bytes[0] = ECONNRESET;
    for (unsigned i = 0; i < option_bytes; i++)
        value[i] = words.bytes[i];
    *length = option_bytes;
    return 0;
}

} // namespace detail

// 0 or -errno.
template <typename Group>
__device__ int setsockopt(Group group, const Handle &net, int s, int level, int option, const void *value, unsigned length)
{
    SPINIO_CHECK_CALL(group, "setsockopt", net, s, level, option, length);
    int64_t result = 0;
    if (group.leads())
        result = !value && length ? -EFAULT : detail::set_option(net, s, level, option, static_cast<const unsigned char *>(value), length);
    return int(share(group, result));
}

// `length`: how large the value may be, and then how large it is; the leader stores both. 0 or -errno.
template <typename Group>
__device__ int getsockopt(Group group, const Handle &net, int s, int level, int option, void *value, unsigned *length)
{
    SPINIO_CHECK_CALL(group, "getsockopt", net, s, level, option);
    int64_t result = 0;
    if (group.leads())
        result = !value || !length ? -EFAULT : detail::get_option(net, s, level, option, static_cast<unsigned char *>(value), length);
    return int(share(group, result));
}

} // namespace spinio::net

#endif
