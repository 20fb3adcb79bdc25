/* The library's shadow descriptors of a file are closed when the program closes the file, by any of its names; closes
 * in children do not count. A signal handler may close in the middle of a device read. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spinio.h>

#include "check.h"
#include "memory.h"
#include "../../../../benches/common/preloaded.h"

enum { SIZE = 4 << 20 };
static char *device;
static volatile int signals;

/* Whether a thread with an unshared fd table has the file open. A pipe of this program marks the program's own
 * table. */
static int has_shadow_fd(void)
{
    static int mark[2];
    static char mark_name[64];
    int found = 0;
    char here[4096], directory[64], link[512], path[4096];
    if (!mark_name[0]) {
        CHECK(pipe(mark) == 0);
        snprintf(link, sizeof link, "/proc/self/fd/%d", mark[0]);
        CHECK(readlink(link, mark_name, sizeof mark_name - 1) > 0);
    }
    CHECK(realpath("closes.tmp", here));
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        int holds = 0, ours = 0;
        snprintf(directory, sizeof directory, "/proc/self/task/%.20s/fd", task->d_name);
        DIR *table = task->d_name[0] == '.' ? NULL : opendir(directory);
        for (struct dirent *fd; table && (fd = readdir(table));) {
            snprintf(link, sizeof link, "%s/%s", directory, fd->d_name);
            ssize_t n = readlink(link, path, sizeof path - 1);
            path[n > 0 ? n : 0] = 0;
            holds |= !strcmp(path, here);
            ours |= !strcmp(path, mark_name);
        }
        if (table)
            closedir(table);
        found |= holds && !ours;
    }
    closedir(tasks);
    return found;
}

/* A shadow worker that is finishing a chunk may have the file open for a moment longer. */
static int shadow_fd_closed(void)
{
    for (int i = 0; i < 100000 && has_shadow_fd(); i++)
        usleep(1000);
    return !has_shadow_fd();
}

static int open_and_read(void)
{
    int fd = open("closes.tmp", O_RDONLY);
    CHECK(fd >= 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    CHECK(pread(fd, device, SIZE, 0) == SIZE);
    return fd;
}

/* Whether the shadow descriptor stays open after an event that is no reason to close it. An idle one is closed soon
 * anyway, so one time out of many is enough; if none is ever open (no direct I/O here) there is nothing to check. */
static int shadow_fd_stays(int fd, void (*something)(int))
{
    for (int i = 0; i < 50; i++) {
        CHECK(pread(fd, device, SIZE, 0) == SIZE);
        if (!has_shadow_fd())
            return 1;
        something(fd);
        if (has_shadow_fd())
            return 1;
    }
    return 0;
}

static void child_closes(int fd)
{
    pid_t child = vfork();
    if (child == 0) {
        close(fd);
        close_range(3, ~0u, 0);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, NULL, 0) == child);
}

static void only_marked(int fd)
{
    CHECK(close_range(fd, fd, CLOSE_RANGE_CLOEXEC) == 0);
}

/* They leave fd open. */
static void failing_dups(int fd)
{
    errno = 0;
    CHECK(dup2(-1, fd) == -1 && errno == EBADF);
    CHECK(dup2(999, fd) == -1 && errno == EBADF);
    CHECK(dup3(-1, fd, O_CLOEXEC) == -1 && errno == EBADF);
    CHECK(dup3(0, fd, O_NONBLOCK) == -1 && errno == EINVAL);
    CHECK(dup3(fd, fd, 0) == -1 && errno == EINVAL);
    CHECK(dup2(fd, fd) == fd);
    /* The program lowered its limit after it had opened fd. */
    struct rlimit before, low;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    low = before;
    low.rlim_cur = (rlim_t)fd;
    CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
    CHECK(dup2(0, fd) == -1 && errno == EBADF);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

static void closing_handler(int signal)
{
    (void)signal;
    signals++;
    int fd = dup(0);
    if (fd >= 0)
        close(fd);
}

int main(void)
{
    device = device_alloc(SIZE);
    int fd = open("closes.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0 && fsync(fd) == 0);
    close(fd);

    fd = open_and_read();
    CHECK(shadow_fd_stays(fd, child_closes));
    close(fd);
    CHECK(shadow_fd_closed());
    fd = open_and_read();
    CHECK(dup2(0, fd) == fd && shadow_fd_closed());
    close(fd);
    fd = open_and_read();
    CHECK(dup3(0, fd, O_CLOEXEC) == fd && shadow_fd_closed());
    close(fd);
    fd = open_and_read();
    CHECK(shadow_fd_stays(fd, only_marked));
    CHECK(shadow_fd_stays(fd, failing_dups));
    CHECK(close_range(fd, fd, 0) == 0 && shadow_fd_closed());
    /* A pinned file is unpinned by a dup2 that replaces it, and by no other. */
    fd = open_and_read();
    if (FIND(spinio_pin_file)(fd) == 0) {
        failing_dups(fd);
        CHECK(FIND(spinio_is_pinned)(fd) == 1);
        int same = dup(fd);
        CHECK(dup2(0, fd) == fd && FIND(spinio_is_pinned)(same) == 0);
        close(same);
    }
    close(fd);
    /* Above all other descriptors, since those may be the driver's. */
    fd = open_and_read();
    CHECK(dup2(fd, 1000) == 1000 && close(fd) == 0);
    CHECK(pread(1000, device, SIZE, 0) == SIZE);
    closefrom(1000);
    CHECK(shadow_fd_closed());

    struct sigaction action = {.sa_handler = closing_handler, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 300}, {0, 300}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    fd = open("closes.tmp", O_RDONLY);
    for (int i = 0; signals < 300; i++)
        CHECK(pread(fd, device, i % 2 ? SIZE : 100, 0) > 0);
    unlink("closes.tmp");
    return 0;
}
