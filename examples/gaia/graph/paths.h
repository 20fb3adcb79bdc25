// The kernels of the example, which the laboratory's program has too (benches/gaia/programs): the shortest paths from
// vertex 0, by rounds of Bellman and Ford until no distance changes.
#ifndef PATHS_H
#define PATHS_H

#include <spinio/kernel.h>

#include <utility>

#include "graph.h"

enum : unsigned { INFINITE = ~0u, PATHS_THREADS = 256 };

// A graph in device memory, or in the CPU's.
struct Graph {
    unsigned vertices;
    const unsigned *rows, *targets, *weights;
};

static Graph graph_at(const void *file, const header &graph)
{
    auto at = static_cast<const char *>(file);
    auto array = [at](uint64_t offset) { return reinterpret_cast<const unsigned *>(at + offset); };
    return {graph.vertices, array(rows_at()), array(targets_at(&graph)), array(weights_at(&graph))};
}

__global__ void reset(unsigned *distances, unsigned *active, unsigned *next, unsigned vertices)
{
    unsigned v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v < vertices) {
        distances[v] = v == 0 ? 0u : unsigned(INFINITE);
        active[v] = v == 0;
        next[v] = 0;
    }
}

// One round of Bellman and Ford, of the vertices whose distance has changed in the last one.
__global__ void relax(Graph graph, unsigned *distances, unsigned *active, unsigned *next, unsigned *changed)
{
    unsigned v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v >= graph.vertices || !active[v])
        return;
    active[v] = 0;
    // Another thread may lower it now; then v is active in the next round.
    unsigned distance = atomicAdd(&distances[v], 0u);
    for (unsigned e = graph.rows[v]; e < graph.rows[v + 1]; e++) {
        unsigned target = graph.targets[e], through = distance + graph.weights[e];
        if (atomicMin(&distances[target], through) > through) {
            atomicExch(&next[target], 1u);
            atomicExch(changed, 1u);
        }
    }
}

// Device memory of the computation: a number for each vertex, but for `changed`, which is one.
struct Memory {
    unsigned *distances, *active, *next, *changed;
};

// Fills memory.distances; false: a kernel or a copy failed.
static bool find_paths(const Graph &graph, Memory memory)
{
    unsigned blocks = (graph.vertices + PATHS_THREADS - 1) / PATHS_THREADS, changed = 1;
    spinio::launch(reset, blocks, unsigned(PATHS_THREADS), memory.distances, memory.active, memory.next, graph.vertices);
    while (changed) {
        changed = 0;
        if (cudaMemcpy(memory.changed, &changed, sizeof changed, cudaMemcpyHostToDevice))
            return false;
        spinio::launch(relax, blocks, unsigned(PATHS_THREADS), graph, memory.distances, memory.active, memory.next,
                       memory.changed);
        if (cudaGetLastError() || cudaMemcpy(&changed, memory.changed, sizeof changed, cudaMemcpyDeviceToHost))
            return false;
        std::swap(memory.active, memory.next);
    }
    return true;
}

#endif
