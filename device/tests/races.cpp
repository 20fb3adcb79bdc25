// What ThreadSanitizer sees of a kernel: for a build with -fsanitize=thread. Without it, a test of the results.
//
//   races              kernels without a race, with every kind of order that a kernel can have: no report
//   races barrier      a kernel that lacks a __syncthreads(): a report
//   races warp         a kernel that lacks a __syncwarp()
//   races release      resident blocks, of which one publishes without a release
#include "run.h"

#include <cstring>
#include <vector>

static bool lacks_barrier, lacks_syncwarp, lacks_release;

__global__ void block_sum(const int *in, int *out)
{
    __shared__ int part[64];
    part[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
    if (!lacks_barrier)
        __syncthreads();
    for (unsigned half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
        if (!lacks_barrier)
            __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = part[0];
}

__global__ void warp_rotate(int *out)
{
    __shared__ int words[64];
    unsigned at = threadIdx.x, next = at / 32 * 32 + (at + 1) % 32;
    words[at] = int(at);
    __shfl_sync(0xffffffff, 1, 0); // orders nothing
    if (!lacks_syncwarp)
        __syncwarp();
    out[at] = words[next];
}

// Block 0 waits for a word of each other block, then reads what they have stored.
__global__ void gather(int *values, unsigned long long *ready, int *sum)
{
    if (blockIdx.x) {
        values[blockIdx.x * blockDim.x + threadIdx.x] = int(threadIdx.x);
        __syncthreads();
        if (threadIdx.x == 0)
            __atomic_store_n(&ready[blockIdx.x], 1ull, lacks_release ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
        return;
    }
    for (unsigned other = 1 + threadIdx.x; other < gridDim.x; other += blockDim.x)
        while (!__atomic_load_n(&ready[other], __ATOMIC_ACQUIRE))
            __nanosleep(100);
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned i = blockDim.x; i < gridDim.x * blockDim.x; i++)
            *sum += values[i];
}

int main(int count, char **argument)
{
    const char *which = count > 1 ? argument[1] : "";
    lacks_barrier = !std::strcmp(which, "barrier");
    lacks_syncwarp = !std::strcmp(which, "warp");
    lacks_release = !std::strcmp(which, "release");
    std::vector<int> in(64 * 6, 1), out(64), values(8 * 16);
    run(block_sum, 6, 64, in.data(), out.data());
    for (int i = 0; i < 6; i++)
        CHECK(lacks_barrier || out[i] == 64);
    run(warp_rotate, 1, 64, out.data());
    for (int i = 0; i < 64; i++)
        CHECK(lacks_syncwarp || out[i] == i / 32 * 32 + (i + 1) % 32);
    unsigned long long ready[8] = {};
    int sum = 0;
    run_resident(gather, 8, 16, values.data(), ready, &sum);
    CHECK(lacks_release || sum == 7 * 120);
    return failures ? 1 : 0;
}
