// back-prop: one step of training a network with one hidden layer of 16 units, as in Rodinia. Input: the input units
// and their weights; output: the adjusted weights.
#include "harness/program.h"

static constexpr int hidden = 16;
static constexpr float rate = 0.3f, wanted = 0.9f;

// Sums over 256 units per block: rows of 16 threads, one thread per hidden unit.
__global__ static void forward(const float *units, const float *weights, float *net, int n)
{
    __shared__ float part[hidden][hidden];
    int to = threadIdx.x;
    float sum = 0;
    for (int from = blockIdx.x * 256 + threadIdx.y; from < n && from < int(blockIdx.x + 1) * 256; from += hidden)
        sum += units[from] * weights[size_t(from) * hidden + to];
    part[threadIdx.y][to] = sum;
    __syncthreads();
    for (int half = hidden / 2; half > 0; half /= 2) {
        if (int(threadIdx.y) < half)
            part[threadIdx.y][to] += part[threadIdx.y + half][to];
        __syncthreads();
    }
    if (threadIdx.y == 0)
        atomicAdd(&net[to], part[0][to]);
}

__global__ static void clear(float *net)
{
    net[threadIdx.x] = 0;
}

// The error of a hidden unit's output times the slope of the activation there.
template <typename Real>
__host__ __device__ static Real error_of(Real net, int n)
{
    Real answer = 1 / (1 + exp(-4 * net / n));
    return (wanted - answer) * answer * (1 - answer);
}

__global__ static void adjust(const float *units, const float *weights, const float *net, float *out, int n)
{
    __shared__ float error[hidden];
    if (threadIdx.x < hidden)
        error[threadIdx.x] = error_of(net[threadIdx.x], n);
    __syncthreads();
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < size_t(n) * hidden)
        out[at] = weights[at] + rate * error[at % hidden] * units[at / hidden];
}

static Shape shape(size_t bytes)
{
    size_t n = std::max<size_t>(bytes / ((hidden + 1) * sizeof(float)), 16), weights = n * hidden * sizeof(float);
    return {n, {n * sizeof(float), weights}, weights, hidden * sizeof(float)};
}

static void fill(const Shape &s, int input, char *bytes)
{
    input == 0 ? fill_floats(bytes, s.n, 40, 0, 1) : fill_floats(bytes, s.n * hidden, 41, -1, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    int n = int(s.n);
    auto net = static_cast<float *>(b.scratch);
    spinio::launch(clear, 1, hidden, net);
    spinio::launch(forward, blocks(n, 256), dim3(hidden, hidden), b.in<float>(0), b.in<float>(1), net, n);
    spinio::launch(adjust, blocks(s.n * hidden, 256), 256, b.in<float>(0), b.in<float>(1), (const float *)net, b.out<float>(), n);
}

static Verdict check(const Shape &s, const Files &f)
{
    const float *units = f.in<float>(0), *weights = f.in<float>(1), *out = f.out<float>();
    double error[hidden];
    for (int to = 0; to < hidden; to++) {
        double net = 0;
        for (size_t from = 0; from < s.n; from++)
            net += double(units[from]) * weights[from * hidden + to];
        error[to] = error_of(net, int(s.n));
    }
    return judged(s.n * hidden, [=](size_t begin, size_t end) {
        Verdict v;
        for (size_t at = begin; at < end; at++)
            v.near(out[at], weights[at] + rate * error[at % hidden] * units[at / hidden], 1e-4);
        return v;
    });
}

static Register registered({"backprop", "Rodinia", "one step of training a network", 1088, shape, fill, compute, check});
