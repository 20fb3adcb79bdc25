/* Signals during device reads of a file on a local disk. As with the kernel's own read, a handler runs when the read is
 * over: it may read into device memory itself, or leave by longjmp. A signal without a handler ends the process at once.
 *
 * handlers KIB [direct]: the length of a read; below 512 KiB the kernel reads ahead. direct: of an O_DIRECT descriptor. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

/* Rounds, and how many more there may be until a read was caught: on a busy machine the signal often comes too late. */
enum { ALL = 16 << 20, ROUNDS = 120, MOST = 20000 };
static unsigned char sent[ALL], got[ALL];
static size_t size;
static unsigned char *device, *second;
static sigjmp_buf out;
static int file;
static pthread_t reader;
static pid_t reader_tid;
static volatile int begun, over, answered, jumps, handled, last;

static void read_or_jump(int signal)
{
    (void)signal;
    handled++;
    if (jumps)
        siglongjmp(out, 1);
    if (pread(file, second, size, 0) != (ssize_t)size)
        _exit(9);
}

/* Whether the reader holds SIGUSR1 back. */
static int holds_signals(void)
{
    char path[64], line[256];
    unsigned long long mask = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/status", reader_tid);
    FILE *status = fopen(path, "r");
    CHECK(status != NULL);
    while (fgets(line, sizeof line, status))
        sscanf(line, "SigBlk: %llx", &mask);
    fclose(status);
    return mask >> (SIGUSR1 - 1) & 1;
}

static void *interrupt_reader(void *unused)
{
    (void)unused;
    for (int round = 1; !last; round++) {
        while (begun < round && !last)
            usleep(10);
        /* Most reads are caught in the middle, some a moment after. */
        while (over < round && !last)
            if (holds_signals()) {
                CHECK(pthread_kill(reader, SIGUSR1) == 0);
                break;
            }
        answered = round;
    }
    return NULL;
}

static int has_block(const unsigned char *memory, size_t block)
{
    device_get(got, memory, size);
    return memcmp(got, sent + block * size, size) == 0;
}

static void check_block(const unsigned char *memory, size_t block)
{
    CHECK(has_block(memory, block));
}

static void reads(void)
{
    begun = over = answered = handled = last = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, interrupt_reader, NULL) == 0);
    static volatile int round;
    volatile int not_begun = 0;
    for (round = 1; round <= ROUNDS || (handled <= not_begun && round <= MOST); round++) {
        /* Not front to back, which would be left to the kernel's read-ahead. */
        size_t block = (size_t)round * 7 % (ALL / size), before = (block + 1) % (ALL / size);
        volatile int jumped = 1;
        /* All of the file: Linux keeps a folio of which only a part is named. */
        CHECK(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);
        device_put(device, sent + before * size, size);
        if (sigsetjmp(out, 1) == 0) {
            begun = round;
            CHECK(pread(file, device, size, (off_t)(block * size)) == (ssize_t)size);
            jumped = 0;
        }
        over = round;
        /* A late signal must not reach the next round: it would jump back here before the read. */
        while (answered < round)
            usleep(10);
        /* The handler ran after the read, or the read returned. But signals are held a moment before the read begins, too, while
         * the owner of the address is asked for: a jump out of there leaves all bytes as they were. */
        if (jumps && jumped && !has_block(device, block)) {
            check_block(device, before);
            not_begun++;
            continue;
        }
        check_block(device, block);
        if (handled && !jumps)
            check_block(second, 0);
    }
    last = 1;
    pthread_join(thread, NULL);
    printf("%d of %d reads were interrupted, %d before they began\n", handled, round - 1, not_begun);
    CHECK(handled > not_begun);
}

/* How often a thread of this process, in whatever descriptor table, has the file open. */
static int opened(const char *name)
{
    glob_t links;
    int count = 0;
    if (glob("/proc/self/task/*/fd/*", 0, NULL, &links) != 0)
        return 0;
    for (size_t i = 0; i < links.gl_pathc; i++) {
        char target[4096];
        ssize_t length = readlink(links.gl_pathv[i], target, sizeof target - 1);
        if (length > 0) {
            target[length] = 0;
            count += strstr(target, name) != NULL;
        }
    }
    globfree(&links);
    return count;
}

