/* Preloaded next to libspinio.so: puts every process into the state of a program that uses a device, so that each
 * hooked call looks its buffer up instead of being passed on immediately. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

__attribute__((constructor)) static void use(void)
{
    void *(*alloc)(const char *, size_t, unsigned) =
        (void *(*)(const char *, size_t, unsigned))dlsym(RTLD_DEFAULT, "spinio_mem_alloc");
    if (alloc)
        alloc("emulated", 1 << 20, 0);
}
