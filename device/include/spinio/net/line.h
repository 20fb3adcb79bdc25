// line.h: finds the socket of a descriptor, locks one of its directions, and has the words of its lines.
//
//   descriptor ── device socket of this epoch: open ──> use it        closed, or of another epoch ──> EBADF
//                  └ of an earlier one: the record in pinned memory says that the proxy has opened a new socket here:
//                    the first call fills the device socket
//
//   lock of a direction    position 48 | epoch 15 | a call has it 1    epoch 0: closed, or not filled in
//
// The position is how many bytes were received or sent. So one word says that the descriptor is open, of this epoch, filled in
// and free, and where its stream is; and a call that gives the lock back with another position needs no order for it. Each further
// look at device memory would cost a call 0.25 us, and so would each operation with release order.
//
// Only leaders call these functions; poll calls find() on each thread.
#ifndef SPINIO_NET_LINE_H
#define SPINIO_NET_LINE_H

#include <spinio/net/ends.h>
#include <spinio/net/group.h>

namespace spinio::net {

// Flags of send, recv and accept; TRUNC: recv returns the length of a datagram, which may be more than its buffer; MORE: send leaves its
// bytes to a later send, which is to follow.
constexpr int DONTWAIT = 1, WAITALL = 2, PEEK = 4, TRUNC = 8, MORE = 16;

// Domains and types of socket().
constexpr int UNIX = 1, INET = 2, INET6 = 10, STREAM = 1, DGRAM = 2, SEQPACKET = 5;

namespace detail {

__device__ inline int type_of(const layout::DeviceSocket *socket) { return int(socket->kind & 15); }
__device__ inline int domain_of(const layout::DeviceSocket *socket) { return int(socket->kind >> 4); }

__device__ inline uint32_t index_of(int s) { return uint32_t(s) & 0xffff; }
__device__ inline uint32_t epoch_of(int s) { return uint32_t(s) >> 16; }
__device__ inline uint64_t open_state(int s) { return uint64_t(epoch_of(s)) << 2 | layout::state_open; }

__device__ inline layout::DeviceSocket *device_socket(const Handle &net, int s)
{
    auto sockets = reinterpret_cast<layout::DeviceSocket *>(uintptr_t(net.device) + layout::device_sockets(net.sockets));
    return sockets + index_of(s);
}

__device__ inline uint64_t *record_of(const Handle &net, int s)
{
    return pinned_words(net, layout::records(net.sockets) + index_of(s) * layout::record_bytes);
}

// The ends of a socket that is one; `word` is its own.
__device__ inline Peer peer_of(const Handle &net, int s, uint64_t word)
{
    return Peer(net, word, word & layout::shared_bit ? load_relaxed_device(&device_socket(net, s)->granule) : 0);
}

// The same, as the device socket has it.
__device__ inline Peer attached_peer(const Handle &net, int s) { return peer_of(net, s, load_acquire_device(&device_socket(net, s)->peer)); }

// The same as its record says, of a socket that no call has attached yet.
__device__ inline Peer recorded_peer(const Handle &net, int s)
{
    const uint64_t *record = record_of(net, s);
    const uint64_t word = load_acquire_system(record + layout::record_receive);
    return Peer(net, word, load_acquire_system(record + layout::record_granule));
}

__device__ inline uint64_t *device_line(const Handle &net, int s)
{
    return pinned_words(net, layout::device_lines(net.sockets) + index_of(s) * layout::line_bytes);
}

__device__ inline uint64_t *host_line(const Handle &net, int s)
{
    return pinned_words(net, layout::host_lines(net.sockets) + index_of(s) * layout::line_bytes);
}

__device__ inline uint64_t ring_size(uint64_t place) { return uint64_t(1) << (place & 0xff); }

__device__ inline unsigned char *ring_bytes(const Handle &net, uint64_t place)
{
    return reinterpret_cast<unsigned char *>(uintptr_t(net.pinned) + (place >> 8));
}

// Whether it is a number that the proxy could have given to a socket.
__device__ inline bool may_be_open(const Handle &net, int s)
{
    return s > 0 && index_of(s) < net.sockets && epoch_of(s);
}

constexpr uint64_t locked_bit = uint64_t(1) << 63;

__device__ inline uint64_t free_lock(int s, uint64_t position) { return (position & layout::position_mask) | uint64_t(epoch_of(s)) << layout::position_bits; }

__device__ inline bool is_free(int s, uint64_t lock) { return lock >> layout::position_bits == epoch_of(s); }

// Bytes that were received or sent, as the lock of the direction has them.
__device__ inline uint64_t position_of(const uint64_t *lock) { return load_relaxed_device(lock) & layout::position_mask; }

// 0, or -EBADF.
__device__ inline int find(const Handle &net, int s)
{
    if (!may_be_open(net, s))
        return -EBADF;
    layout::DeviceSocket *socket = device_socket(net, s);
    Backoff waiting;
    for (;;) {
        uint64_t state = load_acquire_device(&socket->state);
        if (state == open_state(s))
            return 0;
        if ((state & 3) == layout::state_filling) {
            waiting.pause();
            continue;
        }
        if (state >> 2 == epoch_of(s))
            return -EBADF;
        const uint64_t *record = record_of(net, s);
        if (load_acquire_system(record + layout::record_state) != open_state(s))
            return -EBADF;
        uint64_t filling = uint64_t(epoch_of(s)) << 2 | layout::state_filling;
        if (compare_exchange_device(&socket->state, state, filling) != state)
            continue;
        uint64_t first = record[layout::record_first] & layout::position_mask;
        uint64_t kind = record[layout::record_first] >> layout::position_bits;
        socket->kind = kind & 0xfff;
        socket->connected = kind >> 15;
        socket->receive_ring = load_acquire_system(record + layout::record_receive);
        socket->send_ring = record[layout::record_send];
        socket->told = first;
        // No room, so that the first send looks at the line, which says whether there is a connection.
        socket->sent = (first - ring_size(socket->send_ring)) & layout::position_mask;
        socket->peer = socket->receive_ring & layout::peer_bit ? socket->receive_ring : 0;
        // 0 until the socket is such an end: lock_direction() relies on it.
        socket->granule = socket->peer ? load_acquire_system(record + layout::record_granule) : 0;
        if (socket->peer)
            attached_peer(net, s).open_watch();
        // Of generation 0, so of no use of a pair.
        socket->taken = 0;
        socket->shut = socket->receive_timeout = socket->send_timeout = 0;
        socket->reserved = socket->borrowed = 0;
        store_release_device(&socket->state, open_state(s));
        store_release_device(&socket->receive_lock, free_lock(s, first));
        store_release_device(&socket->send_lock, free_lock(s, first));
        return 0;
    }
}

// 0, and the position as it was; or -errno.
struct Position {
    int64_t failed;
    uint64_t position;
};

// Of all waits of a call: it begins with the first one. 0: none.
__device__ inline uint64_t deadline_of(uint64_t timeout, uint64_t before)
{
    if (!timeout || before)
        return before;
    const uint64_t now = nanoseconds(), deadline = now + timeout;
    return deadline < now ? ~uint64_t(0) : deadline;
}

__device__ inline bool is_after(uint64_t deadline) { return deadline && nanoseconds() > deadline; }

// Until a deadline, at least 1; 0 of none.
__device__ inline uint64_t time_left(uint64_t deadline)
{
    const uint64_t now = deadline ? nanoseconds() : 0;
    return now < deadline ? deadline - now : deadline != 0;
}

// How long a call waits for a direction that another one has: as long as the direction's time limit says. Without a limit wait those that end
// what they wait for.
enum class Patience { none, limited, endless };

// Locks a direction of a socket, once no other call has it. -EBADF once the descriptor is closed. With a limit, a result of more than 0 is
// what is left of it; a call that has waited before gives its deadline.
__device__ SPINIO_OUTLINE inline Position lock(Handle net, int s, uint64_t *word, Patience patience, uint64_t deadline = 0)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    Backoff waiting;
    bool limited = false;
    for (unsigned polls = 1;; polls++) {
        if (int failed = find(net, s))
            return {failed, 0};
        const uint64_t old = load_acquire_device(word);
        if (is_free(s, old)) {
            if (compare_exchange_acquire_device(word, old, old | locked_bit) == old)
                return {int64_t(time_left(deadline)), old & layout::position_mask};
            continue;
        }
        if (patience == Patience::none && is_free(s, old & ~locked_bit))
            return {-EAGAIN, 0};
        if (patience == Patience::limited && !limited) {
            const uint64_t *timeout = word == &socket->receive_lock ? &socket->receive_timeout : &socket->send_timeout;
            deadline = deadline_of(load_relaxed_device(timeout), deadline);
            limited = true;
        }
        if (polls % polls_a_stop == 0 && stopped(net))
            return {-ESHUTDOWN, 0};
        if (polls % polls_a_stop == 0 && is_after(deadline))
            return {-EAGAIN, 0};
        waiting.pause();
    }
}

// What a call knows of a socket whose direction it has locked, on the leader. `received`: how far the other direction is.
struct Locked {
    uint64_t peer, granule, shut, sent, taken, told, timeout, received;
    // Of the other end's consumed position, which may still be on its way; and whether there is one.
    uint64_t ahead;
    bool looks_ahead;
};

// Bytes that have arrived, 0 at the end of the stream, or -errno. `full`: the proxy waits for places; `message`: they are in the words of
// a short message.
struct Arrived {
    int64_t bytes;
    bool full = false, message = false;
};

// The fields that a call needs. None of these loads waits for another one.
__device__ inline void load_fields(const Handle &net, int s, bool receive, Locked &locked)
{
    const layout::DeviceSocket *socket = device_socket(net, s);
    locked.peer = load_relaxed_device(&socket->peer);
    locked.granule = load_relaxed_device(&socket->granule);
    locked.shut = load_relaxed_device(&socket->shut);
    locked.sent = load_relaxed_device(&socket->sent);
    locked.taken = load_relaxed_device(&socket->taken);
    locked.told = load_relaxed_device(&socket->told);
    locked.timeout = load_relaxed_device(receive ? &socket->receive_timeout : &socket->send_timeout);
    locked.received = position_of(&socket->receive_lock);
}

__device__ inline void unlock(int s, uint64_t *word, uint64_t position)
{
    store_release_device(word, free_lock(s, position));
}

// The same of a call that has stored nothing else that the lock is for, or has made a fence since.
__device__ inline void unlock_ordered(int s, uint64_t *word, uint64_t position)
{
    store_published_device(word, free_lock(s, position));
}

// A group that waits for so many polls says so, for `spinio net`: crates/ring/src/wait.rs explains the word. It does not
// take the word back once it has what it waited for: the position tells.
constexpr unsigned polls_of_a_long_wait = 256;

__device__ inline void tell_wait(uint64_t *word, uint64_t position, uint64_t flags = 0)
{
    uint64_t group = uint64_t(Warp::linear() & 1023) << 53 | uint64_t(blockIdx.x & 0xfffff) << 32;
    store_published(word, layout::group_waits | flags | group | uint32_t(position));
}

__device__ inline uint64_t *wait_word(const Handle &net, int s, bool sends)
{
    return pinned_words(net, net.waits + index_of(s) * layout::wait_bytes) + sends;
}

__device__ inline void tell_long_wait(const Handle &net, int s, bool sends, bool begins)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t *word = wait_word(net, s, sends);
    if (begins)
        tell_wait(word, position_of(sends ? &socket->send_lock : &socket->receive_lock));
    else
        store_published(word, 0);
}

