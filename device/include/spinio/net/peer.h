// peer.h: streams whose other end is a socket of the same net. crates/ring/src/peer.rs explains the words.
//
//   send   leader: room, by the other end's consumed position   all: buffer -> ring   leader: tail; takes the watch
//   recv   leader: waits for the other end's tail               all: ring -> buffer   leader: consumed position; takes the watch
//
// The same serves connections over shared memory, whose other end is a CPU program or a kernel of another net
// (crates/ring/src/granule.rs): then the words and rings are in pinned memory, the words go with `.sys` scope, and the proxy has
// the watch.
//
// Everything is in device memory, for groups of one GPU: no proxy on the way of a byte, and no read of host memory but each
// 64th poll, which looks at the socket's line: there the proxy tells of what happens to the connection itself.
//
// A socket becomes such an end while it connects, or as it is accepted. Its line then has the errno `moved`: a group that
// looks there, since it does not know yet, learns it so. What travels through the proxy besides: connect, accept, shutdown,
// close, and events for sets, by a doorbell of the other end (`ready`).
#ifndef SPINIO_NET_PEER_H
#define SPINIO_NET_PEER_H

#include <spinio/net/group.h>
#include <spinio/net/line.h>

namespace spinio::net {

// Events, as poll(2) has them; NEW: a connection that a listening socket of the set has accepted.
constexpr int IN = 1, OUT = 4, ERR = 8, HUP = 0x10, RDHUP = 0x2000, NEW = 0x4000;

namespace detail {

// Of DeviceSocket::shut: it sends no more, it receives no more, it was told once that the other end is closed.
constexpr uint64_t shut_send = 1, shut_receive = 2, told_closed = 4;

// Polls in device memory between two looks at the line.
constexpr unsigned polls_a_line = 64;

__device__ inline uint64_t receive_flags(const layout::DeviceSocket *socket)
{
    return load_acquire_device(&socket->shut) & shut_receive ? layout::end_shut : 0;
}

// The other end wants to be told, if it is in an event set and armed: after `events` have become true for it.
__device__ SPINIO_OUTLINE inline void tell_peer(Handle net, int s, uint64_t word, unsigned events)
{
    // A program, and the proxy of another net, look by themselves.
    if (word & layout::shared_bit)
        return;
    const Peer peer(net, word, 0);
    uint64_t *watch = &peer.theirs->watch, old = load_relaxed_device(watch);
    for (;;) {
        bool told = peer.is_of(old) && (old & events) != 0;
        // Also where nothing changes: it orders this look after what was stored before.
        uint64_t seen = compare_exchange_device(watch, old, told ? old & ~uint64_t(0xffff) : old);
        if (seen == old) {
            if (told) {
                uint64_t notice = (old & layout::position_mask & ~uint64_t(0xffff)) | events;
                // If it fails, the net is stopped.
                (void)ring(net, layout::doorbell_ready, index_of(s), epoch_of(s), notice);
            }
            return;
        }
        old = seen;
    }
}

// Begins to use an end, if the socket has become one, as its record says. With a lock of the socket.
__device__ inline void attach_peer(const Handle &net, int s)
{
    uint64_t word = load_acquire_system(record_of(net, s) + layout::record_receive);
    if (word & layout::peer_bit) {
        layout::DeviceSocket *socket = device_socket(net, s);
        store_relaxed_device(&socket->granule, load_acquire_system(record_of(net, s) + layout::record_granule));
        peer_of(net, s, word).open_watch();
        store_release_device(&socket->peer, word);
    }
}

// Writes the watch of an end for the events that its set wants, and into the other end's words that it is to be looked at: the number of
// this arming, or 0.
__device__ inline uint64_t arm_peer(const Peer &peer, uint64_t events)
{
    uint64_t *watch = &peer.mine->watch, old = load_relaxed_device(watch);
    while (peer.is_of(old)) {
        uint64_t arming = ((old >> layout::notice_events_bits) + 1) & 0xffffffff;
        uint64_t seen = compare_exchange_device(watch, old, peer.generation << layout::position_bits | arming << layout::notice_events_bits | events);
        if (seen == old) {
            or_device(&peer.theirs->tail, layout::end_watched);
            or_device(&peer.theirs->consumed, layout::end_watched);
            return arming;
        }
        old = seen;
    }
    return 0;
}

// What is true of an end, for poll and event sets, with the bytes that it can receive and send.
struct PeerState {
    int events;
    uint64_t in, out;
};

// What the other end has received, by its word and by what it said before: with bytes that it sent it may have said more than its word
// does so far (message.h).
__device__ inline uint64_t newer_consumed(const Peer &peer, uint64_t word, uint64_t known)
{
    const bool is_behind = peer.is_of(known) && ((known - word) & layout::position_mask) < uint64_t(1) << (layout::position_bits - 1);
    return is_behind ? (known & ~layout::end_flags) | (word & layout::end_flags) : word;
}

__device__ inline PeerState look_at_peer(const layout::DeviceSocket *socket, const Peer &peer)
{
    // The group that receives moves `consumed` only up to what the other end has said before: so it is loaded first.
    uint64_t consumed = position_of(&socket->receive_lock), tail = position_of(&socket->send_lock);
    uint64_t theirs = peer.look(&peer.theirs->tail), shut = load_acquire_device(&socket->shut);
    uint64_t taken = newer_consumed(peer, peer.look(&peer.theirs->consumed), load_relaxed_device(&socket->taken));
    uint64_t there = (theirs - consumed) & layout::position_mask, used = (tail - taken) & layout::position_mask;
    // What the other end has said may be newer than what was loaded before; and it may have received a message whose send goes on.
    PeerState state = {0, there < peer.size ? there : peer.size, used <= peer.size ? peer.size - used : peer.size};
    const bool reset = is_reset(theirs), ended = theirs & layout::end_closed;
    const bool no_reader = taken & (layout::end_closed | (domain_of(socket) == UNIX ? layout::end_shut : 0));
    if (there || ended || shut & shut_receive)
        state.events |= IN;
    if (state.out >= peer.size / 2 || no_reader || shut & shut_send)
        state.events |= OUT;
    if (ended || shut & shut_receive)
        state.events |= RDHUP;
    if (reset)
        state.events |= ERR | HUP;
    if (ended && (no_reader || shut & shut_send))
        state.events |= HUP;
    return state;
}

// Arms a socket of an event set, if it is an end, after all that the group has done. `doorbell_armed`: the proxy has armed it already,
// and may have made the event.
__device__ SPINIO_OUTLINE inline int rearm_if_peer(Handle net, int s, layout::Doorbell doorbell = layout::doorbell_rearm)
{
    const layout::DeviceSocket *socket = device_socket(net, s);
    uint64_t word = load_acquire_device(&socket->peer);
    if (!word)
        return 0;
    const Peer peer = peer_of(net, s, word);
    // The proxy arms the watch and looks at the words itself.
    if (peer.shared)
        return ring(net, doorbell, index_of(s), epoch_of(s), 0);
    uint64_t events = load_acquire_system(record_of(net, s) + layout::record_send) & 0xffff;
    uint64_t arming = arm_peer(peer, events | ERR | HUP);
    uint64_t notice = arming << layout::notice_events_bits | uint64_t(look_at_peer(socket, peer).events);
    return ring(net, doorbell, index_of(s), epoch_of(s), notice);
}

// Begins to use the end that a socket has become while it was connected, as its record says; whether it has.
__device__ SPINIO_OUTLINE inline bool find_end(Handle net, int s)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    if (!(load_acquire_system(record_of(net, s) + layout::record_receive) & layout::peer_bit))
        return false;
    const Position locked = lock(net, s, &socket->send_lock, Patience::endless);
    if (locked.failed)
        return false;
    attach_peer(net, s);
    unlock(s, &socket->send_lock, locked.position);
    return true;
}

// After connect: uses the end that the socket has become, and arms it if it is in an event set.
__device__ SPINIO_OUTLINE inline void connected_peer(Handle net, int s)
{
    if (find_end(net, s) && load_acquire_system(record_of(net, s) + layout::record_send))
        (void)rearm_if_peer(net, s, layout::doorbell_armed);
}

// Of a socket of which connect has returned before it was connected, before it is armed, shut down or closed: it may have become an end
// that no call knows.
__device__ inline void find_late_end(const Handle &net, int s)
{
    const layout::DeviceSocket *socket = device_socket(net, s);
    if (load_relaxed_device(&socket->connected) == 2 && !load_acquire_device(&socket->peer))
        (void)find_end(net, s);
}

// What the proxy has to say of the connection itself: -errno, 1 if the other end is gone, or 0.
__device__ inline int look_at_line(const Handle &net, int s)
{
    const uint64_t *line = device_line(net, s);
    uint64_t word = load_acquire_system(line), failed = load_acquire_system(line + 1) >> layout::position_bits;
    if (failed != layout::moved)
        return -int(failed);
    return word & layout::flag_eof ? 1 : 0;
}

// Bytes were received: their places are free. `left` are there after them.
// No fence comes before: the group has its bytes, so its loads are complete.
__device__ inline void publish_consumed_by_peer(const Handle &net, int s, uint64_t word, uint64_t granule, uint64_t shut, uint64_t consumed, uint64_t left)
{
    const Peer peer(net, word, granule);
    const uint64_t flags = shut & shut_receive ? layout::end_shut : 0;
    if (peer.shared)
        return peer.store_relaxed(&peer.mine->consumed, consumed, flags);
    const uint64_t old = exchange_relaxed_device(&peer.mine->consumed, peer.word_of(consumed, flags));
    if (old & layout::end_watched) {
        if (left <= peer.size / 2)
            tell_peer(net, s, word, OUT);
        else
            // It is told later: once half of the ring is free.
            or_device(&peer.mine->consumed, layout::end_watched);
    }
}

// The same in a call that keeps little for it, since bytes are copied meanwhile; and what a later call publishes comes later.
__device__ inline void publish_position(const Handle &net, int s, uint64_t position, uint64_t left)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    publish_consumed_by_peer(net, s, load_relaxed_device(&socket->peer), load_relaxed_device(&socket->granule), load_relaxed_device(&socket->shut), position, left);
    store_relaxed_device(&socket->told, position);
    fence_device();
}

