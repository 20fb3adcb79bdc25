/* What the library keeps beside a file goes when the program closes it, by whatever name; children that close do not make
 * it go. A signal handler may close in the middle of a device read. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 4 << 20 };
static char *device;
static volatile int signals;

/* Descriptors of the file in any thread's table, the program's own included. */
static int kept(void)
{
    int found = 0;
    char here[4096], folder[64], link[512], path[4096];
    CHECK(realpath("closes.tmp", here));
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        snprintf(folder, sizeof folder, "/proc/self/task/%.20s/fd", task->d_name);
        DIR *table = task->d_name[0] == '.' ? NULL : opendir(folder);
        for (struct dirent *fd; table && (fd = readdir(table));) {
            snprintf(link, sizeof link, "%s/%s", folder, fd->d_name);
            ssize_t n = readlink(link, path, sizeof path - 1);
            if (n > 0 && (path[n] = 0, !strcmp(path, here)))
                found++;
        }
        if (table)
            closedir(table);
    }
    closedir(tasks);
    return found;
}

/* A helper that is just finishing a piece may hold the file for a moment longer. */
static int gone(void)
{
    for (int i = 0; i < 10000 && kept() > 0; i++)
        usleep(1000);
    return kept() == 0;
}

static int opened(void)
{
    int fd = open("closes.tmp", O_RDONLY);
    CHECK(fd >= 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    CHECK(pread(fd, device, SIZE, 0) == SIZE);
    return fd;
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

    fd = opened();
    int most = kept();
    /* A child that closes everything is no reason to let go. */
    pid_t child = vfork();
    if (child == 0) {
        close(fd);
        close_range(3, ~0u, 0);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, NULL, 0) == child && kept() == most);
    close(fd);
    CHECK(gone());
    fd = opened();
    CHECK(dup2(0, fd) == fd && gone());
    close(fd);
    fd = opened();
    CHECK(dup3(0, fd, O_CLOEXEC) == fd && gone());
    close(fd);
    opened();
    CHECK(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC) == 0 && kept() == most);
    CHECK(close_range(3, ~0u, 0) == 0 && gone());
    opened();
    closefrom(3);
    CHECK(gone());

    struct sigaction action = {.sa_handler = closing_handler, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 300}, {0, 300}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    fd = open("closes.tmp", O_RDONLY);
    for (int i = 0; signals < 300; i++)
        CHECK(pread(fd, device, i % 2 ? SIZE : 100, 0) > 0);
    unlink("closes.tmp");
    return 0;
}