// A wait of a locked socket: whether to go on with it.
class Wait {
public:
    __device__ Wait(const Handle &net, int s, int flags, uint64_t deadline, bool sends = false)
        : net(net), s(s), dontwait(flags & DONTWAIT), sends(sends), deadline(deadline),
          // One that waits for room is better off if there is more of it: streams were 20 % slower with eager looks.
          waiting(2048, sends ? 0 : 64)
    {
    }

    // After a look in vain: 0 to look again, or -errno.
    __device__ int again()
    {
        if (dontwait)
            return -EAGAIN;
        int failed = 0;
        // Whether the socket is still open: that takes as long as a poll of device memory.
        if (++polls % polls_a_stop == 0)
            failed = look_around();
        // The first look of a later wait of the same call, which may have waited often.
        else if (polls == 1 && is_late())
            failed = -EAGAIN;
        if (polls == polls_of_a_long_wait || (failed && polls > polls_of_a_long_wait))
            tell_long_wait(net, s, sends, failed == 0);
        if (!failed)
            waiting.pause();
        return failed;
    }

    // It has what it waited for. Positions of others tell so too, but not at once.
    __device__ void over() const
    {
        if (polls >= polls_of_a_long_wait)
            tell_long_wait(net, s, sends, false);
    }

private:
    __device__ int look_around() const
    {
        if (load_relaxed_device(&device_socket(net, s)->state) != open_state(s))
            return -EBADF;
        if (stopped(net))
            return -ESHUTDOWN;
        return is_late() ? -EAGAIN : 0;
    }

    __device__ bool is_late() const { return is_after(deadline); }

    const Handle &net;
    int s;
    bool dontwait, sends;
    uint64_t deadline;
    unsigned polls = 0;
    Backoff waiting;
};

} // namespace detail

} // namespace spinio::net

#endif
