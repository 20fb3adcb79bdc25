/* Handlers that leave large device reads of a local file at any moment, also while the library looks the file up: no lock may
 * stay locked. After each jump one read is left alone, and must return. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 128 << 10, ROUNDS = 1500, READS = 200 };
static sigjmp_buf out;
static volatile int armed, jumps, round_over;

static void jump(int signal)
{
    (void)signal;
    if (armed) {
        armed = 0;
        jumps++;
        siglongjmp(out, 1);
    }
}

static void *watch(void *unused)
{
    (void)unused;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    for (int last = 0;; last = round_over) {
        sleep(300);
        if (round_over == last) {
            printf("a read has not returned for five minutes, after %d jumps\n", jumps);
            fflush(stdout);
            _exit(3);
        }
    }
}

static void set_timer(int microseconds)
{
    struct itimerval timer = {.it_value = {.tv_usec = microseconds}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

int main(void)
{
    char path[] = "jumps-XXXXXX";
    static char bytes[SIZE];
    static volatile int round;
    int file = mkstemp(path);
    CHECK(file >= 0 && unlink(path) == 0);
    if (!is_on_local_disk(file))
        return 0;
    CHECK(write(file, bytes, SIZE) == SIZE && fsync(file) == 0);
    unsigned char *device = device_alloc(SIZE);
    CHECK(pread(file, device, SIZE, 0) == SIZE);
    CHECK(signal(SIGALRM, jump) != SIG_ERR);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, watch, NULL) == 0);
    for (round = 0; round < ROUNDS; round++) {
        if (sigsetjmp(out, 1) == 0) {
            armed = 1;
            set_timer(20 + rand() % 3000);
            for (int reads = 0; armed && reads < READS; reads++)
                CHECK(pread(file, device, SIZE, 0) == SIZE);
            armed = 0;
        }
        set_timer(0);
        CHECK(pread(file, device, SIZE, 0) == SIZE);
        round_over = round + 1;
    }
    printf("%d of %d rounds were left\n", jumps, ROUNDS);
    CHECK(jumps > ROUNDS / 10);
    return 0;
}
