/* What a pwrite of 4 KiB to a cached file costs, in folios as large as what was written at once, and after they are split.
 *
 *     cc -O2 folios.c -o folios && ./folios FILE PIECE MIB
 *
 * Makes FILE, MIB long, by writes of PIECE bytes, and removes it. Then writes one page in each MiB, five times; splits the
 * folios of these pages by MADV_COLD; and writes them again. Prints the processor time of each pwrite, in us: the first pass,
 * the median of the other four, and of a split. Exit status: 0 done, 1 an error, 2 usage.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MIB = 1 << 20, PASSES = 5 };

static void check(int right, const char *what)
{
    if (!right) {
        perror(what);
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void passes(int fd, long mib, const char *what)
{
    static char page[PAGE];
    double each[PASSES];
    for (int pass = 0; pass < PASSES; pass++) {
        double begun = now();
        for (long i = 0; i < mib; i++) {
            page[0] = (char)(i + pass);
            check(pwrite(fd, page, PAGE, (off_t)i * MIB) == PAGE, "pwrite");
        }
        each[pass] = (now() - begun) / mib;
    }
    double first = each[0];
    qsort(each + 1, PASSES - 1, sizeof *each, ascending);
    printf("%s: first %.2f us, then %.2f us\n", what, first, (each[2] + each[3]) / 2);
}

int main(int argc, char **argv)
{
    long piece = argc == 4 ? atol(argv[2]) : 0, mib = argc == 4 ? atol(argv[3]) : 0;
    if (piece <= 0 || mib <= 0) {
        fprintf(stderr, "usage: %s FILE PIECE MIB\n", argv[0]);
        return 2;
    }
    int fd = open(argv[1], O_RDWR | O_CREAT | O_EXCL, 0600);
    check(fd >= 0, argv[1]);
    unlink(argv[1]);
    char *bytes = calloc(1, piece);
    check(bytes != NULL, "memory");
    for (long at = 0; at < mib * MIB; at += piece)
        check(pwrite(fd, bytes, piece, at) == piece, "pwrite");
    check(fsync(fd) == 0, "fsync");
    passes(fd, mib, "as written");
    check(fsync(fd) == 0, "fsync");
    char *map = mmap(NULL, mib * MIB, PROT_READ, MAP_SHARED, fd, 0);
    check(map != MAP_FAILED, "mmap");
    double begun = now();
    for (long i = 0; i < mib; i++) {
        check(madvise(map + i * MIB, PAGE, MADV_POPULATE_READ) == 0, "MADV_POPULATE_READ");
        check(madvise(map + i * MIB, PAGE, MADV_COLD) == 0, "MADV_COLD");
    }
    printf("split: %.2f us each\n", (now() - begun) / mib);
    munmap(map, mib * MIB);
    passes(fd, mib, "split");
    return 0;
}
