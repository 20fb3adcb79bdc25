/* Calls at the limits of what the kernel accepts, each made twice: with host memory, and with device memory on the same
 * descriptor. Return value, errno and the bytes read must be the same. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SPAN = 6 << 20 };
static char *host, *seen, *device;

typedef ssize_t call(int fd, char *memory);

static void compare(const char *what, int fd, call *make)
{
    memset(host, 0x5a, SPAN);
    device_put(device, host, SPAN);
    off_t at = lseek(fd, 0, SEEK_CUR);
    errno = 77;
    ssize_t expected = make(fd, host);
    int expected_errno = errno;
    off_t expected_at = lseek(fd, 0, SEEK_CUR);
    if (at >= 0)
        lseek(fd, at, SEEK_SET);
    errno = 77;
    ssize_t got = make(fd, device);
    int got_errno = errno;
    off_t got_at = lseek(fd, 0, SEEK_CUR);
    device_get(seen, device, SPAN);
    if (expected == got && expected_errno == got_errno && expected_at == got_at && !memcmp(host, seen, SPAN))
        return;
    fprintf(stderr, "%s: host %zd errno %d offset %ld, device %zd errno %d offset %ld%s\n", what, expected, expected_errno,
            (long)expected_at, got, got_errno, (long)got_at, memcmp(host, seen, SPAN) ? ", other bytes" : "");
    exit(1);
}

#define SAME(fd, expression)                                                                                       \
    do {                                                                                                           \
        ssize_t make_(int f, char *m) { return expression; }                                                       \
        compare(#expression, fd, make_);                                                                              \
    } while (0)

static ssize_t two(int write, int fd, char *first, size_t a, char *second, size_t b, off_t at)
{
    struct iovec parts[2] = {{first, a}, {second, b}};
    return write ? pwritev(fd, parts, 2, at) : at == -1 ? readv(fd, parts, 2) : preadv(fd, parts, 2, at);
}

static ssize_t one(int fd, char *first, size_t a, off_t at)
{
    struct iovec part = {first, a};
    return at == -1 ? readv(fd, &part, 1) : preadv(fd, &part, 1, at);
}

/* Offsets and lengths beyond those of any file, on descriptors open for reading and others. */
static void out_of_range(int fd)
{
    SAME(fd, two(0, f, m, 4096, m + 8192, 4096, INT64_MAX - 100));
    SAME(fd, two(0, f, m, 4096, m + 8192, 4096, INT64_MAX - 6000));
    SAME(fd, two(0, f, m, 4096, m + 8192, 4096, INT64_MAX - 8192));
    SAME(fd, two(0, f, m, 3 << 20, m + (3 << 20), 3 << 20, INT64_MAX - (5 << 20)));
    SAME(fd, two(0, f, m, 4096, m + 8192, 4096, INT64_MIN));
    SAME(fd, two(1, f, m, 4096, m + 8192, 4096, INT64_MAX - 6000));
    SAME(fd, one(f, m, 4096, INT64_MAX - 100));
    SAME(fd, pread(f, m, 4096, INT64_MAX - 100));
    SAME(fd, pread(f, m, SPAN, INT64_MAX - (5 << 20)));
    SAME(fd, pread(f, m, SPAN, INT64_MAX - SPAN));
    SAME(fd, pread(f, m, 100, -5));
    SAME(fd, pwrite(f, m, SPAN, INT64_MAX - (5 << 20)));
    SAME(fd, two(0, f, m, 4096, m + 8192, (size_t)1 << 62, 0));
    SAME(fd, two(0, f, m, (size_t)1 << 62, m + 8192, 100, 0));
    SAME(fd, two(0, f, m, (size_t)1 << 62, m + 8192, 100, -1));
    SAME(fd, two(1, f, m, 4096, m + 8192, (size_t)1 << 62, 0));
    SAME(fd, pread(f, m, (size_t)1 << 62, 0));
    SAME(fd, read(f, m, (size_t)1 << 62));
    SAME(fd, pwrite(f, m, (size_t)1 << 62, 0));
    static volatile size_t half = (size_t)1 << 63; /* volatile: the compiler would refuse the constant */
    SAME(fd, pread(f, m, half, 0));
}

