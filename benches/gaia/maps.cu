// What acquire and release of a GAIA map cost. One measurement per call; gaia.py makes the table.
//
//     maps first FILE                    the first acquire of a whole file, and spinio_pread of it into device memory
//     maps reader FILE                   acquire of a whole file that no program has open for writing, for reading
//     maps unchanged FILE                acquire of a whole file in which no other writer changed anything, for writing
//     maps writer FILE                   the same, while a CPU program has a mapping of the file and has stored to it before
//     maps scattered FILE PAGES          acquire after the CPU has stored to this many pages, spread over the file
//     maps release-unchanged FILE        release of a whole file in which no kernel stored anything
//     maps release-all FILE              release of a whole file, every page of which a kernel has changed
//     maps release-mapped FILE PAGES     release of pages that a CPU program has mapped and cached, every one changed
//
//     maps checkpoint FILE PLAIN         FILE overwritten on the device, released and synced; and cudaMemcpy, write and
//                                        fsync to PLAIN, which is made as long
//     maps handoff FILE PLAIN            the same, released with SPINIO_GAIA_HANDOFF; `handed=` is how many releases were
//                                        handed over, of 6
//
// Prints `bytes=`, `runs=`, and of all runs but the first `median_us=`, `best_us=`, `worst_us=`; `first`,
// `checkpoint` and `handoff` also `limit_us=`, and the last two `durable_us=`, medians. Exit status: 0 done, 1 an error (message on stderr), 2 usage.
#include <spinio.h>
#include <spinio/kernel.h>
#include <spinio_gaia.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

static const size_t PAGE = 4096;

// Changes one word of each page.
__global__ void change(unsigned long long *file, size_t pages)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < pages)
        file[i * (PAGE / sizeof *file)]++;
}

static void check(bool right, const char *what)
{
    if (!right) {
        std::fprintf(stderr, "%s: %s\n", what, spinio_last_error());
        std::exit(1);
    }
}

