// What acquire and release of a GAIA map cost. One measurement per call; gaia.py makes the table.
//
//     maps first FILE                    the first acquire of a whole file, and spinio_pread of it into device memory
//     maps first-cold FILE BELOW         the same of a file that is not cached; the limit is the file below the mount, read by four
//                                        threads with O_DIRECT into host memory. At each `ready` the caller empties the cache, and
//                                        writes a line
//     maps reader FILE                   acquire of a whole file that no program has open for writing, for reading
//     maps unchanged FILE                acquire of a whole file in which no other writer changed anything, for writing
//     maps writer FILE                   the same, while a CPU program has a mapping of the file and has stored to it before
//     maps scattered FILE PAGES          acquire after the CPU has stored to this many pages, spread over the file
//     maps contiguous FILE PAGES         acquire after the CPU has stored to each of the first so many pages
//     maps release-unchanged FILE        release of a whole file in which no kernel stored anything
//     maps release-all FILE              release of a whole file, every page of which a kernel has changed
//     maps release-mapped FILE PAGES     release of pages that a CPU program has mapped and cached, every one changed
//     maps merge FILE PAGES              the same, and the program has stored another word of each page: every one is merged
//
//     maps reader-stream FILE            a kernel reads a whole file through a reader with an eighth of its size as cache, the
//                                        opening included; and spinio_pread of it into device memory, and the same sums
//     maps reader-random FILE PAGES      a kernel reads this many pages, in a random order, through a reader with pages of
//                                        4 KiB; and spinio_batch of the same pages
//     maps lent FILE                     acquires a whole file and lends its memory; prints `ready`, until its stdin ends
//     maps held FILE read|write          uses the device, and prints `ready`; after a line maps and acquires a whole file, prints
//                                        `ready` again and waits for another line
//     maps checkpoint FILE PLAIN         FILE overwritten on the device, released and synced; and cudaMemcpy, write and
//                                        fsync to PLAIN, which is made as long
//     maps handoff FILE PLAIN            the same, released with SPINIO_GAIA_HANDOFF; `handed=` is how many releases were
//                                        handed over, of 6
//
// Prints `bytes=`, `runs=`, and of all runs but the first `median_us=`, `best_us=`, `worst_us=`; `first`, `first-cold`, `reader-...`,
// `checkpoint` and `handoff` also `limit_us=`, and the last two `durable_us=`, medians. From `reader` on to `merge`
// also the time of each part of all acquires (`flush_us=`, `plan_us=`, `read_us=`, `copy_us=`, `confirm_us=`, `scan_us=`) and
// releases (`release_scan_us=`, ...) of the map, the first ones included, and how many there were. Exit status: 0 done, 1 an error
// (message on stderr), 2 usage.
#include <spinio.h>
#include <spinio/gaia_device.h>
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
#include <thread>
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

// Where the time of the map's acquires and releases went, all of them together.
static void parts(const Map &map)
{
    struct spinio_gaia_info info;
    check(spinio_gaia_info(map.gpu, &info, sizeof info) == 0, "info");
    auto us = [](uint64_t ns) { return double(ns) / 1000; };
    std::printf("flush_us=%.1f\nplan_us=%.1f\nread_us=%.1f\ncopy_us=%.1f\nconfirm_us=%.1f\nscan_us=%.1f\n", us(info.flush_ns),
                us(info.plan_ns), us(info.read_ns), us(info.copy_ns), us(info.confirm_ns), us(info.scan_ns));
    std::printf("release_scan_us=%.1f\nrelease_copy_us=%.1f\nrelease_commit_us=%.1f\n", us(info.release_scan_ns),
                us(info.release_copy_ns), us(info.release_commit_ns));
    std::printf("acquires=%llu\nreleases=%llu\n", (unsigned long long)(info.acquires - info.acquires_unchanged),
                (unsigned long long)info.releases);
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

// The caller does something, and then writes a line.
static void wait_for_caller()
{
    std::puts("ready");
    std::fflush(stdout);
    int c;
    do
        c = std::getchar();
    while (c != '\n' && c != EOF);
}

// What the disk gives: a file read by four threads, 4 MiB at a time, past the page cache into host memory.
static void read_directly(const char *path, size_t size)
{
    static const size_t BLOCK = 4 << 20, THREADS = 4;
    int fd = open(path, O_RDONLY | O_DIRECT);
    check(fd >= 0, path);
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < THREADS; thread++)
        threads.emplace_back([=] {
            void *block = aligned_alloc(PAGE, BLOCK);
            for (size_t at = thread * BLOCK; at < size; at += THREADS * BLOCK)
                check(pread(fd, block, BLOCK, off_t(at)) == ssize_t(std::min(BLOCK, size - at)), "O_DIRECT");
            free(block);
        });
    for (std::thread &thread : threads)
        thread.join();
    close(fd);
}

