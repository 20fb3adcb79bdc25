/* posix_fadvise answers as the kernel does, and device reads go by what was advised. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 24 << 20, BLOCK = 128 << 10 };
static char *device;

static void answers(void)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    errno = 77;
    CHECK(posix_fadvise(-1, 0, 0, POSIX_FADV_NORMAL) == EBADF);
    CHECK(posix_fadvise64(ends[0], 0, 0, POSIX_FADV_RANDOM) == ESPIPE);
    int fd = open("advice.tmp", O_RDONLY);
    CHECK(fd >= 0 && posix_fadvise(fd, 0, 0, 99) == EINVAL && posix_fadvise(fd, 0, -1, POSIX_FADV_RANDOM) == EINVAL);
    CHECK(posix_fadvise64(fd, -5, 10, POSIX_FADV_WILLNEED) == 0);
    CHECK(errno == 77 || errno == 0);
    close(fd);
    close(ends[0]);
    close(ends[1]);
}

/* How many pages of a range are in the page cache. */
static int cached_of(int fd, int from, int to)
{
    static unsigned char pages[SIZE / 4096];
    char *map = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && mincore(map, SIZE, pages) == 0);
    munmap(map, SIZE);
    int found = 0;
    for (int i = from / 4096; i < to / 4096; i++)
        found += pages[i] & 1;
    return found;
}

static int cached(int fd)
{
    return cached_of(fd, 0, SIZE);
}

/* A new file, of which nothing is cached, and advice about it. A new one each time: read-ahead that is still under way would
 * bring pages of an old one back. -1 where pages do not leave. */
static int advised(const char *name, int advice)
{
    static char bytes[SIZE];
    memset(bytes, 5, SIZE);
    int fd = open(name, O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, bytes, SIZE) == SIZE && fsync(fd) == 0);
    close(fd);
    fd = open(name, O_RDONLY);
    CHECK(fd >= 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    unlink(name);
    if (cached(fd)) {
        close(fd);
        return -1;
    }
    CHECK(posix_fadvise(fd, 0, 0, advice) == 0);
    return fd;
}

/* Its pages that are in the page cache after its first half was read. */
static int after_reading(int fd)
{
    if (fd < 0)
        return -1;
    for (int at = 0; at < SIZE / 2; at += BLOCK)
        CHECK(pread(fd, device, BLOCK, at) == BLOCK);
    int now = cached(fd);
    close(fd);
    return now;
}

/* A file that a device has read, and of which nothing is cached; -1 where its pages do not leave. */
static int known(const char *name)
{
    static char bytes[SIZE];
    memset(bytes, 5, SIZE);
    int fd = open(name, O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, bytes, SIZE) == SIZE && fsync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    CHECK(pread(fd, device, BLOCK, SIZE / 2) == BLOCK);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    if (cached(fd) == 0)
        return fd;
    close(fd);
    unlink(name);
    return -1;
}

/* The kernel fetches one window of what will be needed; all of it comes. */
static void willneed(void)
{
    int fd = known("willneed.tmp");
    if (fd < 0) {
        puts("skipped: pages of a file stay cached here whatever is advised");
        return;
    }
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED) == 0);
    for (int i = 0; cached(fd) < SIZE / 4096; i++) {
        CHECK(i < 6000); /* a minute */
        usleep(10000);
    }
    /* They are the program's: a stream of small reads, which drops what it has brought in, drops none of them. */
    for (int at = 0; at < SIZE; at += 32768)
        CHECK(pread(fd, device, 32768, at) == 32768);
    usleep(100000);
    CHECK(cached(fd) == SIZE / 4096);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0 && cached(fd) == 0);
    close(fd);
    unlink("willneed.tmp");
}

static void stream(int fd, int from, int to)
{
    for (int at = from; at < to; at += BLOCK)
        CHECK(pread(fd, device, BLOCK, at) == BLOCK);
}

/* What device reads alone have brought in is the program's once it says that it will be needed. */
static void adopted(void)
{
    /* Behind the first windows, which stay whatever is said, and among the newest that were brought in. */
    enum { FROM = 18 << 20, TO = 20 << 20 };
    int fd = advised("adopted.tmp", POSIX_FADV_NORMAL);
    if (fd < 0)
        return;
    stream(fd, 0, TO);
    usleep(100000);
    CHECK(posix_fadvise(fd, FROM, TO - FROM, POSIX_FADV_WILLNEED) == 0);
    for (int i = 0; cached_of(fd, FROM, TO) < (TO - FROM) / 4096; i++) {
        CHECK(i < 6000); /* a minute */
        usleep(10000);
    }
    stream(fd, TO, SIZE);
    usleep(200000);
    CHECK(cached_of(fd, FROM, TO) == (TO - FROM) / 4096);
    close(fd);
}

/* When the program closes a file, what device reads have left of it in the set goes. */
static void closing(void)
{
    int fd = advised("closing.tmp", POSIX_FADV_NORMAL), before;
    if (fd < 0)
        return;
    /* To look by: opening it would count as somebody who reads it. */
    int other = dup(fd);
    stream(fd, 0, SIZE);
    usleep(200000);
    /* Nothing has gone: the disk's window is as wide as the file. */
    if ((before = cached(other)) > SIZE / 4096 - 600) {
        puts("skipped: all of a small file is read ahead here");
    } else {
        CHECK(before >= 512 && close(fd) == 0);
        for (int i = 0; cached(other) > before - 400; i++) {
            CHECK(i < 6000);
            usleep(10000);
        }
    }
    close(other);
}

int main(void)
{
    char *bytes = malloc(SIZE);
    int fd = open("advice.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    memset(bytes, 5, SIZE);
    CHECK(fd >= 0 && write(fd, bytes, SIZE) == SIZE && fsync(fd) == 0);
    close(fd);
    answers();
    int early = advised("early.tmp", POSIX_FADV_RANDOM);
    device = device_alloc(BLOCK);
    answers();
    int sequential = after_reading(advised("normal.tmp", POSIX_FADV_NORMAL));
    int random = after_reading(advised("random.tmp", POSIX_FADV_RANDOM));
    /* Also what was advised while no device was in use. */
    early = after_reading(early);
    /* Where pages do not leave, or nothing is read around the page cache, there is nothing to compare. */
    fd = open("advice.tmp", O_RDONLY | O_DIRECT);
    if (sequential >= 0 && random >= 0 && fd >= 0)
        CHECK(sequential > 0 && random == 0 && early == 0);
    unlink("advice.tmp");
    willneed();
    adopted();
    closing();
    return 0;
}
