// 3DCONV: a 3 x 3 x 3 convolution over a volume of floats, as in PolyBench. The output is as large as the input.
#include "harness/program.h"

// The weight of a neighbour depends on how many of its coordinates differ.
__host__ __device__ static float weight(int differ)
{
    return differ == 0 ? 0.5f : differ == 1 ? -0.25f : differ == 2 ? 0.125f : 0.0625f;
}

__global__ static void convolve(const float *in, float *out, int n)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, z = blockIdx.z;
    if (x >= n || y >= n)
        return;
    float sum = 0;
    if (x > 0 && y > 0 && z > 0 && x < n - 1 && y < n - 1 && z < n - 1)
        for (int dz = -1; dz <= 1; dz++)
            for (int dy = -1; dy <= 1; dy++)
                for (int dx = -1; dx <= 1; dx++)
                    sum += weight((dx != 0) + (dy != 0) + (dz != 0)) * in[(size_t(z + dz) * n + y + dy) * n + x + dx];
    out[(size_t(z) * n + y) * n + x] = sum;
}

static Shape shape(size_t bytes)
{
    size_t n = cube_side(bytes / sizeof(float));
    return {n, {n * n * n * sizeof(float)}, n * n * n * sizeof(float)};
}

static void fill(const Shape &s, int, char *bytes)
{
    fill_floats(bytes, s.n * s.n * s.n, 2, -1, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    unsigned n = unsigned(s.n);
    spinio::launch(convolve, dim3(blocks(n, 32), blocks(n, 8), n), dim3(32, 8), b.in<float>(0), b.out<float>(), int(n));
}

static Verdict check(const Shape &s, const Files &f)
{
    long n = long(s.n);
    const float *in = f.in<float>(0), *out = f.out<float>();
    return judged(s.n, [=](size_t begin, size_t end) {
        Verdict v;
        for (long z = long(begin); z < long(end); z++)
            for (long y = 0; y < n; y++)
                for (long x = 0; x < n; x++) {
                    double sum = 0;
                    bool inner = x > 0 && y > 0 && z > 0 && x < n - 1 && y < n - 1 && z < n - 1;
                    for (long at = 0; inner && at < 27; at++) {
                        long dx = at % 3 - 1, dy = at / 3 % 3 - 1, dz = at / 9 - 1;
                        sum += double(weight((dx != 0) + (dy != 0) + (dz != 0))) * in[((z + dz) * n + y + dy) * n + x + dx];
                    }
                    v.near(out[(z * n + y) * n + x], sum, 1e-5);
                }
        return v;
    });
}

static Register registered({"3dconv", "PolyBench", "3 x 3 x 3 convolution of a volume", 1024, shape, fill, compute, check});
