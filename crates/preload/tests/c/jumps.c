/* A signal handler leaves waiting device reads by longjmp: no resource that other reads need is lost, and memory is
 * bounded. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 1 << 20, FILE_SIZE = 12 << 20, JUMPS = 200 };
static unsigned char sent[FILE_SIZE], got[FILE_SIZE];
static sigjmp_buf out;
static pthread_t reader;
static pid_t reader_tid;
static volatile int left_to_jump;

static void jump(int signal)
{
    (void)signal;
    siglongjmp(out, 1);
}

/* A signal outside the kernel's read could leave a lock locked. */
static int waits_in_read(void)
{
    char path[64], call[64] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", reader_tid);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    CHECK(read(fd, call, sizeof call - 1) > 0);
    close(fd);
    return strncmp(call, "0 ", 2) == 0;
}

static void *interrupt_reader(void *unused)
{
    (void)unused;
    for (int left = JUMPS; left > 0; left--) {
        while (left_to_jump != left || !waits_in_read())
            usleep(100);
        CHECK(pthread_kill(reader, SIGUSR1) == 0);
    }
    return NULL;
}

static long memory_in_kib(void)
{
    char line[128];
    long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    while (fgets(line, sizeof line, status))
        sscanf(line, "VmData: %ld", &kib);
    fclose(status);
    return kib;
}

int main(void)
{
    unsigned char *device = device_alloc(FILE_SIZE);
    for (size_t i = 0; i < FILE_SIZE; i++)
        sent[i] = (unsigned char)(i * 2654435761u >> 13);
    char path[] = "jumps-XXXXXX";
    int file = mkstemp(path), sockets[2];
    CHECK(file >= 0 && unlink(path) == 0 && write(file, sent, FILE_SIZE) == FILE_SIZE && fsync(file) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    CHECK(pread(file, device, FILE_SIZE, 0) == FILE_SIZE);
    /* The socket gets a number that was a regular file when it was read last. */
    int number = dup(file);
    CHECK(number >= 0 && lseek(number, 0, SEEK_SET) == 0);
    for (int turn = 0; turn < 3; turn++)
        CHECK(read(number, device, 4096) == 4096);
    CHECK(dup2(sockets[0], number) == number && close(sockets[0]) == 0);
    sockets[0] = number;

    struct sigaction action = {.sa_handler = jump, .sa_flags = SA_NODEFER};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    reader = pthread_self();
    reader_tid = (pid_t)syscall(SYS_gettid);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, interrupt_reader, NULL) == 0);
    long before = 0;
    static volatile int jumped;
    for (jumped = 0; jumped < JUMPS; jumped++) {
        if (jumped == 8)
            before = memory_in_kib();
        if (sigsetjmp(out, 1) == 0) {
            left_to_jump = JUMPS - jumped;
            /* Small and large reads. */
            read(sockets[0], device, jumped % 3 == 0 ? 4096 : SIZE);
            CHECK(!"a read of an idle socket returned");
        }
    }
    pthread_join(thread, NULL);
    CHECK(memory_in_kib() - before < 16 << 10);

    CHECK(write(sockets[1], sent, 5000) == 5000);
    CHECK(read(sockets[0], device, SIZE) == 5000);
    device_get(got, device, 5000);
    CHECK(memcmp(got, sent, 5000) == 0);
    for (int turn = 0; turn < 2; turn++) {
        device_put(device, got, FILE_SIZE);
        CHECK(pread(file, device, FILE_SIZE, 0) == FILE_SIZE);
        device_get(got, device, FILE_SIZE);
        CHECK(memcmp(got, sent, FILE_SIZE) == 0);
        CHECK(pread(file, device, 4096, 4096) == 4096);
        CHECK(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);
        sigset_t blocked;
        CHECK(pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0 && !sigismember(&blocked, SIGINT));
    }
    device_free(device);
    return 0;
}
