// words.cu: what the operations on shared words cost one thread of a kernel, in nanoseconds. The calls of <spinio/net.h> are
// sequences of these; a GPU waits for each before the next one begins.
//
//     nvcc -O2 -std=c++17 -arch=native -I device/include benches/gpunet/words.cu -o words && ./words
//
// `after a store to the host`: 64 bytes were stored to pinned memory just before, as a send does. Each figure is the mean of 1000
// operations, less what an empty loop takes. Known flaw: one thread alone, so no contention.
#include <cstdio>

#include <cuda_runtime.h>

#include <spinio/word.h>

using namespace spinio;

struct Words {
    uint64_t *device, *host;
    unsigned long long *out;
};

constexpr unsigned rounds = 1000;

template <typename Operation>
__device__ void measure(const Words &words, unsigned at, Operation operation)
{
    unsigned long long ticks = 0;
    for (unsigned i = 0; i < rounds; i++) {
        unsigned long long begun = clock64();
        operation(i);
        ticks += clock64() - begun;
    }
    words.out[at] = ticks;
}

__device__ void store_to_host(const Words &words, unsigned i)
{
    for (unsigned k = 0; k < 8; k++)
        *(volatile uint64_t *)(words.host + 64 + k) = i;
}

__device__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__global__ void all(Words words)
{
    uint64_t *device = words.device, *host = words.host, sum = 0;
    unsigned at = 0;
    measure(words, at++, [](unsigned) { asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned) { sum += load_relaxed_device(device); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned) { sum += load_acquire_device(device); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned i) { sum += compare_exchange_relaxed_device(device + 16, i, i + 1); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned i) { sum += compare_exchange_acquire_device(device + 32, i, i + 1); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned i) { sum += compare_exchange_device(device + 48, i, i + 1); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned i) { store_release_device(device + 64, i); });
    measure(words, at++, [&](unsigned) { fence_device(); });
    measure(words, at++, [&](unsigned) { fence_system(); });
    measure(words, at++, [&](unsigned i) { store_to_host(words, i); });
    measure(words, at++, [&](unsigned i) { store_to_host(words, i); store_release_device(device + 64, i); });
    measure(words, at++, [&](unsigned i) { store_to_host(words, i); fence_device(); });
    measure(words, at++, [&](unsigned i) { store_to_host(words, i); fence_system(); });
    measure(words, at++, [&](unsigned i) { store_to_host(words, i); sum += compare_exchange_device(device + 80, i, i + 1); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned i) { store_release_system(host, i); });
    measure(words, at++, [&](unsigned) { sum += load_acquire_system(host + 16); if (sum == 1) asm volatile("" ::: "memory"); });
    measure(words, at++, [&](unsigned) { __nanosleep(32); });
    measure(words, at++, [&](unsigned) { __nanosleep(256); });
    words.out[63] = sum;
}

static const char *names[] = {"nothing",
                              "load, device",
                              "load with acquire order, device",
                              "compare-and-swap, relaxed, device",
                              "compare-and-swap, acquire, device",
                              "compare-and-swap, acquire and release, device",
                              "store with release order, device",
                              "fence, device",
                              "fence, system",
                              "store of 64 bytes to the host",
                              "  store with release order, device, after a store to the host",
                              "  fence, device, after a store to the host",
                              "  fence, system, after a store to the host",
                              "  compare-and-swap, acquire and release, after a store to the host",
                              "store with release order, to the host",
                              "load with acquire order, of the host",
                              "__nanosleep(32)",
                              "__nanosleep(256)"};

int main()
{
    Words words;
    int kilohertz = 0;
    if (cudaMalloc(&words.device, 4096) != cudaSuccess || cudaMallocHost(&words.host, 4096) != cudaSuccess ||
        cudaMallocHost(&words.out, 4096) != cudaSuccess || cudaMemset(words.device, 0, 4096) != cudaSuccess ||
        cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, 0) != cudaSuccess) {
        std::fprintf(stderr, "no CUDA device: %s\n", cudaGetErrorString(cudaGetLastError()));
        return 77;
    }
    for (int warm = 0; warm < 2; warm++) {
        if (cudaMemset(words.device, 0, 4096) != cudaSuccess)
            return 1;
        all<<<1, 1>>>(words);
        if (cudaDeviceSynchronize() != cudaSuccess) {
            std::fprintf(stderr, "kernel: %s\n", cudaGetErrorString(cudaGetLastError()));
            return 1;
        }
    }
    const double ns = 1e6 / kilohertz / rounds;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        std::printf("%-70s %8.0f ns\n", names[i], double(words.out[i] - (i ? words.out[0] : 0)) * ns);
    return 0;
}
