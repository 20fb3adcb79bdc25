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

// The 16 bytes that begin `bits` after the first of three words; bits: 0 to 56.
__device__ inline Quad shifted_quad(const AliasedWord *words, unsigned bits)
{
    const uint64_t low = words[0], middle = words[1], high = words[2];
    if (bits == 0)
        return {low, middle};
    return {low >> bits | middle << (64 - bits), middle >> bits | high << (64 - bits)};
}

// Copies units, each thread its part.
//
// A thread that waits for each read moves 16 bytes in the time of a read, 0.3 us in device memory and 1.2 us in that of the host: so it
// has several on their way; not more than 4 where each thread of a block of 1024 may have 64 registers.
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

// The same of bytes that begin `bits` after the first word; it reads the word after the last unit too. Of the three words that a unit
// takes, two are those of a neighbour: the L1 cache has them. With 2 on their way one block of 512 threads reads 7.5 GB/s from the host,
// with 4 it reads 10, but kernels that receive would need 14 more registers (nvcc 13, sm_90).
template <unsigned reads = 2, typename Group>
__device__ void copy_shifted_quads(Group group, Quad *to, const AliasedWord *from, size_t count, unsigned bits)
{
    const unsigned step = group.size();
    const Quad *last = to + count;
    from += 2 * group.rank();
    to += group.rank();
    for (; to + (reads - 1) * step < last; from += 2 * reads * step, to += reads * step) {
        Quad quads[reads];
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (unsigned k = 0; k < reads; k++)
            quads[k] = shifted_quad(from + 2 * k * step, bits);
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (unsigned k = 0; k < reads; k++)
            to[k * step] = quads[k];
    }
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (; to < last; from += 2 * step, to += step)
        *to = shifted_quad(from, bits);
}

} // namespace spinio

#endif
