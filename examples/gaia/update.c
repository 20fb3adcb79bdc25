/* A legacy CPU program that updates its cells of a file, again and again. It knows nothing of GPUs or of SPIN.
 *
 *     update pwrite|mmap FILE WRITER ROUNDS
 *
 * pwrite: each cell is read, changed and written by pread() and pwrite(). mmap: by loads and stores to a shared mapping.
 * Waits for a line on stdin before each round, so that all writers of the file go on together, and prints `round=N`
 * after it; ends after the end of stdin. Exit status: 0 done, 1 an error (message on stderr), 2 usage.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cells.h"

static int fail(const char *what, const char *file)
{
    fprintf(stderr, "%s %s: %s\n", what, file, strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 5 || (strcmp(argv[1], "pwrite") != 0 && strcmp(argv[1], "mmap") != 0)) {
        fprintf(stderr, "usage: %s pwrite|mmap FILE WRITER ROUNDS\n", argv[0]);
        return 2;
    }
    int mapped = strcmp(argv[1], "mmap") == 0;
    unsigned writer = atoi(argv[3]), rounds = atoi(argv[4]);
    setvbuf(stdout, NULL, _IOLBF, 0);

    int fd = open(argv[2], O_RDWR);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0)
        return fail("open", argv[2]);
    size_t cells = st.st_size / sizeof(uint64_t);
    volatile uint64_t *file = NULL;
    if (mapped) {
        file = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (file == MAP_FAILED)
            return fail("mmap", argv[2]);
    }
    char line[16];
    for (unsigned round = 1; round <= rounds && fgets(line, sizeof line, stdin); round++) {
        for (size_t i = writer; i < cells; i += WRITERS) {
            uint64_t cell;
            if (mapped) {
                file[i] += increment(writer);
                continue;
            }
            if (pread(fd, &cell, sizeof cell, i * sizeof cell) != sizeof cell)
                return fail("pread", argv[2]);
            cell += increment(writer);
            if (pwrite(fd, &cell, sizeof cell, i * sizeof cell) != sizeof cell)
                return fail("pwrite", argv[2]);
        }
        printf("round=%u\n", round);
    }
    while (fgets(line, sizeof line, stdin))
        ;
    return close(fd) == 0 ? 0 : fail("close", argv[2]);
}
