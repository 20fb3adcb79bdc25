// wait.h: how a thread of a kernel waits for something that another thread, a block, a grid or the CPU will do.
//
//     spinio::Backoff waiting;
//     while (spinio::load_acquire_system(word) != wanted)
//         waiting.pause();
//
// On a GPU a pause sleeps, twice as long each time, up to `most` nanoseconds; up to 64 for the first `eager` pauses, since what
// comes soon should be seen soon. On the emulated device other threads of the block run meanwhile, and if all of them wait, the
// CPU thread sleeps: a thread that polls without a pause, or __nanosleep(), would never see the change there.
//
// Blocks that wait for other blocks must be resident: launch_resident() in kernel.h.
#ifndef SPINIO_WAIT_H
#define SPINIO_WAIT_H

#include <spinio/kernel.h>

#if !defined(__CUDACC__)
#include <ctime>
#endif

// A function that is called, not inlined: one that waits, or is called seldom, should take no registers of its callers. Its arguments
// are values: what a reference refers to has to be in local memory, also while others use it, and a load with acquire order takes
// that out of the L1 cache.
#if defined(__CUDACC__)
#define SPINIO_OUTLINE __noinline__
#else
#define SPINIO_OUTLINE
#endif

namespace spinio {

class Backoff {
public:
    __device__ explicit Backoff(unsigned most = 2048, unsigned eager = 64) : most(most), eager(eager) {}

    // Once in a loop, after each look that was in vain.
    __device__ void pause()
    {
#if defined(__CUDA_ARCH__)
        __nanosleep(time);
#elif !defined(__CUDACC__)
        emulation::current_block->pause(time == first);
#endif
        const unsigned limit = eager && most > 64 ? 64 : most;
        time = 2 * time < limit ? 2 * time : limit;
        eager -= eager != 0;
    }

private:
    static constexpr unsigned first = 32;
    unsigned most, eager, time = first;
};

// A single pause, for loops that have no place for a Backoff.
__device__ inline void wait_hint()
{
#if defined(__CUDA_ARCH__) || !defined(__CUDACC__)
    __nanosleep(256);
#endif
}

// Nanoseconds of a clock that is the same for all threads of a kernel; on a GPU it may advance in steps of a microsecond.
__device__ inline unsigned long long nanoseconds()
{
#if defined(__CUDA_ARCH__)
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#elif defined(__CUDACC__)
    return 0;
#else
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000000000 + (unsigned long long)now.tv_nsec;
#endif
}

} // namespace spinio

#endif
