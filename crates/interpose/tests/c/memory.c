/* The allocator shim: the emulated GPU's cudaMalloc, so to speak. */
#define _GNU_SOURCE
#include "memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <spinio.h>

#define FIND(name) ((__typeof__(&name))find(#name))

static void *find(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        fprintf(stderr, "%s is not there: is the library preloaded?\n", name);
        exit(1);
    }
    return found;
}

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, FIND(spinio_last_error)());
    exit(1);
}

void *device_alloc(size_t size)
{
    void *memory = FIND(spinio_mem_alloc)("emulated", size, 0);
    if (!memory)
        fail("spinio_mem_alloc");
    return memory;
}

void device_free(void *memory)
{
    if (FIND(spinio_mem_free)(memory))
        fail("spinio_mem_free");
}

void device_put(void *device, const void *host, size_t size)
{
    if (FIND(spinio_mem_copy)(device, host, size))
        fail("spinio_mem_copy to the device");
}

void device_get(void *host, const void *device, size_t size)
{
    if (FIND(spinio_mem_copy)(host, device, size))
        fail("spinio_mem_copy from the device");
}