/* After the program's own close no read that a handler left may keep the file open. */
static void closes_for_good(const char *name)
{
    CHECK(opened(name) > 0);
    CHECK(close(file) == 0);
    for (int tenths = 0; opened(name) > 0; tenths++) {
        CHECK(tenths < 3000);
        usleep(100000);
    }
}

/* Reads that take much longer than the signal takes to come end with it. */
static void ends_at_once(void)
{
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        setenv("HANDLERS_LONG", "1", 1);
        dup2(ready[1], 1);
        execl("/proc/self/exe", "handlers", "1024", NULL);
        _exit(8);
    }
    char byte;
    close(ready[1]);
    CHECK(read(ready[0], &byte, 1) == 1);
    usleep(30000);
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    CHECK(kill(child, SIGTERM) == 0);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    clock_gettime(CLOCK_MONOTONIC, &to);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    CHECK(to.tv_sec - from.tv_sec < 300);
}

/* A FIFO is on the disk, too, but its reader waits for a writer: signals come at once. */
static void fifo_reads_end_at_once(void)
{
    char folder[] = "fifo-XXXXXX", name[32];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(name, sizeof name, "%s/fifo", folder);
    CHECK(mkfifo(name, 0600) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        setenv("HANDLERS_FIFO", name, 1);
        execl("/proc/self/exe", "handlers", "1024", NULL);
        _exit(8);
    }
    int status = 0;
    for (int tenths = 0; waitpid(child, &status, WNOHANG) == 0; tenths++) {
        if (tenths == 3000)
            kill(child, SIGKILL);
        usleep(100000);
    }
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM);
    CHECK(unlink(name) == 0 && rmdir(folder) == 0);
}

static void read_fifo(const char *name)
{
    int fifo = open(name, O_RDWR);
    CHECK(fifo >= 0);
    alarm(1);
    _exit(pread(file, device, ALL, 0) == ALL && read(fifo, device, size) < 0 ? 6 : 7);
}

/* One read after another, for ever: all but the gaps between them hold signals. */
static void read_for_ever(void)
{
    write(1, "r", 1);
    for (;;)
        CHECK(pread(file, device, ALL, 0) == ALL);
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    size = strtoul(argv[1], NULL, 10) << 10;
    int direct = argc == 3 && strcmp(argv[2], "direct") == 0;
    device = device_alloc(ALL);
    second = device_alloc(size);
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (unsigned char)(i * 2654435761u >> 15);
    char path[] = "handlers-XXXXXX";
    file = mkstemp(path);
    CHECK(file >= 0 && unlink(path) == 0);
    if (!is_on_local_disk(file))
        return 0;
    CHECK(write(file, sent, sizeof sent) == (ssize_t)sizeof sent && fsync(file) == 0);
    if (direct) {
        char name[64];
        snprintf(name, sizeof name, "/proc/self/fd/%d", file);
        int other = open(name, O_RDONLY | O_DIRECT);
        CHECK(other >= 0 && dup2(other, file) == file && close(other) == 0);
    }
    if (getenv("HANDLERS_LONG"))
        read_for_ever();
    if (getenv("HANDLERS_FIFO"))
        read_fifo(getenv("HANDLERS_FIFO"));
    struct sigaction action = {.sa_handler = read_or_jump};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    reader = pthread_self();
    reader_tid = (pid_t)syscall(SYS_gettid);
    reads();
    jumps = 1;
    reads();
    /* Nothing of a call that a handler has left stays. */
    int state;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0 && state == PTHREAD_CANCEL_ENABLE);
    ends_at_once();
    fifo_reads_end_at_once();
    closes_for_good(path);
    device_free(second);
    device_free(device);
    return 0;
}
