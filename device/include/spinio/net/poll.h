// poll.h: looks at many sockets at once: a thread a socket, which reads their lines and nothing else.
//
//   thread i: entries i, i + size ...: line of the socket ── events and byte counts ── how many are ready: count of the group
//
// No call of the proxy, so that a poll of sockets for which nothing happens costs the CPU nothing. Event sets (event.h) read
// one word however many sockets they have; poll is for few sockets, or for a look at all of them.
#ifndef SPINIO_NET_POLL_H
#define SPINIO_NET_POLL_H

#include <spinio/net/event.h>

namespace spinio::net {

// A socket and what to look for: IN, OUT, RDHUP. ERR and HUP are always looked for.
struct Poll {
    int s, events;
    int ready;    // the events that are true; ERR for a descriptor that is closed or never was
    unsigned in;  // bytes that can be received; of datagrams with their records
    unsigned out; // bytes of room in the send ring
};

namespace detail {

__device__ inline int count_true(Thread, bool yes) { return yes; }
__device__ inline int count_true(Warp, bool yes) { return __popc(__ballot_sync(0xffffffffu, yes)); }
__device__ inline int count_true(Block, bool yes) { return __syncthreads_count(yes); }
template <typename G>
__device__ int count_true(Tile<G> group, bool yes)
{
    return __popc(group.lanes.ballot(yes));
}

// Of an end of a connection inside the net. The line of one that is not ready says what the proxy knows of the connection.
__device__ inline bool look_at_end(const Handle &net, Poll &poll, const Peer &peer, bool line)
{
    PeerState state = look_at_peer(device_socket(net, poll.s), peer);
    poll.in = unsigned(state.in);
    poll.out = unsigned(state.out);
    poll.ready = state.events & (poll.events | ERR | HUP);
    int said = poll.ready || !line ? 0 : look_at_line(net, poll.s);
    if (said)
        poll.ready = ((IN | OUT | RDHUP) & poll.events) | (said < 0 ? ERR | HUP : HUP);
    return poll.ready != 0;
}

// Of one socket. A negative descriptor is left out, as poll(2) does.
__device__ inline bool look(const Handle &net, Poll &poll, bool first)
{
    poll.ready = 0;
    poll.in = poll.out = 0;
    if (poll.s < 0)
        return false;
    if (find(net, poll.s)) {
        poll.ready = ERR;
        return true;
    }
    layout::DeviceSocket *socket = device_socket(net, poll.s);
    if (uint64_t word = load_acquire_device(&socket->peer))
        return look_at_end(net, poll, peer_of(net, poll.s, word), first);
    const uint64_t *line = device_line(net, poll.s);
    // The group that receives moves `consumed` only up to what the line has said before: so it is loaded first.
    uint64_t consumed = position_of(&socket->receive_lock), tail = position_of(&socket->send_lock);
    uint64_t received = load_acquire_system(line), sent = load_acquire_system(line + 1);
    bool ended = received & layout::flag_eof, failed = received & layout::flag_err;
    uint64_t size = ring_size(socket->send_ring), errno_of_line = sent >> layout::position_bits;
    if (errno_of_line == layout::moved)
        return look_at_end(net, poll, recorded_peer(net, poll.s), first);
    if (errno_of_line == layout::connecting)
        return false;
    uint64_t there = (received - consumed) & layout::position_mask, used = (tail - sent) & layout::position_mask;
    poll.in = unsigned(there < ring_size(socket->receive_ring) ? there : ring_size(socket->receive_ring));
    // Sent bytes may be more than `tail` was: then none wait.
    poll.out = unsigned(used > size ? size : size - used);
    int events = 0;
    if (there || ended || failed)
        events |= IN;
    if (poll.out >= size / 2 || errno_of_line)
        events |= OUT;
    if (ended || failed)
        events |= RDHUP;
    poll.ready = events & poll.events;
    if (failed)
        poll.ready |= ERR;
    // Of packets the line does not say that this side has ended.
    if (failed || (ended && (errno_of_line || load_acquire_device(&socket->shut) & shut_send)))
        poll.ready |= HUP;
    return poll.ready != 0;
}

} // namespace detail

// Looks at n sockets until one is ready, at most `ns` nanoseconds, without an end if that is negative; returns how many are
// ready, 0 after that time, or -ESHUTDOWN. All threads see all results.
template <typename Group>
__device__ int poll(Group group, const Handle &net, Poll *polls, int n, int64_t ns)
{
    SPINIO_CHECK_CALL(group, "poll", net, polls, n, ns);
    if (!polls && n > 0)
        return -EFAULT;
    uint64_t deadline = ns > 0 && group.leads() ? nanoseconds() + uint64_t(ns) : 0;
    Backoff waiting(32768);
    // Once the net is stopped, all lines say so: a last look, since this group may have looked before.
    bool last = false;
    for (unsigned looks = 1;; looks++) {
        int count = 0;
        for (int begin = 0; begin < n; begin += int(group.size())) {
            int i = begin + int(group.rank());
            bool ready = i < n && detail::look(net, polls[i], last || looks % detail::polls_a_line == 1);
            count += detail::count_true(group, ready);
        }
        int64_t done = 0;
        if (!count && group.leads()) {
            if ((last || looks % detail::polls_a_stop == 0) && detail::stopped(net))
                done = last ? -ESHUTDOWN : 2;
            else if (ns == 0 || (deadline && nanoseconds() > deadline))
                done = 1;
            else
                waiting.pause();
        }
        done = share(group, done);
        last = done == 2;
        if (count || (done && !last))
            return done < 0 ? int(done) : count;
    }
}

} // namespace spinio::net

#endif
