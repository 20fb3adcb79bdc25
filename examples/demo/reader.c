/* Reads a file into device memory with plain pread(), then checks every byte.
 *
 * This file does not depend on SPIN: no header, no symbol, no flag. Run alone,
 * pread() fails with EFAULT, because the kernel cannot write to GPU memory. Run
 * under LD_PRELOAD=libspinio.so, it works. (Without a GPU there is no memory to
 * read into when it runs alone: the software GPU is part of libspinio.so.)
 *
 *     cc -O2 -shared -fPIC -o libgpu.so shim.c
 *     cc -O2 -o reader reader.c -L. -lgpu -Wl,-rpath,'$ORIGIN'
 *     spinio run --stats -- ./reader FILE
 *
 * Prints one `name=value` per line. Exit status: 0 read and equal, 1 an error
 * (message on stderr), 3 the bytes differ.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"

#define BLOCK ((size_t)8 << 20)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int fail(const char *what, const char *file)
{
    fprintf(stderr, "%s %s: %s\n", what, file, strerror(errno));
    return 1;
}

/* Reads the file again, into host memory, and compares. Returns the offset of the first differing byte, `size` if none
 * differs, -1 on an error. */
static off_t first_difference(int fd, const char *device, off_t size)
{
    char *back = malloc(BLOCK), *plain = malloc(BLOCK);
    off_t at = 0;
    while (back && plain && at < size) {
        ssize_t n = pread(fd, plain, BLOCK, at);
        if (n <= 0)
            break;
        memset(back, 0, n);
        if (gpu_copy_to_host(back, device + at, n) != 0)
            break;
        if (memcmp(back, plain, n) != 0) {
            for (ssize_t i = 0; i < n; i++)
                if (back[i] != plain[i]) {
                    free(back);
                    free(plain);
                    return at + i;
                }
        }
        at += n;
    }
    free(back);
    free(plain);
    return at == size ? size : -1;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s FILE\n", argv[0]);
        return 2;
    }
    int fd = open(argv[1], O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0)
        return fail("open", argv[1]);

    if (!gpu_name()) {
        fprintf(stderr, "no such CUDA GPU here, and the memory of any other device needs libspinio.so preloaded\n");
        return 1;
    }
    printf("device=%s\n", gpu_name());
    char *device = gpu_alloc(st.st_size);
    if (!device) {
        fprintf(stderr, "no %lld bytes of device memory on %s\n", (long long)st.st_size, gpu_name());
        return 1;
    }

    off_t at = 0;
    double begun = now(), first = 0;
    while (at < st.st_size) {
        ssize_t n = pread(fd, device + at, BLOCK, at);
        if (n < 0) {
            printf("errno=%d\n", errno);
            return fail("pread", argv[1]);
        }
        if (n == 0)
            break;
        at += n;
        if (first == 0)
            first = now() - begun;
    }
    printf("bytes=%lld\nseconds=%.9f\nfirst_call_seconds=%.9f\n", (long long)at, now() - begun, first);

    off_t differs = first_difference(fd, device, st.st_size);
    if (differs < 0) {
        fprintf(stderr, "cannot copy the bytes back to compare them\n");
        return 1;
    }
    printf("equal_bytes=%lld\n", (long long)differs);
    gpu_free(device);
    close(fd);
    return differs == st.st_size && at == st.st_size ? 0 : 3;
}
