// On-demand reads from kernels: gaia::reader on the emulated device, or compiled by nvcc (-x cu) on a GPU. Prints each
// failure and exits with 1.
#include <spinio.h>
#include <spinio/gaia_device.h>

#include <cstdio>
#include <fcntl.h>
#include <unistd.h>
#include <vector>

#define CHECK_CAUSE spinio_last_error()
#include "check.h"

constexpr unsigned page = 4096;

__host__ __device__ inline uint64_t element(uint64_t at)
{
    return at * 0x9e3779b97f4a7c15 + 12345;
}

static int file_of(uint64_t elements, unsigned rest)
{
    char path[] = "reader-XXXXXX";
    int fd = mkstemp(path);
    unlink(path);
    std::vector<uint64_t> all(elements + 1);
    for (uint64_t i = 0; i <= elements; i++)
        all[i] = element(i);
    size_t bytes = elements * 8 + rest;
    if (write(fd, all.data(), bytes) != ssize_t(bytes))
        std::perror("write");
    return fd;
}

static spinio_gaia_reader open_reader(int fd, unsigned pages, unsigned advice = 0)
{
    spinio_gaia_reader reader = {};
    CHECK(spinio_gaia_reader_open(fd, size_t(pages) * page, page, advice, &reader) == 0);
    return reader;
}

static struct spinio_gaia_reader_stats stats_of(const spinio_gaia_reader &reader)
{
    struct spinio_gaia_reader_stats stats = {};
    CHECK(spinio_gaia_reader_stats(&reader, &stats, sizeof stats) == 0);
    return stats;
}

// A word of device memory, zero.
static int *new_count(size_t ints = 1)
{
    int *count;
    std::vector<int> zeros(ints);
    CHECK(cudaMalloc(&count, ints * sizeof(int)) == cudaSuccess);
    CHECK(cudaMemcpy(count, zeros.data(), ints * sizeof(int), cudaMemcpyHostToDevice) == cudaSuccess);
    return count;
}

