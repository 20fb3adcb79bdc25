// group.h: the threads that make a call together: a block, a warp or one thread.
//
//     recv(net::block(), ...)      all threads of the block call, converged, with equal arguments, and get the same result
//     recv(net::warp(), ...)       the 32 threads of a warp
//     recv(net::thread(), ...)     this thread alone
//
// One thread, the leader, talks to the proxy; all copy. Pair is what the leader tells the others.
//
// Known flaw: a warp has 32 threads that have not ended; cooperative-groups objects are not groups yet.
#ifndef SPINIO_NET_GROUP_H
#define SPINIO_NET_GROUP_H

#include <spinio/kernel.h>

namespace spinio::net {

struct Pair {
    int64_t value;
    uint64_t position;
};

// wide(): whether its first 32 threads are a warp, which can read a line at once.
struct Thread {
    __device__ bool wide() const { return false; }
    __device__ bool leads() const { return true; }
    __device__ unsigned rank() const { return 0; }
    __device__ unsigned size() const { return 1; }
    __device__ void sync() const {}
    __device__ Pair share(Pair pair) const { return pair; }
};

struct Warp {
    __device__ bool wide() const { return true; }
    __device__ bool leads() const { return rank() == 0; }
    __device__ unsigned rank() const { return linear() % 32; }
    __device__ unsigned size() const { return 32; }
    __device__ void sync() const { __syncwarp(); }

    __device__ Pair share(Pair pair) const
    {
        pair.value = int64_t(__shfl_sync(0xffffffffu, (unsigned long long)pair.value, 0));
        pair.position = __shfl_sync(0xffffffffu, (unsigned long long)pair.position, 0);
        // Shuffles do not order memory: what the leader has seen is seen by all after this.
        __syncwarp();
        return pair;
    }

    __device__ static unsigned linear()
    {
        return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    }
};

struct Block {
    __device__ bool wide() const { return size() >= 32; }
    __device__ bool leads() const { return rank() == 0; }
    __device__ unsigned rank() const { return Warp::linear(); }
    __device__ unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    __device__ void sync() const { __syncthreads(); }

    __device__ Pair share(Pair pair) const
    {
        __shared__ int64_t value;
        __shared__ uint64_t position;
        if (leads()) {
            value = pair.value;
            position = pair.position;
        }
        __syncthreads();
        pair = {value, position};
        // The next share may begin only after all have read.
        __syncthreads();
        return pair;
    }
};

__device__ inline Block block() { return {}; }
__device__ inline Warp warp() { return {}; }
__device__ inline Thread thread() { return {}; }

// Tells all threads what the leader knows.
template <typename Group>
__device__ int64_t share(Group group, int64_t value)
{
    return group.share({value, 0}).value;
}

#if defined(__CUDACC__)
using AliasedWord = uint64_t;
#else
using AliasedWord __attribute__((__may_alias__)) = uint64_t;
#endif

// Copies bytes, each thread its part; not finished before the next sync().
template <typename Group>
__device__ void copy(Group group, unsigned char *to, const unsigned char *from, size_t bytes)
{
    size_t step = group.size(), rank = group.rank(), head = 0, words = 0;
    if (((uintptr_t(to) ^ uintptr_t(from)) & 7) == 0 && bytes >= 16) {
        head = (8 - uintptr_t(to) % 8) % 8;
        words = (bytes - head) / 8;
    }
    for (size_t i = rank; i < head; i += step)
        to[i] = from[i];
    auto to_words = reinterpret_cast<AliasedWord *>(to + head);
    auto from_words = reinterpret_cast<const AliasedWord *>(from + head);
    for (size_t i = rank; i < words; i += step)
        to_words[i] = from_words[i];
    for (size_t i = head + words * 8 + rank; i < bytes; i += step)
        to[i] = from[i];
}

} // namespace spinio::net

#endif
