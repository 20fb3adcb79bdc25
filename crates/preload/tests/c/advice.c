/* posix_fadvise returns what the kernel returns, and device reads follow the advice. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 24 << 20, BLOCK = 128 << 10 };
static char *device;

static void return_values(void)
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

/* The number of pages of a range in the page cache. */
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

/* A new file without cached pages, with advice set. A new one each time: read-ahead in flight would read pages of an
 * old file in again. -1 if its pages cannot be dropped. */
static int file_with_advice(const char *name, int advice)
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

/* The number of its cached pages after reading its first half. */
static int cached_after_reading(int fd)
{
    if (fd < 0)
        return -1;
    for (int at = 0; at < SIZE / 2; at += BLOCK)
        CHECK(pread(fd, device, BLOCK, at) == BLOCK);
    int now = cached(fd);
    close(fd);
    return now;
}

/* A file that a device read has used, without cached pages; -1 if its pages cannot be dropped. */
static int file_with_state(const char *name)
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

/* Pages that Linux evicts by itself, for lack of memory or by DAMON, are none that the library dropped. So a scenario has
 * three more tries; it returns whether it held. */
static void holds(int (*scenario)(void))
{
    int tries = 4;
    while (!scenario())
        CHECK(--tries > 0);
}

static int becomes_cached(int fd, int from, int to)
{
    for (int i = 0; cached_of(fd, from, to) < (to - from) / 4096; i++) {
        if (i == 30000) /* five minutes */
            return 0;
        usleep(10000);
    }
    return 1;
}

/* For POSIX_FADV_WILLNEED the kernel reads one window only; the library has to read in all of the range. */
static int willneed_reads_all(void)
{
    int fd = file_with_state("willneed.tmp");
    if (fd < 0) {
        puts("skipped: pages of a file stay cached here despite POSIX_FADV_DONTNEED");
        return 1;
    }
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED) == 0);
    int held = becomes_cached(fd, 0, SIZE);
    /* These pages belong to the program: a stream of small reads drops the pages that it read in, but none of these. */
    for (int at = 0; at < SIZE; at += 32768)
        CHECK(pread(fd, device, 32768, at) == 32768);
    usleep(100000);
    held = held && cached(fd) == SIZE / 4096;
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0 && cached(fd) == 0);
    close(fd);
    unlink("willneed.tmp");
    return held;
}

static void stream(int fd, int from, int to)
{
    for (int at = from; at < to; at += BLOCK)
        CHECK(pread(fd, device, BLOCK, at) == BLOCK);
}

/* Pages that device reads have read in belong to the program after its POSIX_FADV_WILLNEED. */
static int willneed_adopts_pages(void)
{
    /* After the first windows, which stay in any case, and among the pages read in last. */
    enum { FROM = 18 << 20, TO = 20 << 20 };
    int fd = file_with_advice("adopted.tmp", POSIX_FADV_NORMAL);
    if (fd < 0)
        return 1;
    stream(fd, 0, TO);
    usleep(100000);
    CHECK(posix_fadvise(fd, FROM, TO - FROM, POSIX_FADV_WILLNEED) == 0);
    int held = becomes_cached(fd, FROM, TO);
    stream(fd, TO, SIZE);
    usleep(200000);
    held = held && cached_of(fd, FROM, TO) == (TO - FROM) / 4096;
    close(fd);
    return held;
}

/* When the program closes a file, its pages in the bounded read-ahead set are dropped. */
static int close_drops_pages(void)
{
    int fd = file_with_advice("closing.tmp", POSIX_FADV_NORMAL), before, held = 1;
    if (fd < 0)
        return 1;
    /* For counting: an open of the file would count as another reader. */
    int other = dup(fd);
    stream(fd, 0, SIZE);
    usleep(200000);
    /* Nothing was dropped: the disk's read-ahead window is as large as the file. */
    if ((before = cached(other)) > SIZE / 4096 - 600) {
        puts("skipped: the read-ahead window here covers the whole file");
    } else {
        held = before >= 512;
        CHECK(close(fd) == 0);
        for (int i = 0; cached(other) > before - 400; i++) {
            CHECK(i < 30000);
            usleep(10000);
        }
    }
    close(other);
    return held;
}

int main(void)
{
    char *bytes = malloc(SIZE);
    int fd = open("advice.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    memset(bytes, 5, SIZE);
    CHECK(fd >= 0 && write(fd, bytes, SIZE) == SIZE && fsync(fd) == 0);
    close(fd);
    return_values();
    int early = file_with_advice("early.tmp", POSIX_FADV_RANDOM);
    device = device_alloc(BLOCK);
    return_values();
    int sequential = cached_after_reading(file_with_advice("normal.tmp", POSIX_FADV_NORMAL));
    int random = cached_after_reading(file_with_advice("random.tmp", POSIX_FADV_RANDOM));
    /* Advice given before any device was in use counts too. */
    early = cached_after_reading(early);
    /* If pages cannot be dropped, or O_DIRECT is not supported, there is nothing to compare. */
    fd = open("advice.tmp", O_RDONLY | O_DIRECT);
    if (sequential >= 0 && random >= 0 && fd >= 0)
        CHECK(sequential > 0 && random == 0 && early == 0);
    unlink("advice.tmp");
    holds(willneed_reads_all);
    holds(willneed_adopts_pages);
    holds(close_drops_pages);
    return 0;
}
