/* Device memory for examples/demo/reader.c: PCI memory that the kernel publishes for peer-to-peer DMA.
 *
 * VM_MEMORY=spinio  from SPIN's allocator
 * VM_MEMORY=mapped  mapped by this program itself, as in a program without knowledge of SPIN
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gpu.h"

static size_t mapped_bytes;

static int mapped(void)
{
    const char *from = getenv("VM_MEMORY");
    return from && strcmp(from, "mapped") == 0;
}

const char *gpu_name(void)
{
    return mapped() ? "p2pmem, mapped by the program" : "p2pmem:0";
}

static void *map(size_t bytes)
{
    glob_t found;
    void *memory = MAP_FAILED;
    if (glob("/sys/bus/pci/devices/*/p2pmem/allocate", 0, NULL, &found) != 0)
        return NULL;
    int fd = open(found.gl_pathv[0], O_RDWR | O_CLOEXEC);
    globfree(&found);
    mapped_bytes = (bytes + 4095) & ~(size_t)4095;
    if (fd >= 0)
        memory = mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return memory == MAP_FAILED ? NULL : memory;
}

void *gpu_alloc(size_t bytes)
{
    if (mapped())
        return map(bytes);
    void *(*alloc)(const char *, size_t, unsigned) =
        (void *(*)(const char *, size_t, unsigned))dlsym(RTLD_DEFAULT, "spinio_mem_alloc");
    return alloc ? alloc("p2pmem:0", bytes, 1) : NULL;
}

void gpu_free(void *memory)
{
    if (mapped()) {
        munmap(memory, mapped_bytes);
        return;
    }
    int (*release)(void *) = (int (*)(void *))dlsym(RTLD_DEFAULT, "spinio_mem_free");
    if (release)
        release(memory);
}

/* Copied by CPU loads, not by SPIN, so that the check is independent of SPIN. */
int gpu_copy_to_host(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return 0;
}
