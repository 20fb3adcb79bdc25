// histogram: how often each of 4096 values occurs, as in Parboil. Input: samples; output: counts.
#include "harness/program.h"

static constexpr unsigned bins = 4096;

__global__ static void clear(unsigned *count)
{
    count[blockIdx.x * blockDim.x + threadIdx.x] = 0;
}

__global__ static void sort_in(const unsigned *samples, unsigned *count, size_t n)
{
    __shared__ unsigned mine[bins];
    for (unsigned b = threadIdx.x; b < bins; b += blockDim.x)
        mine[b] = 0;
    __syncthreads();
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += size_t(gridDim.x) * blockDim.x)
        atomicAdd(&mine[samples[at] >> 20], 1u);
    __syncthreads();
    for (unsigned b = threadIdx.x; b < bins; b += blockDim.x)
        if (mine[b])
            atomicAdd(&count[b], mine[b]);
}

static Shape shape(size_t bytes)
{
    size_t n = bytes / sizeof(unsigned);
    return {n, {n * sizeof(unsigned)}, bins * sizeof(unsigned)};
}

static void fill(const Shape &s, int, char *bytes)
{
    auto out = reinterpret_cast<unsigned *>(bytes);
    // The sum of two random numbers: values in the middle are the most frequent.
    parallel(s.n, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++)
            out[i] = unsigned(mixed(i) >> 33) + unsigned(mixed(i ^ 60ull << 40) >> 33);
    });
}

static void compute(const Shape &s, const Buffers &b)
{
    spinio::launch(clear, bins / 256, 256, b.out<unsigned>());
    spinio::launch(sort_in, std::min(blocks(s.n, 512), 1056u), 512, b.in<unsigned>(0), b.out<unsigned>(), s.n);
}

static Verdict check(const Shape &s, const Files &f)
{
    std::vector<unsigned> expected(bins);
    for (size_t i = 0; i < s.n; i++)
        expected[f.in<unsigned>(0)[i] >> 20]++;
    Verdict v;
    for (unsigned b = 0; b < bins; b++)
        v.add(f.out<unsigned>()[b] == expected[b]);
    return v;
}

static Register registered({"histogram", "Parboil", "histogram of samples", 1024, shape, fill, compute, check});
