// What the laboratory's GPU work has in common: how it is told what to do, device memory that is counted, and maps.
//
//   spinio-lab ── a line ──> worker        prepare   not timed: fresh maps, acquires before the work
//              <─ figures ──               run       timed: the work of the method; seconds, CPU seconds, device memory
//                                          sync      timed: released bytes are on storage
//                                          check     not timed: how many results are wrong
//
// A worker that fails says why on stderr and exits with 1. Works are compiled from one source: by nvcc for the GPU, or
// by a C++ compiler for the emulated device.
//
// Known flaw: device memory that the CUDA context itself takes is not counted.
#ifndef LAB_WORKER_H
#define LAB_WORKER_H

#include <spinio.h>
#include <spinio/gaia_device.h>
#include <spinio/kernel.h>
#include <spinio_gaia.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace lab {

constexpr size_t page_bytes = 4096;
// Of a plain read before its copy to the device.
constexpr size_t piece_bytes = 8 << 20;

[[noreturn]] inline void fail(const std::string &what, const char *why)
{
    std::fprintf(stderr, "%s: %s\n", what.c_str(), why);
    std::exit(1);
}

// For calls of SPIN.
inline void check(bool right, const char *what)
{
    if (!right)
        fail(what, spinio_last_error());
}

// For system calls.
inline void check_system(bool right, const std::string &what)
{
    if (!right)
        fail(what, std::strerror(errno));
}

inline void check_cuda(cudaError_t error, const char *what)
{
    if (error != cudaSuccess)
        fail(what, cudaGetErrorString(error));
}

// After launches.
inline void wait_for_kernels()
{
    check_cuda(cudaGetLastError(), "launch");
    check_cuda(cudaDeviceSynchronize(), "kernel");
}

inline double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of all threads of this process.
inline double cpu_seconds()
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    auto seconds = [](struct timeval t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
    return seconds(use.ru_utime) + seconds(use.ru_stime);
}

inline size_t size_of(int fd)
{
    struct stat st;
    check_system(fstat(fd, &st) == 0, "fstat");
    return size_t(st.st_size);
}

inline int open_file(const std::string &path, int flags)
{
    int fd = open(path.c_str(), flags | O_CLOEXEC);
    check_system(fd >= 0, path);
    return fd;
}

// A number that depends on all bits of another one (splitmix64). The laboratory has the same.
__host__ __device__ inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// name=value of the command line.
class Arguments {
public:
    std::string method;

    Arguments(int argc, char **argv)
    {
        for (int i = 0; i < argc; i++) {
            std::string text = argv[i];
            size_t at = text.find('=');
            if (at == std::string::npos)
                fail(text, "expected name=value");
            values[text.substr(0, at)] = text.substr(at + 1);
        }
        method = text("method");
    }

    std::string text(const char *name) const
    {
        auto found = values.find(name);
        if (found == values.end())
            fail(name, "missing");
        return found->second;
    }

    uint64_t number(const char *name) const
    {
        return std::strtoull(text(name).c_str(), nullptr, 10);
    }

    uint64_t number(const char *name, uint64_t otherwise) const
    {
        return values.count(name) ? number(name) : otherwise;
    }

private:
    std::map<std::string, std::string> values;
};

// What a run has measured, in the order of addition.
class Figures {
public:
    void add(const char *name, double value)
    {
        char figure[64];
        std::snprintf(figure, sizeof figure, " %s=%.9g", name, value);
        line += figure;
    }

    std::string line;
};

// Bytes of device memory that this process has allocated by itself.
inline size_t allocated = 0;

// Device memory.
template <typename T>
class Buffer {
public:
    explicit Buffer(size_t count) : bytes(count * sizeof(T))
    {
        check_cuda(cudaMalloc(&memory, bytes), "device memory");
        allocated += bytes;
    }

    Buffer(const Buffer &) = delete;

    ~Buffer()
    {
        cudaFree(memory);
        allocated -= bytes;
    }

    operator T *() const
    {
        return memory;
    }

    void to_host(T *host) const
    {
        check_cuda(cudaMemcpy(host, memory, bytes, cudaMemcpyDeviceToHost), "copy from the device");
    }

    void to_device(const T *host) const
    {
        check_cuda(cudaMemcpy(memory, host, bytes, cudaMemcpyHostToDevice), "copy to the device");
    }

    const size_t bytes;

private:
    T *memory = nullptr;
};

