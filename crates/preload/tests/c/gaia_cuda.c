/* A program with a CUDA driver that SPIN has not looked for yet: its first call of SPIN maps a file, of 5 MiB + 100 bytes,
 * byte n being n % 251. Argument 1: the driver; 2: a file that is not below a mount, for which a daemon serves; 3: the
 * same below a GAIA mount, which is changed, or nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <spinio.h>
#include <spinio_gaia.h>

#include "check.h"

enum { LEN = (5 << 20) + 100 };

typedef unsigned long long gpu_ptr;
static int (*to_host)(void *, gpu_ptr, size_t, void *), (*to_device)(gpu_ptr, const void *, size_t, void *);

static void *mapped(const char *path, int flags, unsigned access)
{
    int fd = open(path, flags);
    CHECK(fd >= 0);
    void *at = spinio_gaia_map(fd, 0, LEN, access);
    if (!at || spinio_gaia_acquire(at, LEN, access) != LEN) {
        fprintf(stderr, "%s: %s\n", path, spinio_last_error());
        exit(1);
    }
    CHECK(close(fd) == 0);
    return at;
}

static void compare(void *at)
{
    static unsigned char bytes[LEN];
    CHECK(to_host(bytes, (gpu_ptr)(intptr_t)at, LEN, NULL) == 0);
    for (size_t i = 0; i < LEN; i++)
        CHECK(bytes[i] == i % 251);
}

int main(int argc, char **argv)
{
    CHECK(argc >= 3);
    void *driver = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL), *context;
    CHECK(driver);
    int (*init)(unsigned) = dlsym(driver, "cuInit"), (*retain)(void **, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*set_current)(void *) = dlsym(driver, "cuCtxSetCurrent");
    to_host = dlsym(driver, "cuMemcpyDtoHAsync_v2"), to_device = dlsym(driver, "cuMemcpyHtoDAsync_v2");
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set_current(context) == 0);

    void *leased = mapped(argv[2], O_RDONLY, SPINIO_GAIA_READ);
    compare(leased);
    CHECK(to_device((gpu_ptr)(intptr_t)leased, "x", 1, NULL) != 0);
    CHECK(spinio_gaia_unmap(leased) == 0);
    if (argc == 3)
        return 0;
    void *shared = mapped(argv[3], O_RDWR, SPINIO_GAIA_WRITE);
    compare(shared);
    CHECK(to_device((gpu_ptr)(intptr_t)shared + (3 << 20), "stored", 6, NULL) == 0);
    CHECK(spinio_gaia_release(shared, LEN, 0) == 4096);
    return spinio_gaia_unmap(shared);
}
