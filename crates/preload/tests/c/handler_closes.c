/* A signal handler closes, or replaces, a descriptor that was read into a device, while the thread it interrupts is
 * in malloc or free: neither call may allocate or free. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 4 << 20, TURNS = 1000 };
static volatile int to_close = -1, turn;

static void handler(int signal)
{
    (void)signal;
    int fd = to_close;
    if (fd < 0)
        return;
    if (turn % 4 == 3)
        dup2(0, fd);
    else
        close(fd);
    to_close = -1;
}

int main(void)
{
    char *device = device_alloc(SIZE), path[] = "handler-closes-XXXXXX";
    static char bytes[SIZE];
    int file = mkstemp(path);
    CHECK(file >= 0 && write(file, bytes, SIZE) == SIZE && fsync(file) == 0);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigset_t alarm;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && sigemptyset(&alarm) == 0 && sigaddset(&alarm, SIGALRM) == 0);
    for (turn = 0; turn < TURNS; turn++) {
        /* No signal interrupts the device read. */
        CHECK(sigprocmask(SIG_BLOCK, &alarm, NULL) == 0);
        int fd = open(path, O_RDONLY);
        CHECK(fd >= 0 && pread(fd, device, SIZE, 0) == SIZE);
        to_close = fd;
        struct itimerval soon = {{0, 0}, {0, 100 + rand() % 100}};
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0 && sigprocmask(SIG_UNBLOCK, &alarm, NULL) == 0);
        /* The caches of the thread are full, so that what the handler frees needs the arena. */
        for (size_t size = 24; size <= 1032; size += 16) {
            void *cached[8];
            for (int i = 0; i < 8; i++)
                cached[i] = malloc(size);
            for (int i = 0; i < 8; i++)
                free(cached[i]);
        }
        while (to_close >= 0) {
            void *some[8];
            for (int i = 0; i < 8; i++)
                some[i] = malloc((size_t)(1500 + i * 700 + rand() % 500));
            for (int i = 0; i < 8; i++)
                free(some[i]);
        }
        if (turn % 4 == 3)
            close(fd);
    }
    unlink(path);
    return 0;
}
