// group.h: the threads that make a call together: a block, a warp or one thread.
//
//     recv(net::block(), ...)      all threads of the block call, converged, with equal arguments, and get the same result
//     recv(net::warp(), ...)       the 32 threads of a warp
//     recv(net::thread(), ...)     this thread alone
//     recv(net::group(tile), ...)  those of a group of <cooperative_groups.h>: thread_block, thread_block_tile of at most 32
//                                  threads, coalesced_group, this_thread()
//
// One thread, the leader, talks to the proxy; all copy. Outcome is what the leader tells the others.
//
// Known flaw: a warp has 32 threads that have not ended.
#ifndef SPINIO_NET_GROUP_H
#define SPINIO_NET_GROUP_H

#include <spinio/kernel.h>
#include <spinio/quads.h>
#include <spinio/standard.h>
#include <spinio/wait.h>

namespace spinio::net {

// `ring`: where it is, or 0: Ring in stream.h. `message`: where the words of a short message are, or 0: message.h.
struct Outcome {
    int64_t value;
    uint64_t position, ring, message = 0;
};

struct Thread {
    __device__ bool leads() const { return true; }
    __device__ unsigned rank() const { return 0; }
    __device__ unsigned size() const { return 1; }
    __device__ void sync() const {}
    __device__ bool any(bool yes) const { return yes; }
    __device__ Outcome share(Outcome outcome) const { return outcome; }
};

struct Warp {
    __device__ bool leads() const { return rank() == 0; }
    __device__ unsigned rank() const { return linear() % 32; }
    __device__ unsigned size() const { return 32; }
    __device__ void sync() const { __syncwarp(); }

    // Whether one of them says so; and a sync().
    __device__ bool any(bool yes) const
    {
        const bool some = __any_sync(0xffffffffu, yes) != 0;
        __syncwarp();
        return some;
    }

    __device__ Outcome share(Outcome outcome) const
    {
        outcome.value = int64_t(__shfl_sync(0xffffffffu, (unsigned long long)outcome.value, 0));
        outcome.position = __shfl_sync(0xffffffffu, (unsigned long long)outcome.position, 0);
        outcome.ring = __shfl_sync(0xffffffffu, (unsigned long long)outcome.ring, 0);
        outcome.message = __shfl_sync(0xffffffffu, (unsigned long long)outcome.message, 0);
        // Shuffles do not order memory: what the leader has seen is seen by all after this.
        __syncwarp();
        return outcome;
    }

    __device__ static unsigned linear()
    {
        return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    }
};

struct Block {
    __device__ bool leads() const { return rank() == 0; }
    __device__ unsigned rank() const { return Warp::linear(); }
    __device__ unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    __device__ void sync() const { __syncthreads(); }
    __device__ bool any(bool yes) const { return __syncthreads_or(yes) != 0; }

    __device__ Outcome share(Outcome outcome) const
    {
        __shared__ int64_t value;
        __shared__ uint64_t position, ring, message;
        if (leads()) {
            value = outcome.value;
            position = outcome.position;
            ring = outcome.ring;
            message = outcome.message;
        }
        __syncthreads();
        outcome = {value, position, ring, message};
        // The next share may begin only after all have read.
        __syncthreads();
        return outcome;
    }
};

// Threads of one warp that cooperative groups have put together.
template <typename G>
struct Tile {
    G lanes;

    __device__ bool leads() const { return rank() == 0; }
    __device__ unsigned rank() const { return unsigned(lanes.thread_rank()); }
    __device__ unsigned size() const { return unsigned(lanes.size()); }
    __device__ void sync() const { lanes.sync(); }

    // Whether one of them says so; and a sync().
    __device__ bool any(bool yes) const
    {
        const bool some = lanes.any(yes) != 0;
        lanes.sync();
        return some;
    }

    __device__ Outcome share(Outcome outcome) const
    {
        outcome.value = int64_t(lanes.shfl((unsigned long long)outcome.value, 0));
        outcome.position = lanes.shfl((unsigned long long)outcome.position, 0);
        outcome.ring = lanes.shfl((unsigned long long)outcome.ring, 0);
        outcome.message = lanes.shfl((unsigned long long)outcome.message, 0);
        // As in a warp.
        lanes.sync();
        return outcome;
    }
};

__device__ inline Block block() { return {}; }
__device__ inline Warp warp() { return {}; }
__device__ inline Thread thread() { return {}; }

// The group that a group of cooperative groups is here. It is known by its members, so that this needs none of their header. Groups of
// more than one block, tiles of more than one warp, and a thread_group, whose kind is known only at run time, do not compile.
template <typename G>
__device__ auto group(const G &lanes) -> decltype(lanes.shfl(0, 0), lanes.ballot(0), Tile<G>{lanes})
{
    return {lanes};
}

template <typename G>
__device__ auto group(const G &block) -> decltype(block.group_index(), Block())
{
    return {};
}

// Tells all threads what the leader knows.
template <typename Group>
__device__ int64_t share(Group group, int64_t value)
{
    return group.share({value, 0, 0}).value;
}

// Copies bytes, each thread its part; not finished before the next sync(). In units of 16 bytes of the destination; only units that lie
// wholly inside the source are read. Positions of a stream are of any alignment: loopback TCP delivers 65483 bytes at a time.
template <typename Group>
__device__ SPINIO_OUTLINE void copy(Group group, unsigned char *to, const unsigned char *from, size_t bytes)
{
    size_t head = 0, inner = 0; // bytes
    if (bytes >= 64) {
        head = (16 - uintptr_t(to) % 16) % 16;
        const unsigned within = unsigned(uintptr_t(from + head) % 8); // a word of the source
        if (within > head)
            head += 16;
        inner = (bytes - head) & ~size_t(15);
        auto quads = reinterpret_cast<Quad *>(to + head);
        if (uintptr_t(from + head) % 16 == 0) {
            copy_quads(group, quads, reinterpret_cast<const Quad *>(from + head), inner / 16);
        } else {
            inner -= 16;
            copy_shifted_quads(group, quads, reinterpret_cast<const AliasedWord *>(from + head - within), inner / 16, within * 8);
        }
    }
    for (size_t i = group.rank(); i < head; i += group.size())
        to[i] = from[i];
    for (size_t i = head + inner + group.rank(); i < bytes; i += group.size())
        to[i] = from[i];
}

} // namespace spinio::net

#endif