/* Makes a file as long as its file system allows, of holes; its length. */
static off_t make_longest(int fd)
{
    off_t fits = 0, too_long = INT64_MAX;
    while (fits < too_long - 1) {
        off_t middle = fits + (too_long - fits) / 2;
        if (ftruncate(fd, middle) == 0)
            fits = middle;
        else
            too_long = middle;
    }
    CHECK(ftruncate(fd, fits) == 0);
    return fits;
}

int main(void)
{
    host = malloc(SPAN), seen = malloc(SPAN), device = device_alloc(SPAN);
    CHECK(host && seen && device);
    char path[] = "edges-XXXXXX";
    int both = mkstemp(path), in = open(path, O_RDONLY), out = open(path, O_WRONLY), none = open(path, O_PATH);
    CHECK(both >= 0 && in >= 0 && out >= 0 && none >= 0 && ftruncate(both, 100000) == 0);
    /* From here on the library knows the device memory. */
    CHECK(pread(in, device, 1, 0) == 1);
    int fds[] = {in, out, none, 12345};
    for (unsigned i = 0; i < sizeof fds / sizeof *fds; i++)
        out_of_range(fds[i]);
    /* A file system with the largest offset: a file offset can be near it. */
    int memory = memfd_create("edges", 0);
    CHECK(memory >= 0);
    out_of_range(memory);
    CHECK(lseek(memory, INT64_MAX - 1000, SEEK_SET) > 0);
    SAME(memory, two(0, f, m, 500, m + 8192, 400, -1));
    SAME(memory, two(0, f, m, 500, m + 8192, 4096, -1));
    SAME(memory, read(f, m, 900));

    /* Above the bounce limit (SPINIO_BOUNCE_LIMIT), to a file that cannot be written, with and without an offset. */
    int sysfs = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY);
    if (sysfs < 0)
        sysfs = open("/sys/kernel/uevent_seqnum", O_RDONLY);
    CHECK(sysfs >= 0);
    int closed[] = {sysfs, in, none};
    for (unsigned i = 0; i < sizeof closed / sizeof *closed; i++) {
        SAME(closed[i], write(f, m, SPAN));
        SAME(closed[i], pwrite(f, m, SPAN, 0));
        SAME(closed[i], write(f, m, 5000));
    }

    /* Not cut short: a character device, and a procfs file of the size of the address space. */
    int zero = open("/dev/zero", O_RDONLY), map = open("/proc/self/pagemap", O_RDONLY);
    CHECK(zero >= 0 && map >= 0);
    SAME(zero, read(f, m, SPAN));
    SAME(zero, one(f, m, SPAN, -1));
    SAME(zero, one(f, m, SPAN, 0));
    SAME(zero, two(0, f, m, 3 << 20, m + (3 << 20), 2 << 20, -1));
    SAME(map, read(f, m, SPAN));
    SAME(map, one(f, m, SPAN, -1));
    SAME(map, pread(f, m, SPAN, 0));
    SAME(map, one(f, m, SPAN, 0));
    SAME(map, two(0, f, m, 3 << 20, m + (3 << 20), 2 << 20, -1));
    /* The end of the file is the largest offset, past which no call may move the file offset. */
    off_t end = make_longest(both);
    if (end <= INT64_MAX - SPAN) {
        CHECK(lseek(both, end - (3 << 20), SEEK_SET) > 0);
        SAME(both, two(0, f, m, 3 << 20, m + (3 << 20), 2 << 20, -1));
        CHECK(lseek(both, end - (3 << 20), SEEK_SET) > 0);
        SAME(both, two(0, f, m, 2 << 20, m + (3 << 20), 2 << 20, -1));
    } else {
        puts("skipped: files of this file system can have any length");
    }
    unlink(path);
    device_free(device);
    return 0;
}
