/* Children of a process that uses a device: their host reads work, they may close all descriptors, and the parent's
 * device reads work afterwards. forks [absent]: absent has the device reads fetch from storage. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 49 * 4096, CHILDREN = 40 };
extern char **environ;
static unsigned char bytes[SIZE], got[SIZE];
static unsigned char *device;
static int fd, absent;
static atomic_int stop;

static void before_device_read(void)
{
    if (absent)
        CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
}

static void device_read(void)
{
    before_device_read();
    CHECK(pread(fd, device, SIZE, 0) == SIZE);
    device_get(got, device, SIZE);
    CHECK(memcmp(got, bytes, SIZE) == 0);
}

/* Keeps the library's locks busy while the main thread forks. */
static void *reading(void *unused)
{
    (void)unused;
    unsigned char *mine = device_alloc(SIZE);
    int out = open("forks.out", O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    while (!atomic_load(&stop)) {
        before_device_read();
        CHECK(pread(fd, mine, SIZE, 0) == SIZE);
        CHECK(pwrite(out, mine, SIZE, 0) == SIZE);
    }
    close(out), unlink("forks.out");
    device_free(mine);
    return NULL;
}

static void expect_success(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    absent = argc == 2 && strcmp(argv[1], "absent") == 0;
    fd = open("forks.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    for (size_t i = 0; i < SIZE; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 11);
    CHECK(fd >= 0 && write(fd, bytes, SIZE) == SIZE && fsync(fd) == 0);
    device = device_alloc(SIZE);
    device_read();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, reading, NULL) == 0);
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(600);
            unsigned char *copy = malloc(SIZE);
            if (pread(fd, copy, SIZE, 0) != SIZE || memcmp(copy, bytes, SIZE) || pwrite(fd, copy, SIZE, 0) != SIZE)
                _exit(1);
            dup2(fd, 100);
            if (close(fd) || close(100) || close_range(0, ~0u, 0))
                _exit(2);
            _exit(0);
        }
        expect_success(child);
        child = vfork();
        if (child == 0) {
            close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
            dup2(fd, 0);
            close(fd + 1);
            execl("/bin/true", "true", (char *)0);
            _exit(3);
        }
        expect_success(child);
        char *arguments[] = {"true", NULL};
        CHECK(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0);
        expect_success(child);
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    device_read();
    if (!device_has_descriptors()) {
        /* The program may close every descriptor it has: the library owns none of them. */
        close_range(3, ~0u, 0);
        fd = open("forks.tmp", O_RDONLY);
        CHECK(fd == 3);
        device_read();
    }
    unlink("forks.tmp");
    device_free(device);
    return 0;
}