// Polls before a reader that waits tells what it has received. Before a call waits at all that is a quarter of the ring or less
// (many_untold() in stream.h), so no writer waits for it; but if the process ends, its proxy knows of no later word.
constexpr unsigned polls_before_telling = 16;

// Bytes that can be received after `consumed`; 0 if wait_for_peer() has to find out more.
__device__ inline Arrived look_for_bytes_of_peer(const Peer &peer, uint64_t consumed)
{
    const uint64_t tail = peer.look(&peer.theirs->tail), there = (tail - consumed) & layout::position_mask;
    const bool message = has_message(tail);
    return {there <= (message ? layout::message_bytes : peer.size) ? int64_t(there) : 0, false, message};
}

// The same, 0 at the end of the stream, or -errno. On the leader. `untold`: something was received that the other end does not know of.
__device__ SPINIO_OUTLINE inline Arrived wait_for_peer(Handle net, int s, int flags, uint64_t consumed, bool untold, uint64_t deadline)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const Peer peer = peer_of(net, s, load_relaxed_device(&socket->peer));
    Wait wait(net, s, flags, deadline);
    int line = 0;
    for (unsigned polls = 1;; polls++) {
        const uint64_t tail = peer.look(&peer.theirs->tail), there = (tail - consumed) & layout::position_mask;
        const bool message = has_message(tail);
        if (there > (message ? layout::message_bytes : peer.size))
            return {-EPROTO};
        if (there) {
            wait.over();
            return {int64_t(there), false, message};
        }
        if (tail & layout::end_closed)
            return {is_reset(tail) ? -ECONNRESET : 0};
        if (line)
            return {line < 0 ? line : is_reset(peer.last_tail()) ? -ECONNRESET : 0};
        if ((flags & DONTWAIT || polls % polls_a_stop == 0) && load_acquire_device(&socket->shut) & shut_receive)
            return {0};
        if (untold && (flags & DONTWAIT || polls == polls_before_telling)) {
            publish_position(net, s, consumed, 0);
            untold = false;
        }
        // What came before it is received first.
        if (flags & DONTWAIT || polls % polls_a_line == 0) {
            line = look_at_line(net, s);
            if (line)
                continue;
        }
        if (int failed = wait.again())
            return {failed};
    }
}

