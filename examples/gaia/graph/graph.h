/* The file of the example: a directed graph with weights, in compressed sparse rows.
 *
 *     page 0         struct header
 *     rows           vertices + 1 numbers: the edges of vertex v are those from rows[v] to before rows[v + 1]
 *     targets        for each edge, the vertex that it leads to
 *     weights        for each edge, 1 to 255
 *
 * All are 32-bit numbers, and each array begins at a page, so that a change of weights changes pages of weights only.
 */
#ifndef GRAPH_H
#define GRAPH_H

#include <stdint.h>

#define GRAPH_MAGIC UINT64_C(0x3168706172474153)

enum { PAGE = 4096, WEIGHTS_IN_A_PAGE = PAGE / 4, MOST_WEIGHT = 255, MOST_SCALE = 24 };

struct header {
    uint64_t magic;
    uint32_t vertices, edges;
};

static inline uint64_t to_page(uint64_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static inline uint64_t rows_at(void)
{
    return PAGE;
}

static inline uint64_t targets_at(const struct header *graph)
{
    return rows_at() + to_page((graph->vertices + UINT64_C(1)) * 4);
}

static inline uint64_t weights_at(const struct header *graph)
{
    return targets_at(graph) + to_page(graph->edges * UINT64_C(4));
}

static inline uint64_t file_size(const struct header *graph)
{
    return weights_at(graph) + to_page(graph->edges * UINT64_C(4));
}

/* The next number of a seeded sequence (splitmix64). */
static inline uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

#endif
