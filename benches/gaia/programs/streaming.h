// A kernel reads a whole file once: little work for many bytes.
//
//   limit    cudaMemcpy from registered host memory that has the bytes already: the bus
//   copy     pread into host memory and cudaMemcpy, in pieces
//   pread    spinio_pread into device memory
//   map      an acquire of all of the file
//   windows  an acquire of one part after the other: for files above SPINIO_GAIA_MEMORY
//   in place an acquire of a map in place: kernels load from the host's page cache
//   reader   the kernel itself reads pages on demand, with an eighth of the file's size as cache
//   managed  pread into managed memory, which kernels load from: CUDA only
//
// Arguments: file; fresh (1: a new map in each run, and a constant file, word i of which is mix(i); 0: one map for all,
// and a file that changes). The sum of all words, each times its place, is compared: of a constant file with that of a
// kernel that reads no file, else with that of the CPU.
#ifndef LAB_STREAMING_H
#define LAB_STREAMING_H

#include <algorithm>

#include "worker.h"

namespace lab {

constexpr unsigned sum_block = spinio::emulated ? 32 : 256;
constexpr unsigned sum_blocks = spinio::emulated ? 32 : 1024;

// Adds to each thread's sum. first: the place of the first word in the file.
__global__ void sum_words(const unsigned long long *words, size_t count, size_t first, unsigned long long *sums)
{
    size_t thread = blockIdx.x * size_t(blockDim.x) + threadIdx.x, threads = size_t(gridDim.x) * blockDim.x;
    unsigned long long sum = 0;
    for (size_t i = thread; i < count; i += threads)
        sum += words[i] * (2 * (first + i) + 1);
    sums[thread] += sum;
}

// The same of the words that a constant file was made of.
__global__ void sum_made(size_t count, unsigned long long *sums)
{
    size_t thread = blockIdx.x * size_t(blockDim.x) + threadIdx.x, threads = size_t(gridDim.x) * blockDim.x;
    unsigned long long sum = 0;
    for (size_t i = thread; i < count; i += threads)
        sum += mix(i) * (2 * i + 1);
    sums[thread] = sum;
}

// The same of a file that is read on demand: a warp takes a page after the other, so that together they read in order.
__global__ void sum_on_demand(spinio_gaia_reader file, size_t count, size_t in_page, unsigned long long *sums, unsigned *failed)
{
    gaia::reader<unsigned long long> words(file);
    size_t thread = blockIdx.x * size_t(blockDim.x) + threadIdx.x, lane = thread % 32;
    size_t warp = thread / 32, warps = size_t(gridDim.x) * blockDim.x / 32;
    unsigned long long sum = 0;
    for (size_t first = warp * in_page; first < count; first += warps * in_page) {
        const unsigned long long *page;
        int64_t got = words.pin(first, &page);
        if (got <= 0) {
            if (lane == 0)
                atomicAdd(failed, 1u);
            continue;
        }
        for (size_t i = lane; i < size_t(got); i += 32)
            sum += page[i] * (2 * (first + i) + 1);
        words.unpin(page);
    }
    sums[thread] += sum;
}

class Streaming : public Work {
public:
    explicit Streaming(const Arguments &arguments)
        : method(arguments.method), fresh(arguments.number("fresh")), sums(size_t(sum_block) * sum_blocks), failed(1)
    {
        fd = open_file(arguments.text("file"), O_RDONLY);
        size = size_of(fd);
        window = arguments.number("window", size);
        host_sums.resize(size_t(sum_block) * sum_blocks);
        if (method == "limit" || method == "copy" || method == "pread")
            copy = std::make_unique<Buffer<char>>(size);
        else if (method == "managed")
            allocate_managed();
        if (method == "limit") {
            check_cuda(cudaHostAlloc(&bytes, size, 0), "host memory");
            read_bytes(bytes);
        }
        if (!fresh)
            map_file();
    }

    void prepare() override
    {
        if (fresh)
            map = nullptr;
        std::fill(host_sums.begin(), host_sums.end(), 0);
        sums.to_device(host_sums.data());
        unsigned zero = 0;
        failed.to_device(&zero);
    }

