/* The cost of SPIN for a program's host reads and writes: nanoseconds per pread or pwrite of 1 byte and of 4 KiB from
 * and to the page cache, without and with the library.
 *
 *   host_call LIBRARY [plain | emulated | cuda]...
 *
 * plain     the program never touches a device
 * emulated  it has allocated memory of the emulated device, so every buffer is looked up
 * cuda      it has a CUDA context and has allocated device memory
 *
 * Runs itself as a child, by turns without and with LD_PRELOAD, so that drift of the machine affects both alike. A
 * child reports the median of its batches; the table shows medians over children, and the ratio of the best next to
 * that of the medians, since a shared machine has slow periods. All on one processor. The goal is at most 1.05. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../common/gpu.h"
#include "../common/measure.h"

enum { ROUNDS = 21, BATCHES = 41, CALLS = 4000, KINDS = 4 };
static const struct { const char *call; size_t size; } kinds[KINDS] = {{"pread", 1}, {"pread", 4096}, {"pwrite", 1}, {"pwrite", 4096}};

/* ---- the child ------------------------------------------------------------------------------------------------- */

static void *sleep_forever(void *unused)
{
    for (;;)
        pause();
    return unused;
}

static void use_emulated(void)
{
    /* The emulated device has a thread, and calls cost more in a process with two threads: so there are two without the
     * library too. */
    pthread_t thread;
    if (pthread_create(&thread, NULL, sleep_forever, NULL))
        die("pthread_create");
    /* Without the library there is no such device, and the baseline is a plain program. */
    void *(*alloc)(const char *, size_t, unsigned) = dlsym(RTLD_DEFAULT, "spinio_mem_alloc");
    if (alloc && !alloc("emulated", 1 << 20, 0))
        die("spinio_mem_alloc");
}

static void use_cuda(void)
{
    gpu_ptr memory;
    gpu_open();
    GPU(cuMemAlloc_v2(&memory, 1 << 20));
    /* One read into device memory, as in any program that is worth preloading; without the library it fails. */
    int fd = open("/dev/zero", O_RDONLY);
    if (read(fd, (void *)memory, 1 << 20) < 0 && getenv("LD_PRELOAD"))
        die("read into device memory");
    close(fd);
}

static double batch(int fd, char *buffer, int kind)
{
    size_t size = kinds[kind].size;
    ssize_t (*call)(int, void *, size_t, off_t) = strcmp(kinds[kind].call, "pread") ? (void *)pwrite : (void *)pread;
    double begun = now();
    for (int i = 0; i < CALLS; i++)
        if (call(fd, buffer, size, (i & 15) * 4096) != (ssize_t)size)
            die(kinds[kind].call);
    return (now() - begun) * 1e9 / CALLS;
}

static int child(const char *state)
{
    static char buffer[4096], page[65536];
    double values[BATCHES];
    char path[] = "/tmp/host_call-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0 || unlink(path) || write(fd, page, sizeof page) != sizeof page)
        die(path);
    if (!strcmp(state, "emulated"))
        use_emulated();
    if (!strcmp(state, "cuda"))
        use_cuda();
    for (int kind = 0; kind < KINDS; kind++) {
        batch(fd, buffer, kind);
        for (int i = 0; i < BATCHES; i++)
            values[i] = batch(fd, buffer, kind);
        printf("%f\n", median(values, BATCHES));
    }
    return 0;
}

/* ---- the parent ------------------------------------------------------------------------------------------------ */

static int run(const char *self, const char *library, const char *state, double *out)
{
    int ends[2];
    if (pipe(ends))
        die("pipe");
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 1);
        if (library)
            setenv("LD_PRELOAD", library, 1);
        else
            unsetenv("LD_PRELOAD");
        execl(self, self, "--child", state, (char *)0);
        die(self);
    }
    close(ends[1]);
    FILE *answer = fdopen(ends[0], "r");
    int got = 0, status;
    while (got < KINDS && fscanf(answer, "%lf", &out[got]) == 1)
        got++;
    fclose(answer);
    waitpid(pid, &status, 0);
    return got == KINDS && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int argc, char **argv)
{
    static const char *all[] = {"plain", "emulated"};
    if (argc == 3 && !strcmp(argv[1], "--child"))
        return child(argv[2]);
    if (argc < 2) {
        fprintf(stderr, "usage: %s LIBRARY [plain | emulated | cuda]...\n", argv[0]);
        return 2;
    }
    const char **states = argc > 2 ? (const char **)argv + 2 : all;
    int count = argc > 2 ? argc - 2 : 2, failed = 0;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    sched_setaffinity(0, sizeof here, &here);
    printf("%-9s %-6s %6s  %12s  %12s  %6s  %6s\n", "program", "call", "bytes", "without (ns)", "with (ns)", "ratio", "best");
    for (int s = 0; s < count; s++) {
        double without[KINDS][ROUNDS], with[KINDS][ROUNDS], one[KINDS];
        int fine = 1;
        for (int round = 0; round < ROUNDS && fine; round++)
            for (int turn = 0; turn < 2 && fine; turn++) {
                int loaded = (round + turn) & 1; /* the order alternates */
                fine = run("/proc/self/exe", loaded ? argv[1] : NULL, states[s], one);
                for (int kind = 0; kind < KINDS; kind++)
                    (loaded ? with : without)[kind][round] = one[kind];
            }
        if (!fine) {
            printf("%-9s skipped: see above\n", states[s]);
            failed = 1;
            continue;
        }
        for (int kind = 0; kind < KINDS; kind++) {
            double a = median(without[kind], ROUNDS), b = median(with[kind], ROUNDS);
            /* `median` has sorted them. */
            double best = with[kind][0] / without[kind][0];
            printf("%-9s %-6s %6zu  %12.1f  %12.1f  %6.3f  %6.3f\n", states[s], kinds[kind].call, kinds[kind].size, a, b,
                   b / a, best);
        }
        fflush(stdout);
    }
    return failed;
}
