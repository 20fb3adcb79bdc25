// doorbell.h: a kernel tells the proxy which socket has something new. crates/ring/src/doorbell.rs explains the queue.
//
// What the entry is about has to be visible before the claim, since nothing between claim and entry may wait. On a GPU that
// is one fence, and the words of the entry are relaxed stores: two release stores would wait for the bus twice. On the
// emulated device they are release stores, which ThreadSanitizer understands.
#ifndef SPINIO_NET_DOORBELL_H
#define SPINIO_NET_DOORBELL_H

#include <cerrno>

#include <spinio/net/layout.h>
#include <spinio/wait.h>
#include <spinio/word.h>

namespace spinio::net::detail {

// How many polls in vain before the stop word is looked at, which is another read of host memory.
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
    return load_acquire_system(pinned_words(net, 0) + layout::header_stop);
}

__device__ inline void publish()
{
#if defined(__CUDACC__)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

__device__ inline void store_published(uint64_t *at, uint64_t value)
{
#if defined(__CUDACC__)
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value) : "memory");
#else
    store_release_system(at, value);
#endif
}

// Rings the doorbell; -ESHUTDOWN if the queue is full and the net is stopped.
__device__ inline int ring(const Handle &net, layout::Doorbell operation, uint32_t socket, uint32_t epoch, uint64_t position)
{
    uint64_t *claims = device_words(net, 0);
    uint64_t *tail = claims + layout::claims_doorbell_tail, *seen = claims + layout::claims_doorbell_head;
    publish();
    Backoff waiting;
    for (unsigned polls = 0;;) {
        uint64_t ticket = load_acquire_device(tail);
        if (ticket - load_acquire_device(seen) >= layout::doorbells) {
            uint64_t head = load_acquire_system(pinned_words(net, 0) + layout::header_doorbell_head);
            store_release_device(seen, head);
            if (ticket - head >= layout::doorbells) {
                if (++polls % polls_a_stop == 0 && stopped(net))
                    return -ESHUTDOWN;
                waiting.pause();
                continue;
            }
        }
        if (compare_exchange_device(tail, ticket, ticket + 1) != ticket)
            continue;
        uint64_t lap = ticket / layout::doorbells % 2 ? 0 : layout::lap_bit;
        uint64_t *entry = pinned_words(net, layout::page) + ticket % layout::doorbells * 2;
        store_published(entry, position | uint64_t(operation) << layout::position_bits | lap);
        store_published(entry + 1, socket | uint64_t(epoch) << 32 | lap);
        return 0;
    }
}

} // namespace spinio::net::detail

#endif