// A map of a whole file.
class Map {
public:
    Map(int fd, size_t size, unsigned access) : size(size), access(access & ~unsigned(SPINIO_GAIA_IN_PLACE))
    {
        memory = static_cast<char *>(spinio_gaia_map(fd, 0, size, access)); // the argument, with IN_PLACE
        check(memory, "map");
    }

    Map(const Map &) = delete;

    ~Map()
    {
        check(spinio_gaia_unmap(memory) == 0, "unmap");
    }

    void acquire(size_t at, size_t bytes, unsigned more = 0) const
    {
        check(spinio_gaia_acquire(memory + at, bytes, access | more) >= 0, "acquire");
    }

    void acquire() const
    {
        acquire(0, size);
    }

    void release(size_t at, size_t bytes, unsigned flags = 0) const
    {
        check(spinio_gaia_release(memory + at, bytes, flags) >= 0, "release");
    }

    void release(unsigned flags = 0) const
    {
        release(0, size, flags);
    }

    struct spinio_gaia_info info() const
    {
        struct spinio_gaia_info info;
        check(spinio_gaia_info(memory, &info, sizeof info) == 0, "info");
        return info;
    }

    uint64_t fetched() const
    {
        auto all = info();
        return all.bytes_from_file + all.bytes_from_snapshots + all.bytes_registered;
    }

    char *memory;
    const size_t size;

private:
    const unsigned access;
};

// Reads on demand, for a kernel.
constexpr size_t reader_page = 65536;
// Grids of kernels that read on demand: more warps than pages can be requested at a time only wait.
constexpr unsigned reader_block = spinio::emulated ? 32 : 128;
constexpr unsigned reader_blocks = spinio::emulated ? 4 : 132;

class Reader {
public:
    Reader(int fd, size_t cache, unsigned advice)
    {
        check(spinio_gaia_reader_open(fd, cache, reader_page, advice, &handle) == 0, "reader");
    }

    Reader(const Reader &) = delete;

    ~Reader()
    {
        check(spinio_gaia_reader_close(&handle) == 0, "close the reader");
    }

    uint64_t fetched() const
    {
        struct spinio_gaia_reader_stats stats;
        check(spinio_gaia_reader_stats(&handle, &stats, sizeof stats) == 0, "reader");
        return stats.bytes;
    }

    struct spinio_gaia_reader handle;
};

// As programs do it without SPIN.
inline void read_and_copy(int fd, char *device, size_t size)
{
    static std::vector<char> piece(piece_bytes);
    for (size_t at = 0; at < size;) {
        ssize_t got = pread(fd, piece.data(), std::min(piece.size(), size - at), off_t(at));
        check_system(got > 0, "pread");
        check_cuda(cudaMemcpy(device + at, piece.data(), size_t(got), cudaMemcpyHostToDevice), "copy to the device");
        at += size_t(got);
    }
}

// The bytes of a file, as a program of the CPU sees them.
inline std::vector<char> read_file(int fd, size_t size)
{
    std::vector<char> bytes(size);
    for (size_t at = 0; at < size;) {
        ssize_t got = pread(fd, bytes.data() + at, size - at, off_t(at));
        check_system(got > 0, "pread");
        at += size_t(got);
    }
    return bytes;
}

// One kind of work, by one method.
class Work {
public:
    virtual ~Work() = default;
    virtual void prepare() {}
    // Adds what it measures, beyond the time of all of it.
    virtual void run(Figures &figures) = 0;
    virtual void sync() {}
    virtual uint64_t wrong() = 0;
    // Of its maps.
    virtual uint64_t map_bytes()
    {
        return 0;
    }
};

using Kind = std::unique_ptr<Work> (*)(const Arguments &);

// Answers lines until stdin ends.
inline int serve(Work &work)
{
    char line[64];
    std::puts("ready");
    while (std::fgets(line, sizeof line, stdin)) {
        std::string what(line, std::strcspn(line, "\n"));
        Figures figures;
        double cpu = cpu_seconds(), begun = now();
        if (what == "prepare") {
            work.prepare();
        } else if (what == "run") {
            work.run(figures);
            figures.add("seconds", now() - begun);
            figures.add("cpu", cpu_seconds() - cpu);
            figures.add("gpu", double(allocated + work.map_bytes()));
        } else if (what == "sync") {
            work.sync();
            figures.add("durable", now() - begun);
        } else if (what == "check") {
            figures.add("wrong", double(work.wrong()));
        } else {
            fail(what, "unknown command");
        }
        std::printf("done%s\n", figures.line.c_str());
    }
    return 0;
}

} // namespace lab

#endif