// What wait_for_room_of_peer() says of a connection that the other end has closed: what is sent goes nowhere.
constexpr int64_t nowhere = INT64_MAX;

// Bytes for which there is room after `tail` if the other end has said `consumed`; 0 if wait_for_room_of_peer() has to find out more.
__device__ inline int64_t room_of_peer(const Peer &peer, const Locked &locked, uint64_t tail, uint64_t consumed)
{
    const uint64_t used = (tail - consumed) & layout::position_mask;
    const bool ended = locked.shut & shut_send || consumed & (layout::end_closed | layout::end_shut);
    return ended || used > peer.size ? 0 : int64_t(peer.size - used);
}

// The same. What the other end had said to an earlier call is enough if that is room for `wanted` bytes: what it says now is then known
// once the bytes are in the ring. That costs nothing, where a look in pinned memory takes 1.2 us.
__device__ inline int64_t look_for_room_of_peer(const Handle &net, int s, Locked &locked, uint64_t tail, uint64_t wanted)
{
    const Peer peer(net, locked.peer, locked.granule);
    if (wanted > peer.size / 2)
        wanted = peer.size / 2;
    int64_t room = room_of_peer(peer, locked, tail, peer.is_of(locked.taken) ? locked.taken : peer.first);
    locked.looks_ahead = room > 0 && uint64_t(room) >= wanted;
    if (locked.looks_ahead) {
        locked.ahead = load_ahead_system(&peer.theirs->consumed);
        return room;
    }
    locked.taken = newer_consumed(peer, peer.look(&peer.theirs->consumed), locked.taken);
    room = room_of_peer(peer, locked, tail, locked.taken);
    if (room)
        store_relaxed_device(&device_socket(net, s)->taken, locked.taken);
    return room;
}

