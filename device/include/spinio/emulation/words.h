// words.h: CUDA C++'s additions to the language, as far as the emulation has them.
//
// Shared memory is static memory of the CPU thread that runs the block. It keeps the contents that the last block left; on a
// GPU they are undefined: no kernel may rely on zeros. `extern __shared__` does not exist, and neither does `__noinline__`,
// which headers of newer C++ libraries write inside `__attribute__`; `__attribute__((noinline))` is right everywhere.
#ifndef SPINIO_EMULATION_WORDS_H
#define SPINIO_EMULATION_WORDS_H

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <x86intrin.h>

#include <spinio/emulation/block.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define threadIdx (::spinio::emulation::thread_index())
#define blockIdx (::spinio::emulation::here.block)
#define blockDim (::spinio::emulation::here.threads)
#define gridDim (::spinio::emulation::here.blocks)

inline void __syncthreads()
{
    spinio::emulation::current_block->barrier(false);
}

inline int __syncthreads_count(int yes)
{
    return int(spinio::emulation::current_block->barrier(yes != 0).first);
}

inline int __syncthreads_or(int yes)
{
    return __syncthreads_count(yes) != 0;
}

inline int __syncthreads_and(int yes)
{
    auto [agreed, asked] = spinio::emulation::current_block->barrier(yes != 0);
    return agreed == asked;
}

inline void __threadfence()
{
    spinio::emulation::fence();
}

inline void __threadfence_block()
{
    __threadfence();
}

inline void __threadfence_system()
{
    __threadfence();
}

// Other threads run first. How long a thread sleeps is up to the block: see block.h.
inline void __nanosleep(unsigned)
{
    spinio::emulation::current_block->pause(false);
}

// Cycles of this processor.
inline long long clock64()
{
    return (long long)__rdtsc();
}

inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}

inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}

inline int __clz(int x)
{
    return x ? __builtin_clz(unsigned(x)) : 32;
}

inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}

#endif
