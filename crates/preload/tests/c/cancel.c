/* Threads cancelled inside host reads and writes: cleanup handlers run, the calls do not return, and the unwinding
 * passes through the library. Once before any device exists, once after; with HOST_ONLY there is none. cancel [absent]:
 * absent has the device reads fetch from storage. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#ifndef HOST_ONLY
#include "memory.h"
#endif

enum { CALLS = 9, THREADS = 20 };
static atomic_int cleaned, started;
static int ends[2], full[2]; /* an empty pipe, and a full one */

static void cleanup(void *count)
{
    atomic_fetch_add((atomic_int *)count, 1);
}

static void *reader(void *which)
{
    char byte[2];
    struct iovec parts[2] = {{byte, 1}, {byte + 1, 1}};
    pthread_cleanup_push(cleanup, &cleaned);
    atomic_fetch_add(&started, 1);
    switch ((long)which) {
    case 0: read(ends[0], byte, 1); break;
    case 1: readv(ends[0], parts, 2); break;
    case 2: preadv2(ends[0], parts, 2, -1, 0); break;
    case 3: {
        FILE *file = fdopen(dup(ends[0]), "r");
        fread(byte, 1, 2, file);
        break;
    }
    case 4: open("cancel.fifo", O_RDONLY); break;
    case 5: write(full[1], byte, 2); break;
    case 6: writev(full[1], parts, 2); break;
    case 7: pwritev2(full[1], parts, 2, -1, 0); break;
    case 8: {
        FILE *file = fdopen(dup(full[1]), "w");
        setvbuf(file, NULL, _IONBF, 0);
        fwrite(byte, 1, 2, file);
        break;
    }
    }
    fprintf(stderr, "call %ld returned\n", (long)which);
    exit(1);
    pthread_cleanup_pop(0);
    return NULL;
}

#ifndef HOST_ONLY
static void *device;
static int absent;

/* A pending cancellation ends the thread before the read consumes any bytes. */
static void *pending_cancel(void *fd)
{
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    pthread_cancel(pthread_self());
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    pthread_cleanup_push(cleanup, &cleaned);
    read(*(int *)fd, device, 4);
    pthread_cleanup_pop(0);
    return NULL;
}

/* Device reads and writes in an endless loop: a cancellation at any time leaves nothing locked. */
static void *device_reader(void *fd)
{
    FILE *file = fdopen(dup(*(int *)fd), "r"), *sink = fopen("/dev/null", "w");
    int out = open("cancel.tmp", O_CREAT | O_RDWR, 0600);
    pthread_cleanup_push(cleanup, &cleaned);
    atomic_fetch_add(&started, 1);
    for (int i = 0;; i++) {
        if (absent)
            posix_fadvise(*(int *)fd, 0, 0, POSIX_FADV_DONTNEED);
        CHECK(pread(*(int *)fd, device, i % 2 ? 100 : 1 << 20, absent ? 4096 * (1 + i * 7 % 64) : 0) > 0);
        fread(device, 1, 5000, file);
        rewind(file);
        CHECK(pwrite(out, device, i % 2 ? 100 : 1 << 20, 0) > 0);
        fwrite(device, 1, 5000, sink);
    }
    pthread_cleanup_pop(0);
    return NULL;
}
#endif

static void all(void)
{
    for (long which = 0; which < CALLS; which++) {
        pthread_t threads[THREADS];
        atomic_store(&cleaned, 0);
        atomic_store(&started, 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, reader, (void *)which) == 0);
        while (atomic_load(&started) < THREADS)
            usleep(100);
        usleep(2000);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_cancel(threads[i]) == 0);
        for (int i = 0; i < THREADS; i++) {
            void *result;
            CHECK(pthread_join(threads[i], &result) == 0 && result == PTHREAD_CANCELED);
        }
        CHECK(atomic_load(&cleaned) == THREADS);
    }
}

#ifndef HOST_ONLY
/* A file to read: on a disk if its pages are to be dropped. */
static int open_source(void)
{
    if (!absent)
        return open("/proc/self/exe", O_RDONLY);
    static char bytes[2 << 20];
    int fd = open("cancel.data", O_CREAT | O_TRUNC | O_RDWR, 0600);
    unlink("cancel.data");
    CHECK(fd >= 0 && write(fd, bytes, sizeof bytes) == sizeof bytes && fsync(fd) == 0);
    return fd;
}
#endif

int main(int argc, char **argv)
{
    (void)argc, (void)argv;
    CHECK(pipe(ends) == 0);
    CHECK(pipe2(full, O_NONBLOCK) == 0);
    static char page[4096];
    while (write(full[1], page, sizeof page) > 0)
        ;
    CHECK(fcntl(full[1], F_SETFL, 0) == 0);
    unlink("cancel.fifo");
    CHECK(mkfifo("cancel.fifo", 0600) == 0);
    all();
#ifndef HOST_ONLY
    absent = argc == 2 && strcmp(argv[1], "absent") == 0;
    device = device_alloc(1 << 20);
    all();
    CHECK(write(ends[1], "left", 4) == 4);
    pthread_t thread;
    void *result;
    CHECK(pthread_create(&thread, NULL, pending_cancel, &ends[0]) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    char left[4];
    int fd = open_source();
    CHECK(fd >= 0);
    for (int i = 0; i < 100; i++) {
        atomic_store(&started, 0);
        CHECK(pthread_create(&thread, NULL, device_reader, &fd) == 0);
        while (!atomic_load(&started))
            usleep(100);
        usleep(i * 37 % 1000);
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
        CHECK(pread(fd, device, 1 << 20, 0) > 0);
    }
    unlink("cancel.tmp");
    CHECK(read(ends[0], left, 4) == 4 && memcmp(left, "left", 4) == 0);
#endif
    return 0;
}