// Bytes for which there is room after `tail`, or -errno. On the leader.
__device__ SPINIO_OUTLINE inline int64_t wait_for_room_of_peer(Handle net, int s, int flags, uint64_t tail, uint64_t deadline)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const Peer peer = peer_of(net, s, load_relaxed_device(&socket->peer));
    Wait wait(net, s, flags, deadline, true);
    for (unsigned polls = 1;; polls++) {
        if (load_acquire_device(&socket->shut) & shut_send)
            return -EPIPE;
        uint64_t consumed = newer_consumed(peer, peer.look(&peer.theirs->consumed), load_relaxed_device(&socket->taken));
        if (consumed & layout::end_closed) {
            if (is_reset(peer.look(&peer.theirs->tail)))
                return -ECONNRESET;
            // TCP learns it from the answer to the first bytes that come too late.
            if (domain_of(socket) == UNIX || or_acquire_device(&socket->shut, told_closed) & told_closed)
                return -EPIPE;
            return nowhere;
        }
        if (consumed & layout::end_shut && domain_of(socket) == UNIX)
            return -EPIPE;
        uint64_t used = (tail - consumed) & layout::position_mask;
        if (used > peer.size)
            return -EPROTO;
        if (used < peer.size) {
            store_relaxed_device(&socket->taken, consumed);
            return int64_t(peer.size - used);
        }
        if (flags & DONTWAIT || polls % polls_a_line == 0) {
            int line = look_at_line(net, s);
            if (line)
                return line < 0 ? line : is_reset(peer.last_tail()) ? -ECONNRESET : -EPIPE;
        }
        if (int failed = wait.again())
            return failed;
    }
}