static std::vector<int> take_counts(int *count, size_t ints = 1)
{
    std::vector<int> values(ints, -1);
    // The copy waits for the kernel, and meanwhile the driver lets no other thread copy: no page needs that.
    CHECK(cudaMemcpy(values.data(), count, ints * sizeof(int), cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaFree(count) == cudaSuccess);
    return values;
}

// Elements in any order, also past the end; some lanes read nothing. counts: right, wrong, past the end.
__global__ void any_order(spinio_gaia_reader file, uint64_t elements, unsigned rounds, unsigned seed, int *counts)
{
    gaia::reader<uint64_t> reader(file);
    uint64_t random = element(seed + blockIdx.x * blockDim.x + threadIdx.x);
    for (unsigned i = 0; i < rounds; i++) {
        random = element(random) ^ random >> 29;
        uint64_t at = random % 7 == 0 ? reader.none : random % (elements + elements / 8), value = 1;
        // Half of the rounds: neighbours, of which many are in one page.
        if (i % 2)
            at = __shfl_sync(0xffffffff, (unsigned long long)(random % elements), 0) + threadIdx.x % 32;
        int got = reader.read(at, &value);
        bool right = at < elements ? got == 1 && value == element(at) : got == 0 && value == 1;
        atomicAdd(&counts[right ? at < elements ? 0 : 2 : 1], 1);
    }
}

static void elements_are_those_of_the_file_in_any_order()
{
    const uint64_t elements = 60 * 512 + 77;
    int fd = file_of(elements, 3); // the last element is not complete
    for (unsigned pages : {8u, 16u, 512u}) {
        auto reader = open_reader(fd, pages);
        int *counts = new_count(3);
        cudaStream_t streams[3];
        for (unsigned i = 0; i < 3; i++) {
            CHECK(cudaStreamCreate(&streams[i]) == cudaSuccess);
            spinio::launch_on(streams[i], any_order, 3, 64, reader, elements, 24, i * 1000, counts);
        }
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        auto seen = take_counts(counts, 3);
        CHECK(seen[1] == 0 && seen[0] > seen[2] && seen[2] > 100 && seen[0] + seen[2] == 3 * 3 * 64 * 24);
        auto stats = stats_of(reader);
        CHECK(stats.errors == 0 && stats.fills >= (pages == 512 ? 61 : 100) && stats.bytes <= stats.fills * page);
        CHECK(pages < 512 || stats.fills < 80); // nothing is read twice; some pages past the end
        CHECK(spinio_gaia_reader_close(&reader) == 0);
        CHECK(spinio_gaia_reader_close(&reader) == -1 && errno == EBADF);
    }
    close(fd);
}

// The sum of all elements: a warp takes a page at a time, in order.
__global__ void pages_in_order(spinio_gaia_reader file, unsigned long long *sum, int *errors)
{
    gaia::reader<uint64_t> reader(file);
    uint64_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
    for (uint64_t at = warp * 512; at < reader.size(); at += warps * 512) {
        const uint64_t *elements;
        int64_t count = reader.pin(at, &elements);
        if (count <= 0) {
            atomicAdd(errors, 1);
            continue;
        }
        for (int64_t i = threadIdx.x % 32; i < count; i += 32)
            atomicAdd(sum, (unsigned long long)elements[i]);
        reader.unpin(elements);
    }
}

static void sequential_kernels_find_pages_requested_ahead()
{
    const uint64_t elements = 300 * 512 + 5;
    int fd = file_of(elements, 0);
    auto reader = open_reader(fd, 64);
    int *counts = new_count(3);
    spinio::launch(pages_in_order, 1, 32, reader, (unsigned long long *)counts, counts + 2);
    auto seen = take_counts(counts, 3);
    unsigned long long sum = 0, wanted = 0;
    __builtin_memcpy(&sum, seen.data(), sizeof sum);
    for (uint64_t i = 0; i < elements; i++)
        wanted += element(i);
    CHECK(sum == wanted && seen[2] == 0);
    auto stats = stats_of(reader);
    CHECK(stats.bytes >= elements * 8 && stats.fills >= 301 && stats.errors == 0);
    CHECK(spinio_gaia_reader_close(&reader) == 0);
    close(fd);
}

// Of every five pages one is used, after the first two: the other four are requested ahead, and stay in their slots of host memory.
__global__ void one_of_five(spinio_gaia_reader file, unsigned pages, int *counts)
{
    gaia::reader<uint64_t> reader(file);
    const uint64_t in_page = (1u << file.page_shift) / 8;
    for (unsigned i = 0; i < pages; i += i ? i % 5 ? 4 : 5 : 1) {
        // By half of the lanes, which copy the page, and by all others.
        uint64_t at = i * in_page + threadIdx.x, value = 1;
        int got = threadIdx.x % 2 ? reader.read(at, &value, 0xaaaaaaaa) : reader.read(at + 100, &value, 0x55555555);
        atomicAdd(&counts[got == 1 && value == element(threadIdx.x % 2 ? at : at + 100)], 1);
    }
}

static void pages_that_no_kernel_uses_do_not_keep_all_slots()
{
    // 256 slots of 64 KiB.
    const unsigned big = 65536, pages = 420;
    int fd = file_of(uint64_t(pages) * big / 8, 0);
    spinio_gaia_reader reader = {};
    CHECK(spinio_gaia_reader_open(fd, 600ull * big, big, 0, &reader) == 0);
    int *counts = new_count(2);
    spinio::launch(one_of_five, 1, 32, reader, pages, counts);
    auto seen = take_counts(counts, 2);
    CHECK(seen[0] == 0 && seen[1] == int((pages / 5 + 1) * 32));
    auto stats = stats_of(reader);
    CHECK(stats.fills > 256 && stats.errors == 0);
    CHECK(spinio_gaia_reader_close(&reader) == 0);
    close(fd);
}

__global__ void one(spinio_gaia_reader file, uint64_t at, int *result)
{
    gaia::reader<char> reader(file);
    char value;
    int got = reader.read(at, &value);
    if (threadIdx.x == 0)
        *result = got;
}

static int result_of(const spinio_gaia_reader &reader, uint64_t at)
{
    int *count = new_count();
    spinio::launch(one, 1, 32, reader, at, count);
    return take_counts(count)[0];
}

static void errors_and_changes_of_the_file_reach_the_kernel()
{
    // No memory is at address 0 of a process.
    int memory = open("/proc/self/mem", O_RDONLY);
    auto reader = open_reader(memory, 8);
    for (int i = 1; i <= 3; i++) {
        CHECK(result_of(reader, 100) == -EIO);
        CHECK(stats_of(reader).errors == unsigned(i)); // not kept: tried again
    }
    CHECK(spinio_gaia_reader_close(&reader) == 0);
    close(memory);
    int fd = file_of(512, 0);
    reader = open_reader(fd, 8);
    CHECK(result_of(reader, 4095) == 1 && result_of(reader, 4096) == 0 && result_of(reader, ~0ull - 1) == 0);
    CHECK(result_of(reader, 1ull << 51) == 0);
    CHECK(ftruncate(fd, 20000) == 0 && result_of(reader, 8192) == 1); // a page that was not read yet
    close(fd); // the reader has the file open itself
    CHECK(result_of(reader, 12288) == 1);
    CHECK(spinio_gaia_reader_close(&reader) == 0);
}

constexpr uint64_t valid_tag = 2 << 18; // of page 0, without users

// Two blocks are the users of a page that could not be read, and leave at the same time.
__global__ void two_leave(spinio_gaia_reader file, uint64_t *turns, unsigned rounds, int *kept)
{
    if (threadIdx.x)
        return;
    gaia::pages pages(file);
    auto tag = reinterpret_cast<uint64_t *>(uintptr_t(file.tags));
    auto wait_for = [turns](unsigned block, uint64_t turn) {
        // Not by a Backoff at first, so that both go on at once.
        spinio::Backoff waiting;
        for (unsigned looks = 0; spinio::load_acquire_device(turns + block * 16) < turn; looks++)
            if (looks > 10000)
                waiting.pause();
    };
    for (uint64_t round = 1; round <= rounds; round++) {
        if (blockIdx.x == 0)
            spinio::store_release_device(tag, valid_tag + 2);
        spinio::store_release_device(turns + blockIdx.x * 16, 2 * round - 1);
        wait_for(1 - blockIdx.x, 2 * round - 1);
        pages.give_back(0);
        spinio::store_release_device(turns + blockIdx.x * 16, 2 * round);
        wait_for(1 - blockIdx.x, 2 * round);
        if (blockIdx.x == 0 && spinio::load_acquire_device(tag))
            atomicAdd(kept, 1);
    }
}

static void page_that_could_not_be_read_is_not_kept_if_two_leave_at_once()
{
    auto words = reinterpret_cast<uint64_t *>(new_count(128));
    const uint64_t error = uint64_t(-EIO);
    CHECK(cudaMemcpy(words + 1, &error, sizeof error, cudaMemcpyHostToDevice) == cudaSuccess);
    spinio_gaia_reader reader = {};
    reader.tags = uintptr_t(words);
    reader.results = uintptr_t(words + 1);
    int *kept = new_count();
    spinio::launch_resident(two_leave, 2, 32, reader, words + 16, 20000u, kept);
    CHECK(take_counts(kept)[0] == 0);
    CHECK(cudaFree(words) == cudaSuccess);
}

// Pins as many pages as there are frames, then needs one more.
__global__ void pins_all(spinio_gaia_reader file, int *result)
{
    gaia::reader<uint64_t> reader(file);
    const uint64_t *pages[8];
    int64_t pinned = 0;
    for (int i = 0; i < 8; i++)
        pinned += reader.pin(i * 512, &pages[i]);
    uint64_t value;
    int got = reader.read(9 * 512, &value);
    bool right = true;
    for (int i = 0; i < 8; i++) {
        right = right && pages[i][threadIdx.x] == element(i * 512 + threadIdx.x);
        reader.unpin(pages[i]);
    }
    int then = reader.read(9 * 512, &value);
    if (threadIdx.x == 0) {
        result[0] = got;
        result[1] = then;
        result[2] = right && pinned == 8 * 512;
    }
}

static void warp_that_waits_for_itself_gets_a_timeout()
{
    int fd = file_of(20 * 512, 0);
    auto reader = open_reader(fd, 8);
    auto hasty = reader;
    hasty.timeout_ns = 50000000;
    int *counts = new_count(3);
    // The first pages may take longer than that on a loaded machine: they are read before.
    for (uint64_t i = 0; i < 8; i++)
        CHECK(result_of(reader, i * page) == 1);
    spinio::launch(pins_all, 1, 32, hasty, counts);
    auto seen = take_counts(counts, 3);
    CHECK(seen[0] == -ETIMEDOUT && (seen[1] == 1 || seen[1] == -ETIMEDOUT) && seen[2] == 1);
    CHECK(result_of(reader, 9 * page) == 1);
    CHECK(spinio_gaia_reader_close(&reader) == 0);
    close(fd);
}

// One thread uses a page more often than it can be counted.
__global__ void uses_too_often(spinio_gaia_reader file, uint64_t *result)
{
    gaia::pages pages(file);
    uint64_t uses = 0;
    gaia::taken_page taken = {0, 0};
    while (uses < 70000 && (taken = pages.take(0)).frame >= 0)
        uses++;
    result[0] = uses;
    result[1] = uint64_t(taken.frame);
    auto tags = reinterpret_cast<uint64_t *>(uintptr_t(file.tags));
    result[2] = 0;
    for (unsigned frame = 0; frame < 8; frame++)
        result[2] += spinio::load_acquire_device(tags + frame) & 0xffff;
}

static void users_of_a_page_are_counted_right_up_to_the_limit()
{
    int fd = file_of(512, 0);
    auto reader = open_reader(fd, 8);
    CHECK(result_of(reader, 0) == 1);
    auto hasty = reader;
    hasty.timeout_ns = 50000000;
    auto words = new_count(6);
    spinio::launch(uses_too_often, 1, 1, hasty, reinterpret_cast<uint64_t *>(words));
    auto seen = take_counts(words, 6);
    CHECK(seen[0] == 49152 && seen[2] == -ETIMEDOUT && seen[4] == 49152);
    CHECK(spinio_gaia_reader_close(&reader) == 0);
    close(fd);
}

// Reads until it fails.
__global__ void until_error(spinio_gaia_reader file, uint64_t elements, uint64_t *began, int *errors)
{
    gaia::reader<uint64_t> reader(file);
    uint64_t random = element(blockIdx.x), value = 0;
    int got = 1;
    while (got >= 0) {
        got = reader.read(random % elements, &value);
        if (got == 1 && value != element(random % elements))
            atomicAdd(&errors[1], 1);
        random = element(random);
        if (threadIdx.x == 0)
            spinio::store_release_system(began + blockIdx.x, 1);
    }
    if (threadIdx.x == 0 && got == -ECANCELED)
        atomicAdd(&errors[0], 1);
}

static void close_ends_kernels_that_wait()
{
    const uint64_t elements = 64 * 512;
    int fd = file_of(elements, 0);
    auto reader = open_reader(fd, 8, SPINIO_GAIA_RANDOM);
    int *errors = new_count(2);
    uint64_t *began;
    cudaStream_t stream;
    CHECK(cudaHostAlloc(&began, 3 * sizeof *began, cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    for (int i = 0; i < 3; i++)
        began[i] = 0;
    spinio::launch_resident_on(stream, until_error, 3, 32, reader, elements, began, errors);
    for (int i = 0; i < 3; i++)
        while (!__atomic_load_n(began + i, __ATOMIC_ACQUIRE))
            usleep(1000);
    CHECK(spinio_gaia_reader_close(&reader) == 0);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    auto seen = take_counts(errors, 2);
    CHECK(seen[0] == 3 && seen[1] == 0);
    CHECK(cudaFreeHost(began) == cudaSuccess);
    close(fd);
}

static void misuse_is_refused()
{
    int fd = file_of(512, 0);
    spinio_gaia_reader reader = {};
    CHECK(spinio_gaia_reader_open(fd, 65536, 5000, 0, &reader) == -1 && errno == EINVAL);
    CHECK(spinio_gaia_reader_open(fd, 8 << 20, 131072, 0, &reader) == -1 && errno == EINVAL);
    CHECK(spinio_gaia_reader_open(fd, 7 * page, page, 0, &reader) == -1 && errno == EINVAL);
    CHECK(spinio_gaia_reader_open(fd, 65536, page, 64, &reader) == -1 && errno == EINVAL);
    CHECK(spinio_gaia_reader_open(fd, 65536, page, 0, nullptr) == -1 && errno == EFAULT);
    CHECK(spinio_gaia_reader_open(12345, 65536, page, 0, &reader) == -1 && errno == EBADF);
    if (spinio::emulated) // a GPU may have that much
        CHECK(spinio_gaia_reader_open(fd, size_t(1) << 32, page, 0, &reader) == -1 && errno == ENOMEM);
    close(fd);
    int writes = open("/dev/null", O_WRONLY);
    CHECK(spinio_gaia_reader_open(writes, 65536, page, 0, &reader) == -1 && errno == EACCES);
    close(writes);
}

int main()
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (spinio::emulated)
        spinio_emulated_stream(); // starts the device
    else
        CHECK(cudaFree(nullptr) == cudaSuccess); // makes the context, whose device a reader is for
    misuse_is_refused();
    elements_are_those_of_the_file_in_any_order();
    sequential_kernels_find_pages_requested_ahead();
    pages_that_no_kernel_uses_do_not_keep_all_slots();
    errors_and_changes_of_the_file_reach_the_kernel();
    page_that_could_not_be_read_is_not_kept_if_two_leave_at_once();
    warp_that_waits_for_itself_gets_a_timeout();
    users_of_a_page_are_counted_right_up_to_the_limit();
    close_ends_kernels_that_wait();
    return failures ? 1 : 0;
}
