// For programs that measure calls of the CUDA driver: a clock, and the end after an error.
#ifndef GAIA_DRIVER_H
#define GAIA_DRIVER_H

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

inline double now_ms()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

inline void check(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return;
    std::printf("%s: error %d\n", what, int(result));
    std::exit(1);
}

#endif