// Bytes are in the ring.
__device__ inline void publish_tail(const Handle &net, int s, const Locked &locked, uint64_t tail)
{
    const Peer peer(net, locked.peer, locked.granule);
    uint64_t old = 0;
    if (peer.direct())
        store_relaxed_device(&peer.mine->received, locked.received | message_tag(tail));
    if (peer.shared)
        peer.store(&peer.mine->tail, tail, 0);
    else
        old = exchange_release_device(&peer.mine->tail, peer.word_of(tail, 0));
    // It waits for the exchange, so that nothing else has to.
    fence_device();
    if (old & layout::end_watched)
        tell_peer(net, s, locked.peer, IN);
}

// The other end's word has come that was asked for before the bytes were copied: what wait_for_room_of_peer() would return. `tail`: before
// those bytes, or after them if they are published as a message, which the other end may have received meanwhile.
__device__ inline int64_t look_after_copy(const Handle &net, int s, int flags, Locked &locked, uint64_t tail, uint64_t &deadline)
{
    const Peer peer(net, locked.peer, locked.granule);
    locked.taken = newer_consumed(peer, peer.is_of(locked.ahead) ? locked.ahead : peer.first, locked.taken);
    const int64_t room = room_of_peer(peer, locked, tail, locked.taken);
    if (!room) {
        deadline = deadline_of(locked.timeout, deadline);
        return wait_for_room_of_peer(net, s, flags, tail, deadline);
    }
    store_relaxed_device(&device_socket(net, s)->taken, locked.taken);
    return room;
}

// Ends a direction, on the leader: the other end learns it after what was sent before.
__device__ SPINIO_OUTLINE inline void shutdown_peer(Handle net, int s, bool receive)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t end = load_acquire_device(&socket->peer);
    const Peer peer = peer_of(net, s, end);
    // A group that waits sees it, and gives the lock back.
    or_acquire_device(&socket->shut, receive ? shut_receive : shut_send);
    uint64_t *word = receive ? &socket->receive_lock : &socket->send_lock;
    const Position locked = lock(net, s, word, Patience::endless);
    if (locked.failed)
        return;
    const uint64_t position = locked.position;
    if (receive) {
        peer.store(&peer.mine->consumed, position, layout::end_shut);
        store_relaxed_device(&socket->told, position);
    } else {
        peer.store(&peer.mine->tail, position, layout::end_closed);
    }
    unlock(s, word, position);
    tell_peer(net, s, end, receive ? OUT : IN | RDHUP);
}

// Both directions, of a socket that no group uses any more.
__device__ SPINIO_OUTLINE inline void close_peer(Handle net, int s)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const uint64_t word = load_acquire_device(&socket->peer);
    const Peer peer = peer_of(net, s, word);
    const uint64_t consumed = position_of(&socket->receive_lock), tail = position_of(&socket->send_lock);
    bool unread = ((peer.look(&peer.theirs->tail) ^ consumed) & layout::position_mask) != 0;
    // As TCP does: its peer learns that not all was read.
    bool reset = unread && domain_of(socket) != UNIX;
    peer.store(&peer.mine->tail, tail, layout::end_closed | (reset ? layout::end_reset : 0));
    peer.store(&peer.mine->consumed, consumed, layout::end_closed | receive_flags(socket));
    tell_peer(net, s, word, unsigned(IN | OUT | RDHUP | HUP | (reset ? ERR : 0)));
}

} // namespace detail

} // namespace spinio::net

#endif
