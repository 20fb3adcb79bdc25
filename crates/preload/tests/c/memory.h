/* Device memory for test programs, whose own code uses no symbol of the library. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stddef.h>

void *device_alloc(size_t size);
void device_free(void *memory);
/* Synchronous copies to and from the device. */
void device_put(void *device, const void *host, size_t size);
void device_get(void *host, const void *device, size_t size);
/* Whether the device's driver has descriptors in the program's own fd table, which the program must not close. */
int device_has_descriptors(void);

#endif
