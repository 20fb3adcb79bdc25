/* Device memory for test programs, whose own code names no symbol of the library. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stddef.h>

void *device_alloc(size_t size);
void device_free(void *memory);
/* Copy to and from the device, and wait. */
void device_put(void *device, const void *host, size_t size);
void device_get(void *host, const void *device, size_t size);
/* Whether the device's driver keeps descriptors in the program's own table, which the program must then not close. */
int device_has_descriptors(void);

#endif
