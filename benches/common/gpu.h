/* The part of the CUDA driver that the benchmarks need, opened at run time: they compile without CUDA. */
#ifndef GPU_H
#define GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t gpu_ptr;

#define GPU_FUNCTIONS(F)                                                                                               \
    F(cuInit, (unsigned))                                                                                              \
    F(cuDeviceGet, (int *, int))                                                                                       \
    F(cuDeviceGetName, (char *, int, int))                                                                             \
    F(cuDriverGetVersion, (int *))                                                                                     \
    F(cuGetErrorName, (int, const char **))                                                                            \
    F(cuDevicePrimaryCtxRetain, (void **, int))                                                                        \
    F(cuDevicePrimaryCtxReset_v2, (int))                                                                               \
    F(cuCtxSetCurrent, (void *))                                                                                       \
    F(cuCtxGetFlags, (unsigned *))                                                                                     \
    F(cuCtxSynchronize, (void))                                                                                        \
    F(cuMemAlloc_v2, (gpu_ptr *, size_t))                                                                              \
    F(cuMemFree_v2, (gpu_ptr))                                                                                         \
    F(cuMemAllocManaged, (gpu_ptr *, size_t, unsigned))                                                                \
    F(cuMemAllocAsync, (gpu_ptr *, size_t, void *))                                                                    \
    F(cuMemFreeAsync, (gpu_ptr, void *))                                                                               \
    F(cuMemHostAlloc, (void **, size_t, unsigned))                                                                     \
    F(cuMemFreeHost, (void *))                                                                                         \
    F(cuMemHostRegister_v2, (void *, size_t, unsigned))                                                                \
    F(cuMemHostUnregister, (void *))                                                                                   \
    F(cuMemcpyHtoD_v2, (gpu_ptr, const void *, size_t))                                                                \
    F(cuMemcpyDtoH_v2, (void *, gpu_ptr, size_t))                                                                      \
    F(cuMemcpyHtoDAsync_v2, (gpu_ptr, const void *, size_t, void *))                                                   \
    F(cuMemcpyDtoDAsync_v2, (gpu_ptr, gpu_ptr, size_t, void *))                                                        \
    F(cuMemsetD8_v2, (gpu_ptr, unsigned char, size_t))                                                                 \
    F(cuMemsetD8Async, (gpu_ptr, unsigned char, size_t, void *))                                                       \
    F(cuStreamCreate, (void **, unsigned))                                                                             \
    F(cuStreamDestroy_v2, (void *))                                                                                    \
    F(cuStreamSynchronize, (void *))                                                                                   \
    F(cuStreamBeginCapture_v2, (void *, int))                                                                          \
    F(cuStreamEndCapture, (void *, void **))                                                                           \
    F(cuGraphDestroy, (void *))                                                                                        \
    F(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                                              \
    F(cuGraphLaunch, (void *, void *))                                                                                 \
    F(cuGraphExecDestroy, (void *))                                                                                    \
    F(cuLaunchHostFunc, (void *, void (*)(void *), void *))                                                            \
    F(cuMemAddressReserve, (gpu_ptr *, size_t, size_t, gpu_ptr, unsigned long long))                                   \
    F(cuMemCreate, (unsigned long long *, size_t, const void *, unsigned long long))                                   \
    F(cuMemMap, (gpu_ptr, size_t, size_t, unsigned long long, unsigned long long))                                     \
    F(cuMemSetAccess, (gpu_ptr, size_t, const void *, size_t))

/* A program that needs more functions defines this before it includes the header. */
#ifndef GPU_MORE
#define GPU_MORE(F)
#endif

static struct {
#define F(name, args) int (*name) args;
    GPU_FUNCTIONS(F)
    GPU_MORE(F)
#undef F
    int device;
    void *context;
} gpu;

static const char *gpu_error(int code) {
    const char *name = NULL;
    if (gpu.cuGetErrorName)
        gpu.cuGetErrorName(code, &name);
    return name ? name : "unknown";
}

#define GPU(call)                                                                                                      \
    do {                                                                                                               \
        int code_ = gpu.call;                                                                                          \
        if (code_) {                                                                                                   \
            fprintf(stderr, "%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, code_, gpu_error(code_));                 \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Opens the driver; exits with status 4 if there is none. */
static void gpu_load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "no CUDA driver: %s\n", dlerror());
        exit(4);
    }
#define F(name, args)                                                                                                  \
    if (!(gpu.name = (int(*) args)dlsym(library, #name))) {                                                            \
        fprintf(stderr, "the driver lacks %s\n", #name);                                                               \
        exit(4);                                                                                                       \
    }
    GPU_FUNCTIONS(F)
    GPU_MORE(F)
#undef F
}

/* The primary context of device 0, as the CUDA runtime uses it. */
static inline void gpu_open(void) {
    gpu_load();
    GPU(cuInit(0));
    GPU(cuDeviceGet(&gpu.device, 0));
    GPU(cuDevicePrimaryCtxRetain(&gpu.context, gpu.device));
    GPU(cuCtxSetCurrent(gpu.context));
}

#endif
