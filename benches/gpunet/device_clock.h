// device_clock.h: times that a kernel takes, in ticks of its multiprocessor, and as nanoseconds.
#ifndef GPUNET_DEVICE_CLOCK_H
#define GPUNET_DEVICE_CLOCK_H

#include <algorithm>
#include <cstddef>
#include <vector>

#include <spinio/wait.h>

// A clock of fine steps: cycles of the multiprocessor on a GPU.
__device__ inline unsigned long long ticks()
{
#if defined(__CUDA_ARCH__)
    return (unsigned long long)clock64();
#else
    return spinio::nanoseconds();
#endif
}

// What turns ticks into nanoseconds: both clocks at the beginning and the end of a kernel.
struct Clocks {
    unsigned long long ticks[2], ns[2];
    __device__ void read(int at)
    {
        ticks[at] = ::ticks();
        ns[at] = spinio::nanoseconds();
    }
    double ns_a_tick() const { return double(ns[1] - ns[0]) / double(ticks[1] - ticks[0] ? ticks[1] - ticks[0] : 1); }
};

// Microseconds of what a kernel timed, without its first ones.
static std::vector<double> device_times(const unsigned long long *ticks, size_t count, const Clocks &clocks)
{
    std::vector<double> times;
    for (size_t i = std::min<size_t>(count / 10, 100); i < count; i++)
        times.push_back(double(ticks[i]) * clocks.ns_a_tick() * 1e-3);
    return times;
}

#endif
