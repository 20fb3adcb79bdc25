// doorbell.h: a kernel tells the proxy which socket has something new. crates/ring/src/doorbell.rs explains the queue.
//
// What the entry is about has to be visible before the claim, since nothing between claim and entry may wait. On a GPU that
// is one fence, and the claim and the words of the entry are relaxed: each of them with release order would wait for the bus
// once more. On the emulated device the words are release stores, which ThreadSanitizer understands.
#ifndef SPINIO_NET_DOORBELL_H
#define SPINIO_NET_DOORBELL_H

#include <spinio/net/layout.h>
#include <spinio/standard.h>
#include <spinio/stop.h>
#include <spinio/wait.h>
#include <spinio/word.h>

namespace spinio::net::detail {

// How many polls in vain before the stop word is looked at.
constexpr unsigned polls_a_stop = 16;

__device__ inline uint64_t *pinned_words(const Handle &net, size_t offset)
{
    return reinterpret_cast<uint64_t *>(uintptr_t(net.pinned) + offset);
}

__device__ inline uint64_t *device_words(const Handle &net, size_t offset)
{
    return reinterpret_cast<uint64_t *>(uintptr_t(net.device) + offset);
}

// 0, 1 once the net is stopped, 2 once the proxy has ended.
__device__ inline uint64_t stopped(const Handle &net)
{
    return stop_word(pinned_words(net, 0) + layout::header_stop, device_words(net, 0) + layout::claims_stop);
}

__device__ inline void publish()
{
#if defined(__CUDACC__)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
    emulation::count_release();
#endif
}

__device__ inline void store_published(uint64_t *at, uint64_t value)
{
#if defined(__CUDACC__)
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

// The same in device memory, for threads of this GPU.
__device__ inline void store_published_device(uint64_t *at, uint64_t value)
{
#if defined(__CUDACC__)
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

// The words of an entry but for the lap.
struct Entry {
    uint64_t words[2];
};

__device__ inline Entry entry_of(layout::Doorbell operation, uint32_t socket, uint32_t epoch, uint64_t position)
{
    return {{position | uint64_t(operation) << layout::position_bits, socket | uint64_t(epoch) << 32}};
}

// What a group knows of the queue, perhaps of some time ago.
struct Queue {
    uint64_t ticket, taken;
};

__device__ inline Queue look_at_queue(const Handle &net)
{
    const uint64_t *claims = device_words(net, 0);
    return {load_relaxed_device(claims + layout::claims_doorbell_tail), load_relaxed_device(claims + layout::claims_doorbell_head)};
}

// Claims a place and writes the entry; -ESHUTDOWN if the queue is full and the net is stopped.
__device__ inline int enter(const Handle &net, Entry entry, Queue queue)
{
    uint64_t *claims = device_words(net, 0);
    uint64_t *tail = claims + layout::claims_doorbell_tail, *seen = claims + layout::claims_doorbell_head;
    Backoff waiting;
    for (unsigned polls = 0;; queue = look_at_queue(net)) {
        const uint64_t ticket = queue.ticket;
        if (ticket - queue.taken >= layout::doorbells) {
            uint64_t head = load_acquire_system(pinned_words(net, 0) + layout::header_doorbell_head);
            store_release_device(seen, head);
            if (ticket - head >= layout::doorbells) {
                if (++polls % polls_a_stop == 0 && stopped(net))
                    return -ESHUTDOWN;
                waiting.pause();
                continue;
            }
        }
        if (compare_exchange_relaxed_device(tail, ticket, ticket + 1) != ticket)
            continue;
        uint64_t lap = ticket / layout::doorbells % 2 ? 0 : layout::lap_bit;
        uint64_t *place = pinned_words(net, layout::page) + ticket % layout::doorbells * 2;
        store_published(place, entry.words[0] | lap);
        store_published(place + 1, entry.words[1] | lap);
        return 0;
    }
}

// Rings the doorbell, after what this group has stored before.
__device__ inline int ring(const Handle &net, layout::Doorbell operation, uint32_t socket, uint32_t epoch, uint64_t position)
{
    // The loads are on their way while the fence waits.
    const Queue queue = look_at_queue(net);
    publish();
    return enter(net, entry_of(operation, socket, epoch, position), queue);
}

} // namespace spinio::net::detail

#endif
