// polling.cu: what a running kernel that polls host memory does to copies.
//
//   build   nvcc -O2 -std=c++17 -arch=native -I../../device/include polling.cu -o polling
//   run     ./polling
//
// Kernels of several sizes wait for a stop in three ways, and meanwhile one thread copies by a copy engine, on a stream of its own,
// and waits for each copy:
//
//   one word   each warp reads one and the same word of host memory, at most every 2 us
//   own line   each warp reads a line of its own
//   relayed    spinio/stop.h: one warp reads the word every 50 us, all others a word of device memory
//
// Printed: microseconds a copy, p50 and p90 of 25.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <spinio/stop.h>
#include <vector>

enum Way { one_word, own_line, relayed };
constexpr unsigned words_a_line = 8, most_warps = 132 * 32;

static void check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

static double microseconds()
{
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

__global__ void wait(uint64_t *host, uint64_t *device, Way way)
{
    if (threadIdx.x % 32)
        return;
    const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    uint64_t *own = way == own_line ? host + (1 + warp) * words_a_line : host;
    spinio::Backoff waiting;
    while (!(way == relayed ? spinio::stop_word(host, device) : spinio::load_acquire_system(own)))
        waiting.pause();
}

int main()
{
    const size_t words = (1 + most_warps) * words_a_line;
    uint64_t *host, *device;
    char *from, *to;
    check(cudaHostAlloc(&host, words * 8, 0), "host memory");
    check(cudaMalloc(&device, 16), "memory");
    check(cudaHostAlloc(&from, 1 << 20, 0), "host memory");
    check(cudaMalloc(&to, 1 << 20), "memory");
    cudaStream_t copies, kernels;
    cudaEvent_t end;
    check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "stream");
    check(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking), "stream");
    check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "event");
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    std::printf("%s\n%-10s %6s  %20s %20s %20s\n", properties.name, "way", "warps", "4 KiB: p50, p90", "64 KiB: p50, p90", "1 MiB: p50, p90");
    const char *names[] = {"one word", "own line", "relayed"};
    for (int way = one_word; way <= relayed; way++)
        for (unsigned blocks : {0u, 1u, 16u, 66u, 132u}) {
            if (blocks == 0 && way != one_word)
                continue;
            std::fill(host, host + words, 0);
            check(cudaMemset(device, 0, 16), "clear");
            check(cudaDeviceSynchronize(), "clear");
            if (blocks)
                wait<<<blocks, 128, 0, kernels>>>(host, device, Way(way));
            check(cudaGetLastError(), "launch");
            std::printf("%-10s %6u", blocks ? names[way] : "no kernel", blocks * 4);
            for (size_t size : {4096, 65536, 1 << 20}) {
                std::vector<double> times;
                for (int i = 0; i < 30; i++) {
                    double begun = microseconds();
                    check(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, copies), "copy");
                    check(cudaEventRecord(end, copies), "event");
                    while (cudaEventQuery(end) == cudaErrorNotReady)
                        ;
                    times.push_back(microseconds() - begun);
                }
                // The first ones warm up.
                times.erase(times.begin(), times.begin() + 5);
                std::sort(times.begin(), times.end());
                std::printf("  %9.1f %9.1f", times[12], times[22]);
            }
            std::printf("\n");
            for (size_t i = 0; i < words; i++)
                __atomic_store_n(host + i, 1, __ATOMIC_RELEASE);
            check(cudaDeviceSynchronize(), "kernel");
        }
}