    void run(Figures &figures) override
    {
        if (method == "reader")
            return run_reader(figures);
        double begun = now();
        uint64_t before = map ? map->fetched() : 0;
        if (fresh)
            map_file();
        double brought = now() - begun;
        for (size_t at = 0; at < size; at += window) {
            size_t bytes = std::min(window, size - at);
            double from = now();
            char *words = bring(at, bytes);
            brought += now() - from;
            spinio::launch(sum_words, sum_blocks, sum_block, reinterpret_cast<const unsigned long long *>(words), bytes / 8,
                           at / 8, static_cast<unsigned long long *>(sums));
            wait_for_kernels();
            if (map)
                map->release(at, bytes);
        }
        figures.add("bring", brought);
        figures.add("fetched", map ? double(map->fetched() - before) : double(size));
        figures.add("evicted", map ? double(map->info().chunks_evicted) : 0);
        // Device memory that other processes have filled.
        figures.add("shared", map ? double(map->info().bytes_shared) : 0);
    }

    uint64_t wrong() override
    {
        unsigned long long sum = total();
        if (fresh && !known) {
            spinio::launch(sum_made, sum_blocks, sum_block, size / 8, static_cast<unsigned long long *>(sums));
            wait_for_kernels();
            right = total();
            known = true;
        } else if (!fresh) {
            right = 0;
            std::vector<unsigned long long> piece(piece_bytes / 8);
            for (size_t at = 0; at < size;) {
                ssize_t got = pread(fd, piece.data(), std::min(piece_bytes, size - at), off_t(at));
                check_system(got > 0 && got % 8 == 0, "pread");
                for (ssize_t i = 0; i < got / 8; i++)
                    right += piece[size_t(i)] * (2 * (at / 8 + size_t(i)) + 1);
                at += size_t(got);
            }
        }
        unsigned pages = 0;
        failed.to_host(&pages);
        return pages + (sum != right);
    }

    uint64_t map_bytes() override
    {
        return map ? map->info().device_bytes : managed ? size : method == "reader" ? cache_bytes() : 0;
    }

private:
    unsigned long long total()
    {
        sums.to_host(host_sums.data());
        unsigned long long sum = 0;
        for (auto one : host_sums)
            sum += one;
        return sum;
    }

    void map_file()
    {
        if (method == "map" || method == "windows")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ);
        else if (method == "in place")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ | SPINIO_GAIA_IN_PLACE);
    }

    size_t cache_bytes() const
    {
        return std::max<size_t>(size / 8, 64 * reader_page);
    }

    void run_reader(Figures &figures)
    {
        Reader file(fd, cache_bytes(), 0);
        spinio::launch_resident(sum_on_demand, reader_blocks, reader_block, file.handle, size / 8, reader_page / 8,
                       static_cast<unsigned long long *>(sums), static_cast<unsigned *>(failed));
        wait_for_kernels();
        figures.add("fetched", double(file.fetched()));
    }

    void read_bytes(char *to)
    {
        for (size_t done = 0; done < size;) {
            ssize_t got = pread(fd, to + done, std::min(piece_bytes, size - done), off_t(done));
            check_system(got > 0, "pread");
            done += size_t(got);
        }
    }

    char *bring(size_t at, size_t bytes)
    {
        if (map) {
            map->acquire(at, bytes);
            return map->memory + at;
        }
        char *to = managed ? managed : static_cast<char *>(*copy);
        if (method == "limit")
            check_cuda(cudaMemcpy(to, this->bytes, size, cudaMemcpyHostToDevice), "copy to the device");
        else if (method == "copy")
            read_and_copy(fd, to, size);
        else if (method == "pread")
            check(spinio_pread(fd, to, size, 0) == ssize_t(size), "pread");
        else
            read_bytes(to);
        return to;
    }

    void allocate_managed()
    {
#if defined(__CUDACC__)
        check_cuda(cudaMallocManaged(&managed, size), "managed memory");
#else
        fail(method, "the emulated device has no managed memory");
#endif
    }

    const std::string method;
    const bool fresh;
    int fd;
    size_t size, window;
    Buffer<unsigned long long> sums;
    Buffer<unsigned> failed; // pages that the kernel could not read
    std::vector<unsigned long long> host_sums;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<char>> copy;
    char *managed = nullptr, *bytes = nullptr;
    unsigned long long right = 0;
    bool known = false;
};

inline std::unique_ptr<Work> streaming(const Arguments &arguments)
{
    return std::make_unique<Streaming>(arguments);
}

} // namespace lab

#endif
