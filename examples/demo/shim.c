/* Device memory for the demo: a CUDA GPU if there is one, else SPIN's software GPU.
 *
 * This represents the allocator of a real program (cudaMalloc, PyTorch,
 * CuPy, ...). It does no I/O. CUDA is opened at run time, so that this compiles
 * and runs on a machine without it; SPIN's own allocator is needed only for
 * memory that no driver allocates.
 *
 * DEMO_DEVICE=cuda:1, =emulated or =p2pmem:0 selects one device.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

/* One device: its name and its three functions. */
static struct {
    char name[128];
    void *(*alloc)(size_t);
    void (*release)(void *);
    int (*to_host)(void *, const void *, size_t);
} gpu;

/* ---- CUDA ------------------------------------------------------------------------------------------------ */

typedef unsigned long long device_ptr;

static struct {
    int (*init)(unsigned);
    int (*count)(int *);
    int (*get)(int *, int);
    int (*name)(char *, int, int);
    int (*retain)(void **, int);
    int (*set)(void *);
    int (*alloc)(device_ptr *, size_t);
    int (*release)(device_ptr);
    int (*to_host)(void *, device_ptr, size_t);
} driver;

/* The runtime library, for cudaMalloc; a machine may have the driver only. */
static struct {
    int (*alloc)(void **, size_t);
    int (*release)(void *);
} runtime;

static void *cuda_alloc(size_t bytes)
{
    void *memory = NULL;
    if (runtime.alloc && runtime.alloc(&memory, bytes) == 0)
        return memory;
    runtime.alloc = NULL;
    device_ptr address = 0;
    return driver.alloc(&address, bytes) == 0 ? (void *)address : NULL;
}

static void cuda_release(void *memory)
{
    if (runtime.alloc)
        runtime.release(memory);
    else
        driver.release((device_ptr)memory);
}

static int cuda_to_host(void *to, const void *from, size_t bytes)
{
    return driver.to_host(to, (device_ptr)from, bytes);
}

static void open_runtime(void)
{
    static const char *const names[] = {"libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !runtime.alloc; i++) {
        void *library = dlopen(names[i], RTLD_NOW);
        if (library) {
            *(void **)&runtime.alloc = dlsym(library, "cudaMalloc");
            *(void **)&runtime.release = dlsym(library, "cudaFree");
        }
    }
    if (!runtime.release)
        runtime.alloc = NULL;
}

static int open_cuda(int ordinal)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return 0;
    const struct {
        void *slot;
        const char *name;
    } calls[] = {
        {&driver.init, "cuInit"},
        {&driver.count, "cuDeviceGetCount"},
        {&driver.get, "cuDeviceGet"},
        {&driver.name, "cuDeviceGetName"},
        {&driver.retain, "cuDevicePrimaryCtxRetain"},
        {&driver.set, "cuCtxSetCurrent"},
        {&driver.alloc, "cuMemAlloc_v2"},
        {&driver.release, "cuMemFree_v2"},
        {&driver.to_host, "cuMemcpyDtoH_v2"},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (!(*(void **)calls[i].slot = dlsym(library, calls[i].name)))
            return 0;
    int count = 0, device = 0;
    void *context = NULL;
    char name[100] = "";
    if (driver.init(0) || driver.count(&count) || ordinal >= count || driver.get(&device, ordinal) ||
        driver.name(name, sizeof name, device) || driver.retain(&context, device) || driver.set(context))
        return 0;
    open_runtime();
    snprintf(gpu.name, sizeof gpu.name, "%s (%s)", name, runtime.alloc ? "cudaMalloc" : "cuMemAlloc");
    gpu.alloc = cuda_alloc;
    gpu.release = cuda_release;
    gpu.to_host = cuda_to_host;
    return 1;
}

/* ---- devices without an allocator of their own ----------------------------------------------------------- */

static struct {
    char device[64];
    void *(*alloc)(const char *device, size_t bytes, unsigned flags);
    int (*release)(void *);
    int (*copy)(void *to, const void *from, size_t bytes);
} spin;

static void *spin_alloc(size_t bytes)
{
    return spin.alloc(spin.device, bytes, 0);
}

static void spin_release(void *memory)
{
    spin.release(memory);
}

static int spin_to_host(void *to, const void *from, size_t bytes)
{
    return spin.copy(to, from, bytes);
}

static void open_spin(const char *device)
{
    *(void **)&spin.alloc = dlsym(RTLD_DEFAULT, "spinio_mem_alloc");
    *(void **)&spin.release = dlsym(RTLD_DEFAULT, "spinio_mem_free");
    *(void **)&spin.copy = dlsym(RTLD_DEFAULT, "spinio_mem_copy");
    if (!spin.alloc || !spin.release || !spin.copy)
        return;
    snprintf(spin.device, sizeof spin.device, "%s", device);
    snprintf(gpu.name, sizeof gpu.name, "%s", device);
    gpu.alloc = spin_alloc;
    gpu.release = spin_release;
    gpu.to_host = spin_to_host;
}

/* ---- the interface for the reader ------------------------------------------------------------------------ */

static void choose(void)
{
    const char *asked = getenv("DEMO_DEVICE");
    if (!asked || !*asked) {
        if (!open_cuda(0))
            open_spin("emulated:0");
    } else if (strncmp(asked, "cuda", 4) == 0) {
        open_cuda(asked[4] == ':' ? atoi(asked + 5) : 0);
    } else {
        open_spin(asked);
    }
}

const char *gpu_name(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
    return gpu.alloc ? gpu.name : NULL;
}

void *gpu_alloc(size_t bytes)
{
    return gpu_name() ? gpu.alloc(bytes) : NULL;
}

void gpu_free(void *memory)
{
    gpu.release(memory);
}

int gpu_copy_to_host(void *to, const void *from, size_t bytes)
{
    return gpu.to_host(to, from, bytes);
}
