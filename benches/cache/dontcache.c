/* Two methods of reading a cold file in sequence without filling the page cache, compared with a plain read.
 *
 *   dontcache FILE [ROUNDS]        prints one line of JSON per block size and method
 *
 *   plain      pread; the pages stay
 *   dropped    pread; pages are dropped with POSIX_FADV_DONTNEED once the reader is 2 MiB past them (as SPIN's
 *              bounded read-ahead set does for streams)
 *   dontcache  preadv2 with RWF_DONTCACHE (Linux 6.14)
 *
 * The methods take turns on ranges of the file that are dropped from the cache first. `left` is the part of the range
 * in the page cache afterwards, in MiB. The medians of ROUNDS (5) are printed. Exit status 77 if RWF_DONTCACHE is not
 * supported. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../common/measure.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif

enum { MIB = 1 << 20, STRETCH = 256 * MIB, KEPT = 2 * MIB, STEP = MIB / 2, WAYS = 3, MOST = 99 };
static const char *ways[WAYS] = {"plain", "dropped", "dontcache"};

static double cached_mib(int fd, off_t at, size_t size)
{
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, at);
    unsigned char *pages = malloc(size / 4096);
    size_t count = 0;
    if (map == MAP_FAILED || !pages || mincore(map, size, pages))
        die("mincore");
    for (size_t i = 0; i < size / 4096; i++)
        count += pages[i] & 1;
    free(pages);
    munmap(map, size);
    return count / 256.0;
}

static double once(int fd, int way, size_t block, off_t at, size_t size, char *buffer)
{
    off_t dropped = at;
    double begun = now();
    for (off_t o = at; o < at + (off_t)size; o += block) {
        struct iovec part = {buffer, block};
        ssize_t n = way == 2 ? preadv2(fd, &part, 1, o, RWF_DONTCACHE) : pread(fd, buffer, block, o);
        if (n < 0 && way == 2 && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL)) {
            printf("skipped: RWF_DONTCACHE is not supported here\n");
            exit(77);
        }
        if (n != (ssize_t)block)
            die("read");
        if (way == 1 && o + (off_t)block - dropped >= KEPT + STEP) {
            /* From the start of the folio: only whole folios are dropped. */
            off_t from = dropped / KEPT * KEPT > at ? dropped / KEPT * KEPT : at;
            posix_fadvise(fd, from, dropped + STEP - from, POSIX_FADV_DONTNEED);
            dropped += STEP;
        }
    }
    return size / (now() - begun) / 1e9;
}

int main(int argc, char **argv)
{
    static const size_t blocks[] = {4096, 16384, 65536, 131072, 262144, 524288, 1048576};
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    int fd = argc > 1 ? open(argv[1], O_RDONLY) : -1;
    struct stat stat;
    if (fd < 0 || fstat(fd, &stat) || stat.st_size < 2L * STRETCH || rounds < 1 || rounds > MOST) {
        fprintf(stderr, "usage: dontcache FILE [ROUNDS]: a file of at least 512 MiB, 1 to %d rounds\n", MOST);
        return 2;
    }
    char *buffer = aligned_alloc(4096, MIB);
    off_t stretches = stat.st_size / STRETCH, next = 0;
    for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++) {
        double speed[WAYS][MOST], left[WAYS] = {0};
        for (int round = 0; round < rounds; round++)
            for (int turn = 0; turn < WAYS; turn++) {
                int way = (turn + round) % WAYS;
                size_t size = blocks[b] < 65536 ? STRETCH / 4 : STRETCH;
                off_t at = next++ % stretches * STRETCH;
                posix_fadvise(fd, at, STRETCH, POSIX_FADV_DONTNEED);
                speed[way][round] = once(fd, way, blocks[b], at, size, buffer);
                left[way] = cached_mib(fd, at, size);
            }
        for (int way = 0; way < WAYS; way++) {
            double middle = median(speed[way], rounds);
            printf("{\"block\":%zu,\"way\":\"%s\",\"gbps\":%.3f,\"least\":%.3f,\"most\":%.3f,\"left\":%.1f}\n", blocks[b], ways[way],
                   middle, speed[way][0], speed[way][rounds - 1], left[way]);
        }
        fflush(stdout);
    }
    return 0;
}
