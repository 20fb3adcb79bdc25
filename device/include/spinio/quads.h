// quads.h: copies by the threads of a group, 16 bytes a load.
//
// A group has rank() and size(): net/group.h, and the lanes of gaia_device.h.
#ifndef SPINIO_QUADS_H
#define SPINIO_QUADS_H

#include <spinio/kernel.h>
#include <spinio/standard.h>

namespace spinio {

#if defined(__CUDACC__)
using AliasedWord = uint64_t;
#else
using AliasedWord __attribute__((__may_alias__)) = uint64_t;
#endif

// 16 bytes that one instruction loads.
struct alignas(16) Quad {
    AliasedWord low, high;
};

// Copies units, each thread its part. A thread that waits for each read moves 16 bytes in the time of a read, 0.3 us in device
// memory and 1.2 us in that of the host: so it has several on their way; not more
// than 4 where each thread of a block of 1024 may have 64 registers.
template <unsigned reads = 4, typename Group>
__device__ void copy_quads(Group group, Quad *to, const Quad *from, size_t count)
{
    const unsigned step = group.size();
    const Quad *last = from + count;
    from += group.rank();
    to += group.rank();
    for (; from + (reads - 1) * step < last; from += reads * step, to += reads * step) {
        Quad quads[reads];
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (unsigned k = 0; k < reads; k++)
            quads[k] = from[k * step];
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (unsigned k = 0; k < reads; k++)
            to[k * step] = quads[k];
    }
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (; from < last; from += step, to += step)
        *to = *from;
}

} // namespace spinio

#endif
