// The shortest paths from vertex 0 to all others, on a GPU, in a graph whose weights CPU programs change.
//
//     paths FILE [no-acquire]
//
// The file is mapped once. Each line of stdin is a step: acquire, which brings what has changed since the last one,
// then kernels that relax edges until no distance changes. The distances are compared with those that Dijkstra's
// algorithm finds on the CPU in the file as read() returns it, and the map with these bytes. Beside, the whole file is
// copied to the device by spinio_pread(), as a program without maps would do in each step. Each step prints
//
//     bytes fetched, microseconds of acquire, of the kernels, of the whole copy,
//     vertices reached, wrong distances, wrong bytes of the map
//
// no-acquire: only the first step acquires, which the comparison must find. Exit status: 0 done, whatever was compared;
// 1 an error (message on stderr); 2 usage.
#include <spinio.h>
#include <spinio_gaia.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <queue>
#include <unistd.h>
#include <utility>
#include <vector>

#include "paths.h"

static std::vector<unsigned> dijkstra(const Graph &graph)
{
    using Entry = std::pair<unsigned, unsigned>; // distance, vertex
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    std::vector<unsigned> distances(graph.vertices, unsigned(INFINITE));
    distances[0] = 0;
    queue.push({0, 0});
    while (!queue.empty()) {
        auto [distance, v] = queue.top();
        queue.pop();
        if (distance != distances[v])
            continue;
        for (unsigned e = graph.rows[v]; e < graph.rows[v + 1]; e++) {
            unsigned through = distance + graph.weights[e];
            if (through < distances[graph.targets[e]]) {
                distances[graph.targets[e]] = through;
                queue.push({through, graph.targets[e]});
            }
        }
    }
    return distances;
}

static bool read_all(int fd, char *into, size_t size)
{
    if (lseek(fd, 0, SEEK_SET) != 0)
        return false;
    for (ssize_t got; size > 0; into += got, size -= got)
        if ((got = read(fd, into, size)) <= 0)
            return false;
    return true;
}

static unsigned long long fetched(const void *map)
{
    struct spinio_gaia_info info;
    return spinio_gaia_info(map, &info, sizeof info) ? 0 : info.bytes_from_file + info.bytes_from_snapshots;
}

static int fail(const char *what)
{
    std::fprintf(stderr, "%s: %s\n", what, spinio_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 2 && (argc != 3 || std::strcmp(argv[2], "no-acquire") != 0)) {
        std::fprintf(stderr, "usage: %s FILE [no-acquire]\n", argv[0]);
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    header graph;
    int fd = open(argv[1], O_RDONLY);
    if (fd < 0 || pread(fd, &graph, sizeof graph, 0) != ssize_t(sizeof graph)) {
        std::perror(argv[1]);
        return 1;
    }
    if (graph.magic != GRAPH_MAGIC) {
        std::fprintf(stderr, "%s: not a graph\n", argv[1]);
        return 1;
    }
    // The first call of a program puts the device to use.
    if (cudaDeviceSynchronize()) {
        std::fprintf(stderr, "no device\n");
        return 1;
    }
    size_t size = file_size(&graph);
    void *map = spinio_gaia_map(fd, 0, size, SPINIO_GAIA_READ);
    if (!map)
        return fail("map");
    Memory memory;
    char *copy;
    size_t numbers = graph.vertices * sizeof(unsigned);
    if (cudaMalloc(&memory.distances, numbers) || cudaMalloc(&memory.active, numbers) ||
        cudaMalloc(&memory.next, numbers) || cudaMalloc(&memory.changed, sizeof(unsigned)) || cudaMalloc(&copy, size))
        return fail("memory");
    std::vector<unsigned> distances(graph.vertices);
    std::vector<char> file(size), seen(size);

    char line[64];
    for (unsigned step = 0; std::fgets(line, sizeof line, stdin); step++) {
        auto now = [] { return std::chrono::steady_clock::now(); };
        auto microseconds = [](auto from, auto to) {
            return (long long)std::chrono::duration_cast<std::chrono::microseconds>(to - from).count();
        };
        unsigned long long before = fetched(map);
        auto begun = now();
        if ((step == 0 || argc == 2) && spinio_gaia_acquire(map, size, SPINIO_GAIA_READ) < 0)
            return fail("acquire");
        auto acquired = now();
        if (!find_paths(graph_at(map, graph), memory))
            return fail("kernels");
        auto computed = now();
        if (spinio_pread(fd, copy, size, 0) != ssize_t(size))
            return fail("copy");
        auto copied = now();

        if (cudaMemcpy(distances.data(), memory.distances, numbers, cudaMemcpyDeviceToHost) ||
            cudaMemcpy(seen.data(), map, size, cudaMemcpyDeviceToHost))
            return fail("memory");
        if (!read_all(fd, file.data(), size)) {
            std::perror(argv[1]);
            return 1;
        }
        std::vector<unsigned> right = dijkstra(graph_at(file.data(), graph));
        unsigned reached = 0, wrong = 0;
        for (unsigned v = 0; v < graph.vertices; v++) {
            reached += right[v] != INFINITE;
            wrong += right[v] != distances[v];
        }
        size_t stale = 0;
        for (size_t i = 0; i < size; i++)
            stale += file[i] != seen[i];
        std::printf("%llu %lld %lld %lld %u %u %zu\n", fetched(map) - before, microseconds(begun, acquired),
                    microseconds(acquired, computed), microseconds(computed, copied), reached, wrong, stale);
    }
    return spinio_gaia_unmap(map) == 0 ? 0 : fail("unmap");
}
