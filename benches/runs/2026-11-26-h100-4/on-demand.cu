// Reads a file by gaia::reader, with an eighth of its size as cache and pages of 64 KiB: 528 warps, in order, three times.
//
//   nvcc -O2 -std=c++17 -arch=native -I device/include -I crates/capi/include on-demand.cu libspinio.so -o on-demand
//   ./on-demand FILE 8 0 1      (the last one: 1 cached, 0 not)
//
// As long as a kernel runs, it prints each 2 s how many pages were read.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <cuda_runtime.h>
#include <spinio/gaia_device.h>

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

int main(int, char **arguments)
{
    const size_t part = size_t(std::atoi(arguments[2])), in_page = 8192;
    int fd = open(arguments[1], O_RDONLY);
    struct stat st;
    fstat(fd, &st);
    const size_t size = size_t(st.st_size), count = size / 8;
    std::vector<char> bytes(1 << 20);
    if (std::atoi(arguments[4]) == 0)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    else
        for (size_t at = 0; at < size; at += bytes.size())
            (void)!pread(fd, bytes.data(), bytes.size(), off_t(at));
    cudaDeviceSynchronize();
    unsigned long long *sums;
    unsigned *failed;
    cudaMalloc(&sums, 132 * 128 * 8);
    cudaMalloc(&failed, 4);
    for (int run = 0; run < 3; run++) {
        cudaMemset(sums, 0, 132 * 128 * 8);
        cudaMemset(failed, 0, 4);
        spinio_gaia_reader file;
        if (spinio_gaia_reader_open(fd, std::max<size_t>(size / part, 64 << 16), 65536, unsigned(std::atoi(arguments[3])), &file))
            return std::perror("reader"), 1;
        auto begun = std::chrono::steady_clock::now();
        std::atomic<bool> done{false};
        std::thread monitor([&] {
            for (int tenths = 1; !done; tenths++) {
                usleep(100000);
                struct spinio_gaia_reader_stats stats;
                spinio_gaia_reader_stats(&file, &stats, sizeof stats);
                if (tenths % 20 == 0)
                    std::printf("t=%d fills=%llu\n", tenths / 10, (unsigned long long)stats.fills);
            }
        });
        void *values[] = {&file, const_cast<size_t *>(&count), const_cast<size_t *>(&in_page), &sums, &failed};
        cudaLaunchCooperativeKernel((const void *)sum_on_demand, dim3(132), dim3(128), values, 0, 0);
        cudaError_t error = cudaDeviceSynchronize();
        double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        done = true;
        monitor.join();
        struct spinio_gaia_reader_stats stats;
        spinio_gaia_reader_stats(&file, &stats, sizeof stats);
        unsigned pages_failed = 0;
        cudaMemcpy(&pages_failed, failed, 4, cudaMemcpyDeviceToHost);
        std::printf("size=%zu run=%d %s %.3f s %.2f GB/s fills=%llu of %zu errors=%llu failed=%u\n", size, run, cudaGetErrorString(error), seconds,
                    double(size) / seconds / 1e9, (unsigned long long)stats.fills, size >> 16, (unsigned long long)stats.errors, pages_failed);
        spinio_gaia_reader_close(&file);
    }
}
