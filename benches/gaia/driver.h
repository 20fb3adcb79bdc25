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

// The contexts of the first two GPUs, that of the second one current; false, and a sentence, without two.
inline bool begin_on_second_of_two()
{
    int devices = 0;
    check(cuInit(0), "cuInit");
    check(cuDeviceGetCount(&devices), "cuDeviceGetCount");
    if (devices < 2) {
        std::printf("skipped: there is one GPU\n");
        return false;
    }
    CUcontext contexts[2];
    for (int device : {0, 1})
        check(cuDevicePrimaryCtxRetain(&contexts[device], device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(contexts[1]), "cuCtxSetCurrent");
    return true;
}

#endif
