/* An ordinary CPU program that changes weights of the graph. It knows nothing of GPUs or of SPIN.
 *
 *     change pwrite|mmap FILE SEED
 *
 * Each line of stdin is a percentage, above 0 to 100: so many of the pages of weights get new weights, by pwrite(), or
 * by stores to a shared mapping. Prints after each how many pages these are. Exit status: 0 done, 1 an error (message
 * on stderr), 2 usage.
 */
#define _FILE_OFFSET_BITS 64
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "graph.h"

/* Of each page that changes. */
enum { CHANGES = 8 };

static int fail(const char *what)
{
    perror(what);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 4 || (strcmp(argv[1], "pwrite") != 0 && strcmp(argv[1], "mmap") != 0)) {
        fprintf(stderr, "usage: %s pwrite|mmap FILE SEED\n", argv[0]);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t random = strtoull(argv[3], NULL, 10) ^ 1;
    struct header graph;
    int fd = open(argv[2], O_RDWR);
    if (fd < 0 || pread(fd, &graph, sizeof graph, 0) != sizeof graph)
        return fail(argv[2]);
    if (graph.magic != GRAPH_MAGIC || graph.edges == 0) {
        fprintf(stderr, "%s: not a graph\n", argv[2]);
        return 1;
    }
    uint32_t *mapped = NULL;
    if (strcmp(argv[1], "mmap") == 0) {
        mapped = mmap(NULL, file_size(&graph), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED)
            return fail("mmap");
    }
    uint32_t pages = to_page(graph.edges * UINT64_C(4)) / PAGE, *page = malloc(pages * sizeof *page);
    if (!page)
        return fail("memory");
    for (uint32_t i = 0; i < pages; i++)
        page[i] = i;

    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        double percent = atof(line);
        uint32_t count = pages * percent / 100 + 0.5;
        count = count < 1 ? 1 : count > pages ? pages : count;
        for (uint32_t i = 0; i < count; i++) {
            /* A page that was not chosen in this step. */
            uint32_t other = i + next_random(&random) % (pages - i), chosen = page[other];
            page[other] = page[i];
            page[i] = chosen;
            uint32_t first = chosen * WEIGHTS_IN_A_PAGE, left = graph.edges - first;
            uint32_t in_page = left < WEIGHTS_IN_A_PAGE ? left : WEIGHTS_IN_A_PAGE;
            for (int n = 0; n < CHANGES; n++) {
                off_t at = weights_at(&graph) + (first + next_random(&random) % in_page) * UINT64_C(4);
                uint32_t weight = 1 + next_random(&random) % MOST_WEIGHT;
                if (mapped)
                    mapped[at / 4] = weight;
                else if (pwrite(fd, &weight, sizeof weight, at) != sizeof weight)
                    return fail("pwrite");
            }
        }
        printf("%u\n", count);
    }
    return close(fd) == 0 ? 0 : fail(argv[2]);
}
