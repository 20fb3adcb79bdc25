/* After a process has become another user, the library's threads have that user too, and its open files can be read. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <stdint.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 8 << 20, NOBODY = 65534 };
static char host[SIZE], back[SIZE];

/* The number of threads; checks that all are of this user, but for the kernel's thread of the ring (iou-sqp), which keeps
 * the rights of its beginning, and can only read files that are open: the ring is restricted. */
static int threads_of(long user)
{
    char path[300], line[256];
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        long real, effective, saved;
        int of_kernel = 0;
        snprintf(path, sizeof path, "/proc/self/task/%.20s/status", task->d_name);
        FILE *status = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (status && fgets(line, sizeof line, status))
            if (!strncmp(line, "Name:\tiou-sqp", 13))
                of_kernel = 1;
            else if (!of_kernel && sscanf(line, "Uid: %ld %ld %ld", &real, &effective, &saved) == 3) {
                CHECK(real == user && effective == user && saved == user);
                count++;
            }
        if (status)
            fclose(status);
    }
    closedir(tasks);
    return count;
}

static void reads(int fd, char *device)
{
    memset(back, 0, SIZE);
    CHECK(pread(fd, device, SIZE, 0) == SIZE);
    device_get(back, device, SIZE);
    CHECK(!memcmp(host, back, SIZE));
}

/* A file that only root may open. */
static int written(const char *name)
{
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && pwrite(fd, host, SIZE, 0) == SIZE && fsync(fd) == 0);
    unlink(name);
    return fd;
}

int main(void)
{
    if (geteuid() != 0) {
        puts("skipped: only root can become another user");
        return 0;
    }
    uint64_t seed = 88172645463325252u;
    for (size_t i = 0; i < SIZE; i += 8) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        memcpy(host + i, &seed, 8);
    }
    char *device = device_alloc(SIZE);
    int before = written("before.tmp"), after = written("after.tmp");
    CHECK(posix_fadvise(before, 0, 0, POSIX_FADV_DONTNEED) == 0);
    reads(before, device);
    CHECK(threads_of(0) > 1);
    CHECK(setgroups(0, NULL) == 0 && setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
    CHECK(threads_of(NOBODY) > 1);
    CHECK(posix_fadvise(before, 0, 0, POSIX_FADV_DONTNEED) == 0);
    reads(before, device);
    /* The process may not open it again, so the read takes another route; it succeeds. */
    CHECK(posix_fadvise(after, 0, 0, POSIX_FADV_DONTNEED) == 0);
    reads(after, device);
    CHECK(threads_of(NOBODY) > 1);
    return 0;
}
