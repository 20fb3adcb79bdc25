/* Reads a file into the emulated GPU, sequentially, as an ordinary program would; works on any machine.
 *
 *   LD_PRELOAD=libspinio.so stream MODE FILE BLOCK TOTAL      prints one line of JSON
 *
 *   us      pread into device memory
 *   plain   pread into host memory, then a synchronous copy
 *   direct  the same with O_DIRECT, one block at a time: no read-ahead
 *
 * `warm` before MODE leaves the page cache as it is; else the file's pages are dropped first.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <spinio.h>

#include "../common/measure.h"

int main(int argc, char **argv) {
    int warm = argc > 1 && !strcmp(argv[1], "warm");
    argv += warm, argc -= warm;
    if (argc != 5)
        return 2;
    const char *mode = argv[1];
    size_t block = strtoull(argv[3], NULL, 0), total = strtoull(argv[4], NULL, 0), area = 64 << 20;
    int us = !strcmp(mode, "us"), direct = !strcmp(mode, "direct");
    __typeof__(&spinio_mem_alloc) alloc = spinio_function("spinio_mem_alloc");
    __typeof__(&spinio_mem_copy) copy = spinio_function("spinio_mem_copy");
    char *device = alloc("emulated", area, 0), *host = aligned_alloc(4096, block);
    int fd = open(argv[2], O_RDONLY | (direct ? O_DIRECT : 0));
    if (!device || !host || fd < 0) {
        perror("stream");
        return 3;
    }
    memset(host, 1, block);
    if (us && pread(fd, device, block, 0) < 0) /* one-time set-up of the first read */
        return 3;
    copy(device, host, block);
    if (!warm)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    double c = cpu(), t = now();
    size_t at = 0;
    for (; at + block <= total; at += block) {
        ssize_t n = pread(fd, us ? device + at % area : host, block, at);
        if (n != (ssize_t)block) {
            perror("stream: pread");
            return 3;
        }
        if (!us)
            copy(device + at % area, host, block);
    }
    if (us) /* copies still in flight */
        copy(host, device, 1);
    t = now() - t;
    printf("{\"mode\":\"%s\",\"block\":%zu,\"bytes\":%zu,\"seconds\":%.4f,\"gbps\":%.3f,\"cpu_per_gb\":%.3f}\n", mode, block, at,
           t, at / t / 1e9, (cpu() - c) / (at / 1e9));
    char *want = malloc(block);
    if (us && (copy(host, device + (at - block) % area, block) || pread(fd, want, block, at - block) != (ssize_t)block || memcmp(host, want, block))) {
        fprintf(stderr, "stream: the bytes differ from the file's\n");
        return 3;
    }
    return 0;
}
