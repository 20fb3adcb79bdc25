/* Device memory of any allocator. The demo's only interface to a GPU. */
#ifndef DEMO_GPU_H
#define DEMO_GPU_H

#include <stddef.h>

/* A description of the device that gpu_alloc uses. NULL if there is none. */
const char *gpu_name(void);

/* Allocates memory of the device; the CPU cannot access it. NULL if there is not enough. */
void *gpu_alloc(size_t bytes);

void gpu_free(void *memory);

/* Copies device memory to the host and waits. Returns 0 on success. */
int gpu_copy_to_host(void *to, const void *from, size_t bytes);

#endif
