/* Small reads into device memory with one build of the library and with another, by turns: CPU time of the calling
 * thread for a pread and for a read of 4 and of 64 KiB out of the page cache, into the emulated device.
 *
 *   two_builds LIBRARY LIBRARY
 *   two_builds --reads COUNT KIND      only makes reads, to count instructions: once with few and once with many,
 *                                      under valgrind --tool=callgrind --separate-threads=yes, with LD_PRELOAD
 *
 * Runs itself as a child, with one library and the other in changing order, so that drift of the machine affects both.
 * A child reports the lower quartile of its batches, since other programs disturb some. The ratio is that of two
 * neighbours: its median and quartiles. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../common/measure.h"

enum { ROUNDS = 25, BATCHES = 61, FILE_SIZE = 16 << 20 };
static const struct { const char *name; size_t size; int own_offset, calls; } kinds[] = {
    {"pread 4 KiB", 4096, 0, 400},
    {"pread 64 KiB", 65536, 0, 100},
    {"read 4 KiB", 4096, 1, 400},
    {"read 64 KiB", 65536, 1, 100},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* ---- the child ------------------------------------------------------------------------------------------------- */

static int cached_file(void)
{
    char path[] = "/tmp/two_builds-XXXXXX";
    static char block[1 << 20];
    int fd = mkstemp(path);
    if (fd < 0 || unlink(path))
        die(path);
    memset(block, 1, sizeof block);
    for (size_t at = 0; at < FILE_SIZE; at += sizeof block)
        if (write(fd, block, sizeof block) != sizeof block)
            die(path);
    return fd;
}

static void read_all(int fd, char *memory, int kind, int calls)
{
    size_t size = kinds[kind].size, at = 0;
    for (int i = 0; i < calls; i++, at = (at + size) % FILE_SIZE) {
        if (kinds[kind].own_offset && at == 0)
            lseek(fd, 0, SEEK_SET);
        ssize_t got = kinds[kind].own_offset ? read(fd, memory, size) : pread(fd, memory, size, at);
        if (got != (ssize_t)size)
            die("a read");
    }
}

static int child(int only, int reads)
{
    int fd = cached_file();
    void *(*alloc)(const char *, size_t, unsigned) = spinio_function("spinio_mem_alloc");
    char *memory = alloc("emulated", 1 << 20, 0);
    if (!memory)
        die("spinio_mem_alloc");
    if (reads > 0)
        read_all(fd, memory, only, reads);
    for (int kind = 0; kind < KINDS && reads == 0; kind++) {
        double times[BATCHES];
        for (int i = -3; i < BATCHES; i++) {
            double begun = seconds(CLOCK_THREAD_CPUTIME_ID);
            read_all(fd, memory, kind, kinds[kind].calls);
            if (i >= 0)
                times[i] = (seconds(CLOCK_THREAD_CPUTIME_ID) - begun) * 1e9 / kinds[kind].calls;
        }
        median(times, BATCHES);
        printf("%f\n", times[BATCHES / 4]);
    }
    return 0;
}

/* ---- the parent ------------------------------------------------------------------------------------------------ */

static void run(const char *library, double *times)
{
    int ends[2];
    if (pipe(ends))
        die("pipe");
    if (fork() == 0) {
        dup2(ends[1], 1);
        setenv("LD_PRELOAD", library, 1);
        execl("/proc/self/exe", "two_builds", "--child", (char *)0);
        die("/proc/self/exe");
    }
    close(ends[1]);
    FILE *answer = fdopen(ends[0], "r");
    for (int kind = 0; kind < KINDS; kind++)
        if (fscanf(answer, "%lf", &times[kind]) != 1)
            die(library);
    fclose(answer);
    wait(NULL);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--child") == 0)
        return child(0, 0);
    if (argc == 4 && strcmp(argv[1], "--reads") == 0 && atoi(argv[3]) >= 0 && atoi(argv[3]) < KINDS)
        return child(atoi(argv[3]), atoi(argv[2]));
    if (argc != 3) {
        fprintf(stderr, "usage: %s LIBRARY LIBRARY | --reads COUNT KIND\n", argv[0]);
        return 2;
    }
    static double times[2][KINDS][ROUNDS], ratios[KINDS][ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        double one[2][KINDS];
        for (int turn = 0; turn < 2; turn++)
            run(argv[1 + (round + turn) % 2], one[(round + turn) % 2]);
        for (int kind = 0; kind < KINDS; kind++) {
            for (int library = 0; library < 2; library++)
                times[library][kind][round] = one[library][kind];
            ratios[kind][round] = one[1][kind] / one[0][kind];
        }
    }
    printf("%-14s %12s %12s %8s %18s %8s\n", "", "first (ns)", "second (ns)", "ratio", "quartiles", "fastest");
    for (int kind = 0; kind < KINDS; kind++) {
        double first = median(times[0][kind], ROUNDS), second = median(times[1][kind], ROUNDS);
        double ratio = median(ratios[kind], ROUNDS);
        printf("%-14s %12.0f %12.0f %8.3f %8.3f to %.3f %9.3f\n", kinds[kind].name, first, second, ratio,
               ratios[kind][ROUNDS / 4], ratios[kind][3 * ROUNDS / 4], times[1][kind][0] / times[0][kind][0]);
    }
    return 0;
}
