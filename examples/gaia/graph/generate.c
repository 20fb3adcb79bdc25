/* Makes the graph: R-MAT, as the Graph 500 benchmark has it. Each edge chooses a quarter of the matrix of all edges,
 * then a quarter of that, and so on, with probabilities 0.57, 0.19, 0.19 and 0.05. So a few vertices have very many
 * edges.
 *
 *     generate FILE SCALE DEGREE SEED      2^SCALE vertices, DEGREE edges a vertex on average
 */
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static void edge(unsigned scale, uint64_t *random, uint32_t *from, uint32_t *to)
{
    *from = *to = 0;
    for (unsigned bit = 0; bit < scale; bit++) {
        unsigned quarter = next_random(random) % 100;
        *from = *from << 1 | (quarter >= 76);
        *to = *to << 1 | ((quarter >= 57 && quarter < 76) || quarter >= 95);
    }
}

static int put(FILE *out, const void *data, uint64_t size, uint64_t at)
{
    return fseeko(out, at, SEEK_SET) == 0 && fwrite(data, 1, size, out) == size;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: %s FILE SCALE DEGREE SEED\n", argv[0]);
        return 2;
    }
    unsigned scale = atoi(argv[2]);
    uint64_t edges = ((uint64_t)atoi(argv[3])) << scale, seed = strtoull(argv[4], NULL, 10);
    if (scale < 1 || scale > MOST_SCALE || edges < 1 || edges > UINT32_MAX) {
        fprintf(stderr, "%s: SCALE is 1 to %d, and there are less than 2^32 edges\n", argv[0], MOST_SCALE);
        return 2;
    }
    struct header graph = {GRAPH_MAGIC, UINT32_C(1) << scale, edges};
    uint32_t *rows = calloc(graph.vertices + 2, 4), *targets = malloc(edges * 4), *weights = malloc(to_page(edges * 4));
    if (!rows || !targets || !weights) {
        perror("memory");
        return 1;
    }
    /* The sequence is made twice, to count the edges of each vertex, and to put them into place. */
    uint64_t random = seed;
    uint32_t from, to;
    for (uint64_t e = 0; e < edges; e++) {
        edge(scale, &random, &from, &to);
        rows[from + 2]++;
    }
    for (uint32_t v = 0; v < graph.vertices; v++)
        rows[v + 2] += rows[v + 1];
    random = seed;
    for (uint64_t e = 0; e < edges; e++) {
        edge(scale, &random, &from, &to);
        targets[rows[from + 1]++] = to;
    }
    memset(weights, 0, to_page(edges * 4));
    for (uint64_t e = 0; e < edges; e++)
        weights[e] = 1 + next_random(&random) % MOST_WEIGHT;

    FILE *out = fopen(argv[1], "wb");
    int done = out && put(out, &graph, sizeof graph, 0) &&
               put(out, rows, (graph.vertices + UINT64_C(1)) * 4, rows_at()) &&
               put(out, targets, edges * 4, targets_at(&graph)) &&
               put(out, weights, to_page(edges * 4), weights_at(&graph));
    if (!done || fclose(out) != 0) {
        perror(argv[1]);
        return 1;
    }
    printf("%u %llu %llu\n", graph.vertices, (unsigned long long)edges, (unsigned long long)file_size(&graph));
    return 0;
}
