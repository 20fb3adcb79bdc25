// net_tile.h: groups of cooperative groups for the tests: the real ones where nvcc compiles, else types with the same members.
#ifndef NET_TILE_H
#define NET_TILE_H

#if defined(__CUDACC__)

#include <cooperative_groups.h>

template <unsigned threads>
__device__ auto tile_of()
{
    return cooperative_groups::tiled_partition<threads>(cooperative_groups::this_thread_block());
}

__device__ inline auto whole_block() { return cooperative_groups::this_thread_block(); }
__device__ inline auto lone_thread() { return cooperative_groups::this_thread(); }

#else

#include <spinio/kernel.h>

template <unsigned threads>
struct EmulatedTile {
    static unsigned lane() { return spinio::emulation::current_block->lane(); }
    static unsigned first() { return lane() / threads * threads; }
    static unsigned mask() { return unsigned(((uint64_t(1) << threads) - 1) << first()); }

    static unsigned thread_rank() { return lane() - first(); }
    static constexpr unsigned size() { return threads; }
    static void sync() { __syncwarp(mask()); }
    template <typename T>
    T shfl(T value, int source) const
    {
        return __shfl_sync(mask(), value, source, int(threads));
    }
    int any(int yes) const { return __any_sync(mask(), yes); }
    unsigned ballot(int yes) const { return __ballot_sync(mask(), yes) >> first(); }
};

struct EmulatedThreadBlock {
    static uint3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static unsigned thread_rank() { return threadIdx.x; }
    static unsigned size() { return blockDim.x; }
    static void sync() { __syncthreads(); }
};

template <unsigned threads>
__device__ EmulatedTile<threads> tile_of()
{
    return {};
}

__device__ inline EmulatedThreadBlock whole_block() { return {}; }
__device__ inline EmulatedTile<1> lone_thread() { return {}; }

#endif

#endif
