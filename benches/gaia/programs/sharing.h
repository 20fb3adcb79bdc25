// False sharing: two processors add to their own words of the same pages, as often as told.
//
//     a page   | words of side 0 | words of side 1 |       `grain` bytes each
//
//   map      the file is mapped; kernels add to the map, the CPU to a mapping of the same file; release merges
//   private  each side has a copy of its own; its words are stored into the file at the end
//   managed  one buffer in managed memory, as in the paper: CUDA only, and the other side must be the CPU
//
// Arguments: file, side, sides, grain, iterations, cpu (1: side 1 is a thread of the CPU in this process).
#ifndef LAB_SHARING_H
#define LAB_SHARING_H

#include <thread>

#include "worker.h"

namespace lab {

// How words are divided, and what is added.
struct Shares {
    size_t words, grain; // in words
    unsigned side, sides;
    unsigned iterations;

    // The n-th word of this side.
    __host__ __device__ size_t word(size_t n) const
    {
        return (n / grain * sides + side) * grain + n % grain;
    }

    __host__ __device__ size_t count() const
    {
        return words / sides;
    }
};

// The paper's: read-modify-write, so that no iteration is optimized out.
__host__ __device__ inline void add(volatile unsigned long long *word, const Shares &shares)
{
    for (unsigned i = 0; i < shares.iterations; i++)
        *word = *word + shares.side + 1;
}

__global__ void add_all(unsigned long long *words, Shares shares)
{
    size_t n = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (n < shares.count())
        add(words + shares.word(n), shares);
}

class Sharing : public Work {
public:
    explicit Sharing(const Arguments &arguments) : method(arguments.method)
    {
        fd = open_file(arguments.text("file"), O_RDWR);
        size = size_of(fd);
        shares = {size / 8, arguments.number("grain") / 8, unsigned(arguments.number("side")),
                  unsigned(arguments.number("sides")), unsigned(arguments.number("iterations"))};
        with_cpu = arguments.number("cpu", 0);
        void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        check_system(memory != MAP_FAILED, "mmap");
        file = static_cast<unsigned long long *>(memory);
        if (method == "map")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_WRITE);
        else if (method == "private")
            copy = std::make_unique<Buffer<char>>(size);
        else
            allocate_managed();
        host.resize(shares.words);
    }

    // From the same bytes on, so that pages have several writers.
    void prepare() override
    {
        if (map)
            map->acquire();
        if (copy)
            read_and_copy(fd, *copy, size);
        if (managed)
            std::memcpy(managed, file, size);
        if (with_cpu && copy)
            std::memcpy(host.data(), file, size);
    }

    void run(Figures &figures) override
    {
        uint64_t merged = map ? map->info().pages_merged : 0;
        double begun = now(), cpu_done = 0;
        std::thread cpu;
        if (with_cpu)
            cpu = std::thread([&] {
                add_on_cpu();
                cpu_done = now() - begun;
            });
        char *memory = map ? map->memory : copy ? static_cast<char *>(*copy) : reinterpret_cast<char *>(managed);
        spinio::launch(add_all, unsigned((shares.count() + 63) / 64), 64u, reinterpret_cast<unsigned long long *>(memory), shares);
        wait_for_kernels();
        figures.add("kernel", now() - begun);
        if (cpu.joinable())
            cpu.join();
        double computed = now();
        if (map)
            map->release();
        else
            store();
        double release = now() - computed;
        figures.add("release", release);
        if (with_cpu)
            figures.add("other", cpu_done);
        if (map) {
            uint64_t pages = map->info().pages_merged - merged;
            figures.add("merged", double(pages));
        }
        rounds++;
    }

    // Of its own words and, if the other side is in this process, of those.
    uint64_t wrong() override
    {
        std::vector<char> bytes = read_file(fd, size);
        auto words = reinterpret_cast<const unsigned long long *>(bytes.data());
        uint64_t wrong = 0;
        for (unsigned side = 0; side < shares.sides; side++) {
            if (side != shares.side && !with_cpu)
                continue;
            Shares one = shares;
            one.side = side;
            for (size_t n = 0; n < one.count(); n++) {
                size_t at = one.word(n);
                wrong += words[at] != mix(at) + rounds * one.iterations * (side + 1ull);
            }
        }
        return wrong;
    }

    uint64_t map_bytes() override
    {
        return map ? map->info().device_bytes : managed ? size : 0;
    }

private:
    Shares other() const
    {
        Shares other = shares;
        other.side = 1;
        return other;
    }

    void add_on_cpu()
    {
        auto memory = map ? file : copy ? host.data() : managed;
        Shares cpu = other();
        for (size_t n = 0; n < cpu.count(); n++)
            add(memory + cpu.word(n), cpu);
    }

    // The words of each side, from where it has them.
    void store()
    {
        if (copy)
            store_from(device_words(), shares);
        else
            store_from(managed, shares);
        if (with_cpu)
            store_from(copy ? host.data() : managed, other());
    }

    const unsigned long long *device_words()
    {
        from_device.resize(shares.words);
        copy->to_host(reinterpret_cast<char *>(from_device.data()));
        return from_device.data();
    }

    void store_from(const unsigned long long *words, const Shares &shares)
    {
        for (size_t n = 0; n < shares.count(); n += shares.grain)
            std::memcpy(file + shares.word(n), words + shares.word(n), shares.grain * 8);
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
    int fd;
    size_t size;
    Shares shares;
    bool with_cpu;
    unsigned long long *file, *managed = nullptr, rounds = 0;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<char>> copy;
    std::vector<unsigned long long> host, from_device;
};

inline std::unique_ptr<Work> sharing(const Arguments &arguments)
{
    return std::make_unique<Sharing>(arguments);
}

} // namespace lab

#endif