static double now()
{
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Map {
    unsigned access;
    int fd;
    size_t size;
    unsigned char *gpu;

    explicit Map(const char *path, unsigned access = SPINIO_GAIA_WRITE) : access(access)
    {
        struct stat st;
        fd = open(path, access == SPINIO_GAIA_READ ? O_RDONLY : O_RDWR);
        if (fd < 0 || fstat(fd, &st) != 0) {
            std::perror(path);
            std::exit(1);
        }
        size = st.st_size;
        // The first call of a program puts the device to use.
        check(cudaDeviceSynchronize() == cudaSuccess, "device");
        gpu = static_cast<unsigned char *>(spinio_gaia_map(fd, 0, size, access));
        check(gpu != nullptr, "map");
    }

    ~Map()
    {
        check(spinio_gaia_unmap(gpu) == 0, "unmap");
        close(fd);
    }

    void acquire(size_t bytes)
    {
        check(spinio_gaia_acquire(gpu, bytes, access) >= 0, "acquire");
    }

    void overwrite(size_t bytes)
    {
        check(spinio_gaia_acquire(gpu, bytes, access | SPINIO_GAIA_OVERWRITE) >= 0, "acquire");
    }

    void release(size_t bytes)
    {
        check(spinio_gaia_release(gpu, bytes, 0) >= 0, "release");
    }

    void store(size_t pages)
    {
        auto *words = reinterpret_cast<unsigned long long *>(gpu);
        spinio::launch(change, unsigned((pages + 255) / 256), 256, words, pages);
        check(cudaDeviceSynchronize() == cudaSuccess, "kernel");
    }

    volatile unsigned char *cpu()
    {
        void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        check(memory != MAP_FAILED, "mmap");
        return static_cast<unsigned char *>(memory);
    }
};

template <typename Before, typename Timed, typename After>
static void measure(size_t bytes, int runs, Before before, Timed timed, After after)
{
    std::vector<double> times;
    for (int run = 0; run < runs; run++) {
        before();
        double begun = now();
        timed();
        times.push_back(now() - begun);
        after();
    }
    if (times.size() > 1)
        times.erase(times.begin());
    std::sort(times.begin(), times.end());
    std::printf("bytes=%zu\nruns=%zu\nmedian_us=%.2f\nbest_us=%.2f\nworst_us=%.2f\n", bytes, times.size(),
                times[times.size() / 2], times.front(), times.back());
}

static void first(const char *path)
{
    struct stat st;
    check(stat(path, &st) == 0, "stat");
    size_t size = st.st_size;
    int plain = open(path, O_RDONLY);
    void *buffer;
    check(cudaMalloc(&buffer, size) == cudaSuccess, "memory");
    std::vector<double> limit;
    for (int run = 0; run < 6; run++) {
        double begun = now();
        check(spinio_pread(plain, buffer, size, 0) == ssize_t(size), "pread");
        limit.push_back(now() - begun);
    }
    std::sort(limit.begin() + 1, limit.end());
    std::printf("limit_us=%.2f\n", limit[3]);
    cudaFree(buffer);
    Map *map = nullptr;
    measure(
        size, 6, [&] { map = new Map(path); }, [&] { map->acquire(size); }, [&] { delete map; });
}

// Until programs can read the checkpoint, and until it is on storage; and the latter without GAIA.
static void checkpoint(const char *path, const char *plain, unsigned flags)
{
    Map map(path);
    std::vector<unsigned char> host(map.size);
    std::vector<double> durable, limit;
    int out = open(plain, O_WRONLY | O_CREAT, 0644);
    check(out >= 0, plain);
    auto compute = [&] {
        map.overwrite(map.size);
        map.store(map.size / PAGE);
    };
    double begun = 0;
    auto release = [&] {
        begun = now();
        check(spinio_gaia_release(map.gpu, map.size, flags) == ssize_t(map.size), "release");
    };
    auto after = [&] {
        check(spinio_gaia_sync(map.gpu, map.size) == 0, "sync");
        durable.push_back(now() - begun);
        // What was handed over has no memory.
        check(spinio_gaia_acquire(map.gpu, map.size, SPINIO_GAIA_READ) >= 0, "acquire");
        begun = now();
        check(cudaMemcpy(host.data(), map.gpu, map.size, cudaMemcpyDeviceToHost) == cudaSuccess, "copy");
        for (size_t at = 0; at < map.size; at += 1 << 20)
            check(pwrite(out, &host[at], std::min<size_t>(1 << 20, map.size - at), at) > 0, "write");
        check(fsync(out) == 0, "fsync");
        limit.push_back(now() - begun);
    };
    measure(map.size, 6, compute, release, after);
    for (auto *times : {&durable, &limit})
        std::sort(times->begin() + 1, times->end());
    struct spinio_gaia_info info;
    check(spinio_gaia_info(map.gpu, &info, sizeof info) == 0, "info");
    std::printf("durable_us=%.2f\nlimit_us=%.2f\n", durable[3], limit[3]);
    std::printf("handed=%llu\n", (unsigned long long)info.releases_handed_over);
    close(out);
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 4) {
        std::fprintf(stderr, "usage: %s first|reader|unchanged|writer|scattered|release-... FILE [PAGES], or checkpoint|handoff FILE PLAIN\n", argv[0]);
        return 2;
    }
    std::string what = argv[1];
    if (what == "first")
        return first(argv[2]), 0;
    if (what == "checkpoint" && argc == 4)
        return checkpoint(argv[2], argv[3], 0), 0;
    if (what == "handoff" && argc == 4)
        return checkpoint(argv[2], argv[3], SPINIO_GAIA_HANDOFF), 0;
    Map map(argv[2], what == "reader" ? SPINIO_GAIA_READ : SPINIO_GAIA_WRITE);
    size_t all = map.size / PAGE, pages = argc == 4 ? std::strtoull(argv[3], nullptr, 10) : all;
    if (pages == 0 || pages > all) {
        std::fprintf(stderr, "%s has %zu pages\n", argv[2], all);
        return 2;
    }
    auto nothing = [] {};
    auto acquire = [&] { map.acquire(map.size); };
    auto release = [&] { map.release(map.size); };
    if (what == "reader") {
        // The second: the first may have found a writer that was about to close the file.
        acquire();
        measure(map.size, 2001, nothing, acquire, nothing);
    } else if (what == "unchanged" || what == "writer") {
        if (what == "writer")
            map.cpu()[0]++;
        measure(map.size, 201, nothing, acquire, release);
    } else if (what == "scattered") {
        volatile unsigned char *cpu = map.cpu();
        acquire();
        release();
        auto store = [&] {
            for (size_t i = 0; i < pages; i++)
                cpu[i * (all / pages) * PAGE]++;
        };
        measure(pages * PAGE, 11, store, acquire, release);
    } else if (what == "release-unchanged") {
        measure(map.size, 11, acquire, release, nothing);
    } else if (what == "release-all") {
        measure(map.size, 6, [&] { acquire(), map.store(all); }, release, nothing);
    } else if (what == "release-mapped") {
        volatile unsigned char *cpu = map.cpu();
        auto before = [&] {
            for (size_t i = 0; i < pages; i++)
                (void)cpu[i * PAGE];
            map.acquire(pages * PAGE);
            map.store(pages);
        };
        measure(pages * PAGE, 31, before, [&] { map.release(pages * PAGE); }, nothing);
    } else {
        std::fprintf(stderr, "unknown measurement %s\n", what.c_str());
        return 2;
    }
}
