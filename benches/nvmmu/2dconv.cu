// 2DCONV: a 3 x 3 convolution over an image of floats, as in PolyBench. The output is as large as the input.
#include "harness/program.h"

static constexpr float weight[3][3] = {{0.25f, -0.5f, 0.75f}, {-0.125f, 0.5f, 0.375f}, {0.625f, -0.25f, 0.125f}};

__global__ static void convolve(const float *in, float *out, int n)
{
    constexpr float w[3][3] = {{0.25f, -0.5f, 0.75f}, {-0.125f, 0.5f, 0.375f}, {0.625f, -0.25f, 0.125f}};
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= n || y >= n)
        return;
    float sum = 0;
    if (x > 0 && y > 0 && x < n - 1 && y < n - 1)
        for (int dy = 0; dy < 3; dy++)
            for (int dx = 0; dx < 3; dx++)
                sum += w[dy][dx] * in[size_t(y + dy - 1) * n + x + dx - 1];
    out[size_t(y) * n + x] = sum;
}

static Shape shape(size_t bytes)
{
    size_t n = square_side(bytes / sizeof(float));
    return {n, {n * n * sizeof(float)}, n * n * sizeof(float)};
}

static void fill(const Shape &s, int, char *bytes)
{
    fill_floats(bytes, s.n * s.n, 1, -1, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    int n = int(s.n);
    spinio::launch(convolve, dim3(blocks(n, 32), blocks(n, 8)), dim3(32, 8), b.in<float>(0), b.out<float>(), n);
}

static Verdict check(const Shape &s, const Files &f)
{
    size_t n = s.n;
    const float *in = f.in<float>(0), *out = f.out<float>();
    return judged(n, [=](size_t begin, size_t end) {
        Verdict v;
        for (size_t y = begin; y < end; y++)
            for (size_t x = 0; x < n; x++) {
                double sum = 0;
                if (x > 0 && y > 0 && x < n - 1 && y < n - 1)
                    for (size_t dy = 0; dy < 3; dy++)
                        for (size_t dx = 0; dx < 3; dx++)
                            sum += double(weight[dy][dx]) * in[(y + dy - 1) * n + x + dx - 1];
                v.near(out[y * n + x], sum, 1e-5);
            }
        return v;
    });
}

static Register registered({"2dconv", "PolyBench", "3 x 3 convolution of an image", 1024, shape, fill, compute, check});
