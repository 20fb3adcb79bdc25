// event.h: event sets: a group waits for many sockets at once, and each event goes to one group.
//
//     int events = net::set(net::thread(), handle);           // or spinio_net_set() on the host
//     net::add(g, handle, events, listener, net::IN);
//     net::Ready ready;
//     while (net::wait(g, handle, events, &ready, 1, -1) > 0)
//         ... a new connection (ready.events == NEW) or a ready one: serve it ...  net::rearm(g, handle, ready.s);
//
// crates/ring/src/event.rs explains the ring. The group that has the lock reads host memory; the others look at the words of
// the set in device memory:
//
//   proxy ── ring in host memory ── holder of the lock: copies ── claim: compare-and-swap of head ── one group
#ifndef SPINIO_NET_EVENT_H
#define SPINIO_NET_EVENT_H

#include <spinio/net/control.h>

namespace spinio::net {

struct Ready {
    int s, events;
    int listener; // of a new connection, else 0
};

namespace detail {

__device__ inline layout::DeviceSet *device_set(const Handle &net, int set)
{
    auto sets = reinterpret_cast<layout::DeviceSet *>(uintptr_t(net.device) + layout::device_sets(net.sockets, net.mailboxes));
    return sets + (set - 1);
}

__device__ inline uint64_t *event_words(const Handle &net, int set)
{
    return pinned_words(net, layout::event_sets(net.sockets, net.mailboxes) + size_t(set - 1) * layout::event_words_bytes);
}

__device__ inline uint64_t *event_ring(const Handle &net, int set)
{
    return pinned_words(net, layout::event_sets(net.sockets, net.mailboxes) + size_t(set) * layout::page);
}

// 0, or -EBADF.
__device__ inline int find_set(const Handle &net, int set)
{
    if (set <= 0 || unsigned(set) > layout::event_sets_of_a_net)
        return -EBADF;
    uint64_t *known = &device_set(net, set)->known;
    if (load_acquire_device(known))
        return 0;
    if (!load_acquire_system(event_words(net, set) + layout::event_made))
        return -EBADF;
    store_release_device(known, 1);
    return 0;
}

// Claims at most `max` events among the copies, and leaves out those of closed sockets; false if there were none.
__device__ inline bool claim_events(const Handle &net, layout::DeviceSet *set, Ready *ready, int max, int &count)
{
    for (;;) {
        uint64_t head = load_acquire_device(&set->head), tail = load_acquire_device(&set->tail);
        uint64_t there = tail - head < uint64_t(max) ? tail - head : uint64_t(max);
        if (!there)
            return false;
        for (uint64_t i = 0; i < there; i++) {
            const uint64_t *entry = set->copies + (head + i) % layout::events * 2;
            uint64_t e0 = load_relaxed_device(entry), e1 = load_relaxed_device(entry + 1);
            ready[i] = {int(uint32_t(e0)), int(e0 >> 32 & 0xffff), int(uint32_t(e1))};
        }
        if (compare_exchange_device(&set->head, head, head + there) != head)
            continue;
        count = 0;
        for (uint64_t i = 0; i < there; i++) {
            if (find(net, ready[i].s))
                continue;
            if (ready[i].events & NEW)
                inherit_time_limits(net, ready[i].listener, ready[i].s);
            ready[count++] = ready[i];
        }
        return true;
    }
}

// With the lock: moves entries from host memory into the copies.
__device__ inline bool gather_events(const Handle &net, int number, layout::DeviceSet *set)
{
    uint64_t *ring = event_ring(net, number);
    uint64_t begin = load_relaxed_device(&set->tail), tail = begin, head = load_acquire_device(&set->head);
    for (; tail - head < layout::events; tail++) {
        uint64_t *entry = ring + tail % layout::events * 2, *copy = set->copies + tail % layout::events * 2;
        uint64_t e0 = load_acquire_system(entry), lap = tail / layout::events % 2 ? 0 : layout::lap_bit;
        if ((e0 & layout::lap_bit) != lap)
            break;
        // The second word was there before the first one.
        store_relaxed_device(copy, e0 & ~layout::lap_bit);
        store_relaxed_device(copy + 1, e0 >> 32 & NEW ? load_acquire_system(entry + 1) : 0);
    }
    if (tail != begin)
        store_release_device(&set->tail, tail);
    if (tail - set->said >= layout::events / 4) {
        set->said = tail;
        store_release_system(event_words(net, number) + layout::event_taken, tail);
    }
    return tail != begin;
}

// On the leader alone.
__device__ inline int wait_for_events(const Handle &net, int number, Ready *ready, int max, int64_t ns)
{
    if (int failed = find_set(net, number))
        return failed;
    if (max <= 0)
        return -EINVAL;
    layout::DeviceSet *set = device_set(net, number);
    uint64_t deadline = ns > 0 ? nanoseconds() + uint64_t(ns) : 0;
    bool locked = false;
    int result = 0;
    Backoff waiting;
    unsigned looks = 0;
    for (;;) {
        if (claim_events(net, set, ready, max, result)) {
            if (result)
                break;
            continue;
        }
        locked = locked || compare_exchange_device(&set->lock, 0, 1) == 0;
        if (locked) {
            if (gather_events(net, number, set))
                continue;
            if (looks++ % polls_a_stop == 0 && stopped(net))
                store_release_device(&set->stopped, 1);
            if (looks == polls_of_a_long_wait)
                tell_wait(event_words(net, number) + layout::event_waits, 0);
        }
        result = load_acquire_device(&set->stopped) ? -ESHUTDOWN : 0;
        if (result || ns == 0 || (deadline && nanoseconds() > deadline))
            break;
        waiting.pause();
    }
    if (looks >= polls_of_a_long_wait)
        store_published(event_words(net, number) + layout::event_waits, 0);
    if (locked)
        store_release_device(&set->lock, 0);
    return result;
}

} // namespace detail

// A new event set, or -errno; ENOBUFS: a net has 16. It lives as long as the net.
template <typename Group>
__device__ int set(Group group, const Handle &net)
{
    SPINIO_CHECK_CALL(group, "set", net);
    return detail::call_together(group, net, {layout::call_set, 0, 0, 0, nullptr});
}

// Puts a socket into a set, for IN, OUT or RDHUP, and arms it; 0 takes it out. A socket is in one set at most. The connections
// of a listening socket come as events, and are in the set for the same events, not armed.
template <typename Group>
__device__ int add(Group group, const Handle &net, int set, int s, int events)
{
    SPINIO_CHECK_CALL(group, "add", net, set, s, events);
    if (events & ~0xffff)
        return -EINVAL;
    group.sync();
    int64_t failed = 0;
    if (group.leads()) {
        failed = detail::find_set(net, set);
        if (!failed)
            detail::publish_received(net, s);
    }
    if ((failed = share(group, failed)))
        return int(failed);
    int64_t result = detail::call_together(group, net, {layout::call_add, s, uint32_t(set) << 16 | uint32_t(events), 0, nullptr});
    if (group.leads() && !result && events) {
        detail::find_late_end(net, s);
        result = detail::rearm_if_peer(net, s, layout::doorbell_armed);
    }
    return int(share(group, result));
}

// Arms a socket of a set: it makes an event once it is ready, at once if it is ready now.
template <typename Group>
__device__ int rearm(Group group, const Handle &net, int s)
{
    SPINIO_CHECK_CALL(group, "rearm", net, s);
    int64_t result = 0;
    // What the group has received before has to be consumed for the proxy too.
    group.sync();
    if (group.leads()) {
        result = detail::find(net, s);
        if (!result) {
            detail::publish_received(net, s);
            detail::find_late_end(net, s);
        }
        if (!result && load_acquire_device(&detail::device_socket(net, s)->peer))
            result = detail::rearm_if_peer(net, s);
        else if (!result)
            result = detail::ring(net, layout::doorbell_rearm, detail::index_of(s), detail::epoch_of(s), 0);
    }
    return int(share(group, result));
}

// Waits until sockets of a set are ready, at most `ns` nanoseconds, without an end if that is negative. The leader stores at
// most `max` events, which no other group gets; returns how many, 0 after that time, or -errno.
template <typename Group>
__device__ int wait(Group group, const Handle &net, int set, Ready *ready, int max, int64_t ns)
{
    SPINIO_CHECK_CALL(group, "wait", net, set, max, ns);
    int64_t result = 0;
    if (group.leads())
        result = detail::wait_for_events(net, set, ready, max, ns);
    return int(share(group, result));
}

} // namespace spinio::net

#endif
