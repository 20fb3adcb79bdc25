/* The cost of counting and tracing for a program's device reads: a pread of 4 KiB and of 8 MiB from the page cache into
 * device memory, with SPINIO_STATS=off, with the default counters of every process, and with SPINIO_TRACE=1.
 *
 *   device_call LIBRARY [emulated | cuda]
 *
 * Runs itself as a child, in the three modes by turns and in changing order, so that drift of the machine affects all
 * alike. A child reports the fastest of many short batches, in wall time and in CPU time: of the calling thread for
 * 4 KiB, of the whole process for 8 MiB, where workers share the work. The fastest, because a shared machine has slow
 * periods, longer than a batch. The table shows medians over children, and compares the fastest children as "best".
 * The goal for counting is at most 1.01. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../common/gpu.h"
#include "../common/measure.h"

enum { ROUNDS = 21, BATCHES = 201, KINDS = 2, MODES = 3, CLOCKS = 2 };
enum { LARGE = 8 << 20, FILE_SIZE = 64 << 20 };
static const size_t sizes[KINDS] = {4096, LARGE};
static const int calls[KINDS] = {500, 4};
static const char *modes[MODES] = {"off", "counting", "tracing"};

/* ---- the child ------------------------------------------------------------------------------------------------- */

static char *device_memory(const char *device)
{
    if (!strcmp(device, "emulated")) {
        void *(*alloc)(const char *, size_t, unsigned) = spinio_function("spinio_mem_alloc");
        char *memory = alloc(device, LARGE, 0);
        if (!memory)
            die("spinio_mem_alloc");
        return memory;
    }
    gpu_ptr memory;
    gpu_open();
    GPU(cuMemAlloc_v2(&memory, LARGE));
    return (char *)memory;
}

static void batch(int fd, char *memory, int kind, double *out)
{
    clockid_t processor = kind == 0 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_PROCESS_CPUTIME_ID;
    double begun[CLOCKS] = {now(), seconds(processor)};
    for (int i = 0; i < calls[kind]; i++)
        if (pread(fd, memory, sizes[kind], (off_t)(i * sizes[kind]) % FILE_SIZE) != (ssize_t)sizes[kind])
            die("pread");
    out[0] = (now() - begun[0]) * 1e9 / calls[kind];
    out[1] = (seconds(processor) - begun[1]) * 1e9 / calls[kind];
}

static int child(const char *device)
{
    char path[] = "/tmp/device_call-XXXXXX";
    char *block = malloc(1 << 20);
    int fd = mkstemp(path);
    if (fd < 0 || unlink(path) || !block)
        die(path);
    memset(block, 1, 1 << 20);
    for (int i = 0; i < FILE_SIZE >> 20; i++)
        if (write(fd, block, 1 << 20) != 1 << 20)
            die(path);
    char *memory = device_memory(device);
    for (int kind = 0; kind < KINDS; kind++) {
        double best[CLOCKS] = {0}, one[CLOCKS];
        for (int i = -2; i < BATCHES; i++) {
            batch(fd, memory, kind, one);
            for (int clock = 0; clock < CLOCKS && i >= 0; clock++)
                best[clock] = i && best[clock] < one[clock] ? best[clock] : one[clock];
        }
        for (int clock = 0; clock < CLOCKS; clock++)
            printf("%f\n", best[clock]);
    }
    return 0;
}

/* ---- the parent ------------------------------------------------------------------------------------------------ */

static int run(const char *self, const char *library, const char *device, int mode, double out[KINDS][CLOCKS])
{
    int ends[2];
    if (pipe(ends))
        die("pipe");
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 1);
        setenv("LD_PRELOAD", library, 1);
        unsetenv("SPINIO_STATS"), unsetenv("SPINIO_TRACE");
        if (mode == 0)
            setenv("SPINIO_STATS", "off", 1);
        if (mode == 2)
            setenv("SPINIO_TRACE", "1", 1);
        execl(self, self, "--child", device, (char *)0);
        die(self);
    }
    close(ends[1]);
    FILE *answer = fdopen(ends[0], "r");
    int got = 0, status;
    while (got < KINDS * CLOCKS && fscanf(answer, "%lf", &out[got / CLOCKS][got % CLOCKS]) == 1)
        got++;
    fclose(answer);
    waitpid(pid, &status, 0);
    return got == KINDS * CLOCKS && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--child"))
        return child(argv[2]);
    if (argc < 2) {
        fprintf(stderr, "usage: %s LIBRARY [emulated | cuda]\n", argv[0]);
        return 2;
    }
    static double all[MODES][KINDS][CLOCKS][ROUNDS];
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < MODES; turn++) {
            int mode = (round + turn) % MODES;
            double one[KINDS][CLOCKS];
            if (!run("/proc/self/exe", argv[1], argc > 2 ? argv[2] : "emulated", mode, one))
                return 1;
            for (int kind = 0; kind < KINDS; kind++)
                for (int clock = 0; clock < CLOCKS; clock++)
                    all[mode][kind][clock][round] = one[kind][clock];
        }
    printf("%-9s %8s  %12s  %6s  %6s  %14s  %6s  %6s\n", "", "bytes", "clock (ns)", "ratio", "best", "processor (ns)",
           "ratio", "best");
    for (int kind = 0; kind < KINDS; kind++) {
        double middle[MODES][CLOCKS];
        for (int mode = 0; mode < MODES; mode++) {
            printf("%-9s %8zu", modes[mode], sizes[kind]);
            for (int clock = 0; clock < CLOCKS; clock++) {
                /* `median` sorts them, so the best is first. */
                middle[mode][clock] = median(all[mode][kind][clock], ROUNDS);
                printf("  %*.1f  %6.3f  %6.3f", clock == 0 ? 12 : 14, middle[mode][clock],
                       middle[mode][clock] / middle[0][clock],
                       all[mode][kind][clock][0] / all[0][kind][clock][0]);
            }
            printf("\n");
        }
    }
    return 0;
}
