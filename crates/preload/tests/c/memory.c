/* The allocator shim: memory of the emulated GPU, or with SPINIO_TEST_DEVICE=cuda of a real one. */
#define _GNU_SOURCE
#include "memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <spinio.h>

#include "../../../../benches/common/preloaded.h"

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, FIND(spinio_last_error)());
    exit(1);
}

/* ---- CUDA, without its headers --------------------------------------------------------------------------------- */

static struct {
    int on;
    void *context;
    int (*set_current)(void *);
    int (*alloc)(unsigned long long *, size_t);
    int (*free)(unsigned long long);
    int (*put)(unsigned long long, const void *, size_t);
    int (*get)(void *, unsigned long long, size_t);
} cuda;

static void *driver_call(void *driver, const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "the CUDA driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: CUDA error %d\n", what, result);
        exit(1);
    }
}

__attribute__((constructor)) static void choose(void)
{
    const char *device = getenv("SPINIO_TEST_DEVICE");
    void *driver;
    if (!device || strcmp(device, "cuda"))
        return;
    if (!(driver = dlopen("libcuda.so.1", RTLD_NOW))) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    must(((int (*)(unsigned))driver_call(driver, "cuInit"))(0), "cuInit");
    must(((int (*)(void **, int))driver_call(driver, "cuDevicePrimaryCtxRetain"))(&cuda.context, 0), "cuDevicePrimaryCtxRetain");
    cuda.set_current = (int (*)(void *))driver_call(driver, "cuCtxSetCurrent");
    cuda.alloc = (int (*)(unsigned long long *, size_t))driver_call(driver, "cuMemAlloc_v2");
    cuda.free = (int (*)(unsigned long long))driver_call(driver, "cuMemFree_v2");
    cuda.put = (int (*)(unsigned long long, const void *, size_t))driver_call(driver, "cuMemcpyHtoD_v2");
    cuda.get = (int (*)(void *, unsigned long long, size_t))driver_call(driver, "cuMemcpyDtoH_v2");
    cuda.on = 1;
}

/* ---- both devices ---------------------------------------------------------------------------------------------- */

void *device_alloc(size_t size)
{
    unsigned long long address;
    if (cuda.on) {
        must(cuda.set_current(cuda.context), "cuCtxSetCurrent"); /* in every allocating thread */
        must(cuda.alloc(&address, size), "cuMemAlloc");
        return (void *)address;
    }
    unsigned flags = getenv("SPINIO_TEST_HOST_MAPPED") ? SPINIO_MEM_HOST_MAPPED : 0;
    void *memory = FIND(spinio_mem_alloc)("emulated", size, flags);
    if (!memory)
        fail("spinio_mem_alloc");
    return memory;
}

void device_free(void *memory)
{
    if (cuda.on)
        must(cuda.free((unsigned long long)memory), "cuMemFree");
    else if (FIND(spinio_mem_free)(memory))
        fail("spinio_mem_free");
}

void device_put(void *device, const void *host, size_t size)
{
    if (cuda.on)
        must(cuda.put((unsigned long long)device, host, size), "cuMemcpyHtoD");
    else if (FIND(spinio_mem_copy)(device, host, size))
        fail("spinio_mem_copy to the device");
}

void device_get(void *host, const void *device, size_t size)
{
    if (cuda.on)
        must(cuda.get(host, (unsigned long long)device, size), "cuMemcpyDtoH");
    else if (FIND(spinio_mem_copy)(host, device, size))
        fail("spinio_mem_copy from the device");
}

int device_has_descriptors(void)
{
    return cuda.on;
}
