/* RLIMIT_FSIZE has the same effect as on a host write: a write over the limit is cut short there, the next one fails
 * with EFBIG and raises SIGXFSZ in the writing thread, once. For every size of write, and for every kind of
 * descriptor. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { MIB = 1 << 20, MOST = 6 * MIB };
static unsigned char *device, *host, *seen;
static volatile sig_atomic_t signals, thread;

static void limited(int signal)
{
    CHECK(signal == SIGXFSZ);
    signals++;
    thread = gettid();
}

static void one(int flags, size_t size, size_t limit)
{
    unlink("limits.tmp");
    int fd = open("limits.tmp", O_CREAT | O_RDWR | flags, 0600);
    if (fd < 0)
        return;
    struct rlimit some = {limit, RLIM_INFINITY}, any = {RLIM_INFINITY, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_FSIZE, &some) == 0);
    signals = 0;
    size_t fits = size < limit ? size : limit;
    CHECK(write(fd, device, size) == (ssize_t)fits && signals == 0);
    CHECK(lseek(fd, 0, SEEK_CUR) == (off_t)fits);
    if (fits == limit) {
        FAILS(write(fd, device, 4096), EFBIG);
        CHECK(signals == 1 && thread == gettid());
        FAILS(pwrite(fd, device, size, limit), EFBIG);
        CHECK(signals == 2);
        FAILS(writev(fd, (struct iovec[]){{host, 4096}, {device, 4096}}, 2), EFBIG);
        CHECK(signals == 3 && lseek(fd, 0, SEEK_CUR) == (off_t)limit);
    }
    CHECK(setrlimit(RLIMIT_FSIZE, &any) == 0);
    close(fd);
    fd = open("limits.tmp", O_RDONLY);
    CHECK(read(fd, seen, MOST) == (ssize_t)fits && memcmp(seen, host, fits) == 0);
    close(fd);
}

int main(void)
{
    device = device_alloc(MOST), host = malloc(MOST), seen = malloc(MOST);
    CHECK(device && host && seen);
    for (size_t i = 0; i < MOST; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 11);
    device_put(device, host, MOST);
    struct sigaction action = {.sa_handler = limited};
    CHECK(sigaction(SIGXFSZ, &action, NULL) == 0);
    int kinds[] = {0, O_APPEND, O_DSYNC, O_DIRECT};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        one(kinds[i], MOST, 2 * MIB);
        one(kinds[i], MOST, MOST);
        one(kinds[i], 8192, 4096);
        if (kinds[i] != O_DIRECT)
            one(kinds[i], 3 * MIB, MIB + 77);
    }
    unlink("limits.tmp");
    device_free(device);
    return 0;
}