static void first_cold(const char *path, const char *below)
{
    std::vector<double> limit;
    Map *map = nullptr;
    auto before = [&] {
        map = new Map(path);
        wait_for_caller();
        double begun = now();
        read_directly(below, map->size);
        limit.push_back(now() - begun);
        wait_for_caller();
    };
    struct stat st;
    check(stat(path, &st) == 0, "stat");
    measure(st.st_size, 4, before, [&] { map->acquire(map->size); }, [&] { delete map; });
    std::sort(limit.begin() + 1, limit.end());
    std::printf("limit_us=%.2f\n", limit[2]);
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

static const size_t PIECE = 65536;
static const unsigned READER_BLOCKS = spinio::emulated ? 4 : 132, READER_BLOCK = spinio::emulated ? 32 : 128;

// The sum of the words of a file: each warp takes a piece of 64 KiB after the other.
__global__ void sum_on_demand(spinio_gaia_reader file, unsigned long long *sum)
{
    gaia::reader<unsigned long long> words(file);
    size_t thread = blockIdx.x * size_t(blockDim.x) + threadIdx.x, warps = size_t(gridDim.x) * blockDim.x / 32;
    unsigned long long mine = 0;
    for (size_t at = thread / 32 * (PIECE / 8); at < words.size(); at += warps * (PIECE / 8)) {
        const unsigned long long *piece;
        int64_t got = words.pin(at, &piece);
        for (int64_t i = thread % 32; i < got; i += 32)
            mine += piece[i];
        if (got > 0)
            words.unpin(piece);
    }
    atomicAdd(sum, mine);
}

__global__ void sum_words(const unsigned long long *words, size_t count, unsigned long long *sum)
{
    size_t thread = blockIdx.x * size_t(blockDim.x) + threadIdx.x, threads = size_t(gridDim.x) * blockDim.x;
    unsigned long long mine = 0;
    for (size_t i = thread; i < count; i += threads)
        mine += words[i];
    atomicAdd(sum, mine);
}

// The sum of the words of pages, in the order of a list; a warp takes one after the other.
__global__ void sum_pages(spinio_gaia_reader file, const unsigned *pages, unsigned count, unsigned long long *sum)
{
    gaia::reader<unsigned long long> words(file);
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, warps = gridDim.x * blockDim.x / 32;
    unsigned long long mine = 0;
    for (unsigned i = thread / 32; i < count; i += warps) {
        const unsigned long long *page;
        int64_t got = words.pin(uint64_t(pages[i]) * (PAGE / 8), &page);
        for (int64_t word = thread % 32; word < got; word += 32)
            mine += page[word];
        if (got > 0)
            words.unpin(page);
    }
    atomicAdd(sum, mine);
}

// Both ways in turn; each must find the same sum.
template <typename Limit, typename Seen>
static void compare(size_t bytes, unsigned long long *sum, Limit limit, Seen seen)
{
    std::vector<double> limits;
    unsigned long long right = 0, found = 0;
    auto clear = [&] { check(cudaMemcpy(sum, &(found = 0), 8, cudaMemcpyHostToDevice) == cudaSuccess, "copy"); };
    auto take = [&] {
        check(cudaDeviceSynchronize() == cudaSuccess, "kernel");
        check(cudaMemcpy(&found, sum, 8, cudaMemcpyDeviceToHost) == cudaSuccess, "copy");
    };
    auto before = [&] {
        clear();
        double begun = now();
        limit();
        take();
        limits.push_back(now() - begun);
        right = found;
        clear();
    };
    auto after = [&] {
        if (found != right) {
            std::fprintf(stderr, "a kernel has read other bytes on demand\n");
            std::exit(1);
        }
    };
    measure(bytes, 6, before, [&] { seen(), take(); }, after);
    std::sort(limits.begin() + 1, limits.end());
    std::printf("limit_us=%.2f\n", limits[3]);
}

static void readers(const std::string &what, const char *path, size_t pages)
{
    int fd = open(path, O_RDONLY);
    struct stat st;
    check(fd >= 0 && fstat(fd, &st) == 0, "open");
    check(cudaDeviceSynchronize() == cudaSuccess, "device");
    size_t size = st.st_size, all = size / PAGE;
    bool stream = what == "reader-stream";
    pages = stream ? all : std::min(pages, all);
    char *copy;
    unsigned *list;
    unsigned long long *sum;
    check(cudaMalloc(&copy, pages * PAGE) == cudaSuccess && cudaMalloc(&list, pages * 4) == cudaSuccess &&
              cudaMalloc(&sum, 8) == cudaSuccess, "memory");
    std::vector<unsigned> order(pages);
    for (size_t i = 0; i < pages; i++) // one in each of as many equal parts of the file, in an order without a pattern
        order[i] = unsigned((i * 0x9e3779b1ull % pages) * all / pages);
    std::vector<struct spinio_read_op> reads(stream ? 0 : pages);
    for (size_t i = 0; i < reads.size(); i++) {
        reads[i] = {};
        reads[i].fd = fd, reads[i].buffer = copy + i * PAGE, reads[i].size = PAGE, reads[i].offset = off_t(order[i]) * PAGE;
    }
    check(cudaMemcpy(list, order.data(), pages * 4, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    auto limit = [&] {
        if (stream)
            check(spinio_pread(fd, copy, pages * PAGE, 0) == ssize_t(pages * PAGE), "pread");
        else
            check(spinio_batch(reads.data(), pages) == ssize_t(pages * PAGE), "batch");
        spinio::launch(sum_words, READER_BLOCKS, READER_BLOCK, reinterpret_cast<unsigned long long *>(copy), pages * PAGE / 8, sum);
    };
    auto seen = [&] {
        struct spinio_gaia_reader file;
        size_t page = stream ? PIECE : PAGE, cache = std::max(size / 8, 64 * page);
        check(spinio_gaia_reader_open(fd, cache, unsigned(page), stream ? 0 : SPINIO_GAIA_RANDOM, &file) == 0, "reader");
        if (stream)
            spinio::launch_resident(sum_on_demand, READER_BLOCKS, READER_BLOCK, file, sum);
        else
            spinio::launch_resident(sum_pages, READER_BLOCKS, READER_BLOCK, file, list, unsigned(pages), sum);
        check(cudaDeviceSynchronize() == cudaSuccess, "kernel");
        check(spinio_gaia_reader_close(&file) == 0, "close");
    };
    compare(pages * PAGE, sum, limit, seen);
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 4) {
        std::fprintf(stderr, "usage: %s first|reader|unchanged|writer|scattered|release-... FILE [PAGES], or checkpoint|handoff FILE PLAIN, or first-cold FILE BELOW\n", argv[0]);
        return 2;
    }
    std::string what = argv[1];
    if (what == "first")
        return first(argv[2]), 0;
    if (what == "first-cold" && argc == 4)
        return first_cold(argv[2], argv[3]), 0;
    if (what == "checkpoint" && argc == 4)
        return checkpoint(argv[2], argv[3], 0), 0;
    if (what == "handoff" && argc == 4)
        return checkpoint(argv[2], argv[3], SPINIO_GAIA_HANDOFF), 0;
    if (what == "lent") {
        Map map(argv[2], SPINIO_GAIA_READ);
        map.acquire(map.size);
        check(spinio_gaia_advise(map.gpu, map.size, SPINIO_GAIA_LEND) == 0, "lend");
        return wait_for_caller(), 0;
    }
    if (what == "held" && argc == 4) {
        check(cudaDeviceSynchronize() == cudaSuccess, "device");
        wait_for_caller();
        Map map(argv[2], std::string(argv[3]) == "read" ? SPINIO_GAIA_READ : SPINIO_GAIA_WRITE);
        map.acquire(map.size);
        return wait_for_caller(), 0;
    }
    if (what == "reader-stream" || (what == "reader-random" && argc == 4))
        return readers(what, argv[2], argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 0), 0;
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
    } else if (what == "scattered" || what == "contiguous") {
        const size_t step = what == "scattered" ? all / pages : 1;
        volatile unsigned char *cpu = map.cpu();
        acquire();
        release();
        auto store = [&] {
            for (size_t i = 0; i < pages; i++)
                cpu[i * step * PAGE]++;
        };
        measure(pages * PAGE, 11, store, acquire, release);
    } else if (what == "release-unchanged") {
        measure(map.size, 11, acquire, release, nothing);
    } else if (what == "release-all") {
        measure(map.size, 6, [&] { acquire(), map.store(all); }, release, nothing);
    } else if (what == "release-mapped" || what == "merge") {
        volatile unsigned char *cpu = map.cpu();
        bool merge = what == "merge";
        auto before = [&] {
            for (size_t i = 0; i < pages; i++)
                (void)cpu[i * PAGE];
            map.acquire(pages * PAGE);
            map.store(pages);
            for (size_t i = 0; merge && i < pages; i++)
                cpu[i * PAGE + PAGE - 1]++;
        };
        measure(pages * PAGE, 31, before, [&] { map.release(pages * PAGE); }, nothing);
        struct spinio_gaia_info info;
        check(spinio_gaia_info(map.gpu, &info, sizeof info) == 0, "info");
        std::printf("merged=%llu\n", (unsigned long long)info.pages_merged);
    } else {
        std::fprintf(stderr, "unknown measurement %s\n", what.c_str());
        return 2;
    }
    parts(map);
}
