// ends.h: the two ends of a connection inside a net, or over shared memory: where they are and what their words
// say. crates/ring/src/peer.rs explains the words, peer.h has what sockets do with them.
#ifndef SPINIO_NET_ENDS_H
#define SPINIO_NET_ENDS_H

#include <spinio/net/doorbell.h>

namespace spinio::net::detail {

// Of a tail.
__device__ inline bool is_reset(uint64_t tail) { return (tail & (layout::end_closed | layout::end_reset)) == (layout::end_closed | layout::end_reset); }
__device__ inline bool has_message(uint64_t tail) { return (tail & (layout::end_closed | layout::end_message)) == layout::end_message; }

// Of the words of a message that ends at this position: message.h.
__device__ inline uint64_t message_tag(uint64_t position) { return (0x80 | (position & 0x7f)) << 56; }

// The two ends, as one of them sees them.
struct Peer {
    layout::PeerEnd *mine, *theirs;
    unsigned char *receive_ring, *send_ring;
    uint64_t size, generation, first;
    // The other end is outside the net: all is in a granule, in pinned memory.
    bool shared;
    // Or the rings are in device memory, and these are the ends in the granule: what this end writes is there too.
    layout::PeerEnd *my_copy = nullptr, *their_copy = nullptr;

    // `granule`: of the device socket.
    __device__ Peer(const Handle &net, uint64_t word, uint64_t granule)
    {
        uint64_t pair = uint32_t(word >> layout::peer_pair_bit), side = word >> layout::peer_side_bit & 1;
        auto ends = reinterpret_cast<layout::PeerEnd *>(uintptr_t(net.device) + layout::device_ends(net.sockets, net.mailboxes)) + pair * 2;
        auto rings = reinterpret_cast<unsigned char *>(uintptr_t(net.rings)) + ((pair * 2) << (word & 0xff));
        size = uint64_t(1) << (word & 0xff);
        shared = word & layout::shared_bit;
        if (shared) {
            ends = reinterpret_cast<layout::PeerEnd *>(uintptr_t(granule));
            rings = reinterpret_cast<unsigned char *>(uintptr_t(granule)) + layout::page;
        }
        mine = ends + side;
        theirs = ends + (side ^ 1);
        send_ring = rings + side * size;
        receive_ring = rings + (side ^ 1) * size;
        if (word & layout::remote_bit) {
            my_copy = mine;
            their_copy = theirs;
            // Each end stores into the other one's memory, and loads from its own.
            const uintptr_t near = uintptr_t(net.peers) + (pair & 0xffff) * layout::peer_bytes, far = uintptr_t(net.peers) + (pair >> 16) * layout::peer_bytes;
            theirs = reinterpret_cast<layout::PeerEnd *>(near);
            mine = reinterpret_cast<layout::PeerEnd *>(far);
            receive_ring = reinterpret_cast<unsigned char *>(near) + layout::page;
            send_ring = reinterpret_cast<unsigned char *>(far) + layout::page;
        }
        generation = word >> layout::position_bits & ((1 << layout::generation_bits) - 1);
        first = net.first & layout::position_mask;
    }

    __device__ bool is_of(uint64_t word) const
    {
        return ((word >> layout::position_bits ^ generation) & ((1 << layout::generation_bits) - 1)) == 0;
    }

    // Both ends are kernels, and the words in device memory.
    __device__ bool direct() const { return !shared || my_copy; }

    // A word of the other end; if it has written none yet, that says that nothing has happened.
    __device__ uint64_t look(const uint64_t *at) const
    {
        uint64_t word = shared ? load_acquire_system(at) : load_acquire_device(at);
        return is_of(word) ? word : first;
    }

    __device__ uint64_t word_of(uint64_t position, uint64_t flags) const
    {
        return (position & layout::position_mask) | generation << layout::position_bits | flags;
    }

    // Relaxed: the proxies only learn from it that there is something to look at.
    __device__ void copy(uint64_t *at, uint64_t word) const
    {
        if (my_copy)
            store_published(reinterpret_cast<uint64_t *>(my_copy) + (at - reinterpret_cast<uint64_t *>(mine)), word);
    }

    __device__ void store(uint64_t *at, uint64_t position, uint64_t flags) const
    {
        const uint64_t word = word_of(position, flags);
        if (!shared)
            return store_release_device(at, word);
        store_release_system(at, word);
        copy(at, word);
    }

    // The same of a shared end where nothing that was stored before has to be seen with it.
    __device__ void store_relaxed(uint64_t *at, uint64_t position, uint64_t flags) const
    {
        const uint64_t word = word_of(position, flags);
        store_published(at, word);
        copy(at, word);
    }

    // What the other end's process has said at last, or the proxy has said for it, where device memory does not have it.
    __device__ uint64_t last_tail() const
    {
        const uint64_t word = their_copy ? load_acquire_system(&their_copy->tail) : 0;
        return is_of(word) ? word : 0;
    }

    // Begins to use the watch of this end, which wants nothing yet.
    __device__ void open_watch() const
    {
        // The bus has no read-modify-write: the proxy has the watch of a granule.
        if (shared)
            return;
        uint64_t old = load_relaxed_device(&mine->watch);
        while (!is_of(old)) {
            uint64_t seen = compare_exchange_device(&mine->watch, old, generation << layout::position_bits);
            if (seen == old)
                break;
            old = seen;
        }
    }
};

} // namespace spinio::net::detail

#endif
