// hotspot: temperatures of a chip from its power map, as in Rodinia: some steps of a five-point stencil.
// Input: two grids (temperature, power); output: one.
#include "harness/program.h"

static constexpr int steps = 4; // even: the last one ends in the output
static constexpr float across = 0.15f, along = 0.1f, cooling = 0.02f, heating = 0.05f, ambient = 80;

// At the edge the neighbour is the cell itself.
template <typename Real>
__host__ __device__ static Real next(Real here, Real west, Real east, Real north, Real south, Real power)
{
    return here + Real(across) * (west + east - 2 * here) + Real(along) * (north + south - 2 * here) +
           Real(cooling) * (Real(ambient) - here) + Real(heating) * power;
}

__global__ static void step(const float *from, const float *power, float *to, int n)
{
    // The block's cells and a border of one.
    __shared__ float cell[10][34];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
    for (int i = threadIdx.y * 32 + threadIdx.x; i < 340; i += 256) {
        int cx = int(blockIdx.x * 32) + i % 34 - 1, cy = int(blockIdx.y * 8) + i / 34 - 1;
        cx = cx < 0 ? 0 : cx >= n ? n - 1 : cx;
        cy = cy < 0 ? 0 : cy >= n ? n - 1 : cy;
        cell[i / 34][i % 34] = from[size_t(cy) * n + cx];
    }
    __syncthreads();
    if (x >= n || y >= n)
        return;
    int cx = threadIdx.x + 1, cy = threadIdx.y + 1;
    size_t at = size_t(y) * n + x;
    to[at] = next(cell[cy][cx], cell[cy][cx - 1], cell[cy][cx + 1], cell[cy - 1][cx], cell[cy + 1][cx], power[at]);
}

static Shape shape(size_t bytes)
{
    size_t n = square_side(bytes / 2 / sizeof(float)), grid = n * n * sizeof(float);
    return {n, {grid, grid}, grid, grid};
}

static void fill(const Shape &s, int input, char *bytes)
{
    input == 0 ? fill_floats(bytes, s.n * s.n, 20, 70, 90) : fill_floats(bytes, s.n * s.n, 21, 0, 10);
}

static void compute(const Shape &s, const Buffers &b)
{
    int n = int(s.n);
    const float *from = b.in<float>(0);
    for (int i = 0; i < steps; i++) {
        float *to = i % 2 ? b.out<float>() : static_cast<float *>(b.scratch);
        spinio::launch(step, dim3(blocks(n, 32), blocks(n, 8)), dim3(32, 8), from, b.in<float>(1), to, n);
        from = to;
    }
}

static Verdict check(const Shape &s, const Files &f)
{
    size_t n = s.n;
    const float *power = f.in<float>(1), *out = f.out<float>();
    std::vector<float> now(f.in<float>(0), f.in<float>(0) + n * n), then(n * n);
    for (int i = 0; i < steps; i++) {
        parallel(n, [&, n, power](size_t begin, size_t end) {
            for (size_t y = begin; y < end; y++)
                for (size_t x = 0; x < n; x++) {
                    const float *row = &now[y * n];
                    float north = now[(y ? y - 1 : 0) * n + x], south = now[std::min(y + 1, n - 1) * n + x];
                    then[y * n + x] = next(row[x], row[x ? x - 1 : 0], row[std::min(x + 1, n - 1)], north, south, power[y * n + x]);
                }
        });
        now.swap(then);
    }
    return judged(n * n, [&](size_t begin, size_t end) {
        Verdict v;
        for (size_t i = begin; i < end; i++)
            v.near(out[i], now[i], 1e-5);
        return v;
    });
}

static Register registered({"hotspot", "Rodinia", "temperatures of a chip", 1024, shape, fill, compute, check});
