/* Device memory, whoever makes it. The demo's only contact with a GPU. */
#ifndef DEMO_GPU_H
#define DEMO_GPU_H

#include <stddef.h>

/* The device that gpu_alloc uses, for people. NULL if there is none. */
const char *gpu_name(void);

/* Memory of the device; the CPU cannot read or write it. NULL when there is not enough. */
void *gpu_alloc(size_t bytes);

void gpu_free(void *memory);

/* Copies device memory back to the host and waits. 0 when it worked. */
int gpu_copy_to_host(void *to, const void *from, size_t bytes);

#endif
