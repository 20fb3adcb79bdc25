// The shortest paths in a graph that a CPU program changes between runs; kernels and file are those of
// examples/gaia/graph.
//
//   copy   pread and cudaMemcpy of the whole file       pread   spinio_pread of it       map   acquire: what has changed
//
// Argument: file. The distances are checked on the device, with the file as plain reads return it: no edge leads to
// a vertex by a shorter way, and to each vertex but the first leads an edge of a shortest way. With weights above 0,
// both together hold for the shortest distances only. The map is compared with the file, byte by byte.
#ifndef LAB_SHORTEST_H
#define LAB_SHORTEST_H

#include "graph/paths.h"
#include "worker.h"

namespace lab {

// Marks vertices that an edge of a shortest way leads to.
__global__ void check_edges(Graph graph, const unsigned *distances, unsigned *reached, unsigned *wrong)
{
    unsigned v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v >= graph.vertices || distances[v] == INFINITE)
        return;
    for (unsigned e = graph.rows[v]; e < graph.rows[v + 1]; e++) {
        unsigned target = graph.targets[e], through = distances[v] + graph.weights[e];
        if (through < distances[target])
            atomicAdd(wrong, 1u);
        if (through == distances[target])
            atomicExch(&reached[target], 1u);
    }
}

__global__ void check_vertices(const unsigned *distances, const unsigned *reached, unsigned vertices, unsigned *wrong)
{
    unsigned v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v < vertices && (v == 0 ? distances[v] != 0 : distances[v] != INFINITE && !reached[v]))
        atomicAdd(wrong, 1u);
}

__global__ void compare_words(const unsigned *a, const unsigned *b, size_t count, unsigned *wrong)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < count && a[i] != b[i])
        atomicAdd(wrong, 1u);
}

class Shortest : public Work {
public:
    explicit Shortest(const Arguments &arguments) : method(arguments.method)
    {
        fd = open_file(arguments.text("file"), O_RDONLY);
        check_system(pread(fd, &head, sizeof head, 0) == ssize_t(sizeof head), "pread");
        size = file_size(&head);
        for (auto *buffer : {&distances, &active, &next, &reached})
            *buffer = std::make_unique<Buffer<unsigned>>(head.vertices);
        changed = std::make_unique<Buffer<unsigned>>(1);
        if (method == "map")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ);
        else
            copy = std::make_unique<Buffer<char>>(size);
    }

    void run(Figures &figures) override
    {
        double begun = now();
        uint64_t before = map ? map->fetched() : 0;
        if (map)
            map->acquire();
        else if (method == "copy")
            read_and_copy(fd, *copy, size);
        else
            check(spinio_pread(fd, *copy, size, 0) == ssize_t(size), "pread");
        double brought = now();
        if (!find_paths(graph_at(memory(), head), {*distances, *active, *next, *changed}))
            fail("kernels", cudaGetErrorString(cudaGetLastError()));
        figures.add("bring", brought - begun);
        figures.add("kernel", now() - brought);
        figures.add("fetched", map ? double(map->fetched() - before) : double(size));
    }

    uint64_t wrong() override
    {
        Buffer<char> file(size);
        read_and_copy(fd, file, size);
        Graph graph = graph_at(file, head);
        std::vector<unsigned> zeros(head.vertices);
        reached->to_device(zeros.data());
        changed->to_device(zeros.data());
        unsigned blocks = (head.vertices + 127) / 128, *wrong = *changed;
        spinio::launch(check_edges, blocks, 128u, graph, static_cast<unsigned *>(*distances), static_cast<unsigned *>(*reached), wrong);
        spinio::launch(check_vertices, blocks, 128u, static_cast<unsigned *>(*distances), static_cast<unsigned *>(*reached),
                       head.vertices, wrong);
        spinio::launch(compare_words, unsigned((size / 4 + 127) / 128), 128u, reinterpret_cast<const unsigned *>(memory()),
                       reinterpret_cast<const unsigned *>(static_cast<char *>(file)), size / 4, wrong);
        wait_for_kernels();
        unsigned count = 0;
        changed->to_host(&count);
        if (map)
            map->release();
        return count;
    }

    uint64_t map_bytes() override
    {
        return map ? map->info().device_bytes : 0;
    }

private:
    const char *memory() const
    {
        return map ? map->memory : *copy;
    }

    const std::string method;
    int fd;
    header head;
    size_t size;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<char>> copy;
    std::unique_ptr<Buffer<unsigned>> distances, active, next, reached, changed;
};

inline std::unique_ptr<Work> shortest(const Arguments &arguments)
{
    return std::make_unique<Shortest>(arguments);
}

} // namespace lab

#endif
