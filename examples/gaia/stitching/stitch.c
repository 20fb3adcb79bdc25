/* An ordinary CPU program that stitches its tiles into the picture. It knows nothing of GPUs or of SPIN.
 *
 *     stitch pwrite|mmap TILES PICTURE WRITER WRITERS
 *
 * Writes the tiles of WRITER, a number below WRITERS, row by row with pwrite(), or with stores to a shared mapping.
 * Prints `ready` and waits for a line on stdin, or its end, before it begins, and prints its number of tiles and
 * microseconds after it. Exit status: 0 done, 1 an error (message on stderr), 2 usage.
 */
#define _FILE_OFFSET_BITS 64
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tiles.h"

static int fail(const char *what)
{
    perror(what);
    return 1;
}

/* Where the cell is in its tile. */
static unsigned find(const struct tiles *t, const unsigned char *overview, const unsigned char *tiles, unsigned tile)
{
    unsigned best = 0, least = -1u;
    for (unsigned position = 0; position < POSITIONS; position++) {
        unsigned sum = difference(t, overview, tiles, tile, position);
        if (sum < least) {
            least = sum;
            best = position;
        }
    }
    return best;
}

static long long microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

int main(int argc, char **argv)
{
    if (argc != 6 || (strcmp(argv[1], "pwrite") != 0 && strcmp(argv[1], "mmap") != 0)) {
        fprintf(stderr, "usage: %s pwrite|mmap TILES PICTURE WRITER WRITERS\n", argv[0]);
        return 2;
    }
    unsigned writer = atoi(argv[4]), writers = atoi(argv[5]), count = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);

    int in = open(argv[2], O_RDONLY), fd = open(argv[3], O_RDWR);
    struct stat tiles_stat, picture_stat;
    if (in < 0 || fstat(in, &tiles_stat) != 0)
        return fail(argv[2]);
    if (fd < 0 || fstat(fd, &picture_stat) != 0)
        return fail(argv[3]);
    const struct tiles *t = mmap(NULL, tiles_stat.st_size, PROT_READ, MAP_PRIVATE, in, 0);
    if (t == MAP_FAILED)
        return fail(argv[2]);
    const unsigned char *overview = (const unsigned char *)(t + 1), *tiles = overview + overview_bytes(t);
    size_t head = picture_stat.st_size - picture_bytes(t), row = width(t) * 3;
    unsigned char *picture = NULL;
    if (strcmp(argv[1], "mmap") == 0) {
        picture = mmap(NULL, picture_stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (picture == MAP_FAILED)
            return fail(argv[3]);
    }
    char line[16];
    puts("ready");
    if (!fgets(line, sizeof line, stdin))
        clearerr(stdin);
    long long begun = microseconds();
    for (unsigned tile = 0; tile < t->columns * t->rows; tile++) {
        if (writer_of(t, tile, writers) != writer)
            continue;
        unsigned position = find(t, overview, tiles, tile);
        size_t at = head + tile / t->columns * CELL * row + tile % t->columns * CELL * 3;
        for (unsigned y = 0; y < CELL; y++, at += row) {
            const unsigned char *from = pixel(tiles, tile, position, 0, y);
            if (picture)
                memcpy(picture + at, from, CELL * 3);
            else if (pwrite(fd, from, CELL * 3, at) != CELL * 3)
                return fail("pwrite");
        }
        count++;
    }
    printf("%u %lld\n", count, microseconds() - begun);
    return close(fd) == 0 ? 0 : fail(argv[3]);
}
