// matrix.h: products of square matrices of floats, with each other and with vectors, for the four programs that need
// them.
#ifndef MATRIX_H
#define MATRIX_H

#include "program.h"

// ---- C = alpha A B + beta C0, tile by tile through shared memory

static constexpr int tile = 32;

[[maybe_unused]] __global__ static void multiply(const float *a, const float *b, const float *c0, float *c, int n, float alpha, float beta)
{
    __shared__ float left[tile][tile], above[tile][tile + 1];
    int x = blockIdx.x * tile + threadIdx.x, y = blockIdx.y * tile + threadIdx.y;
    float sum = 0;
    for (int at = 0; at < n; at += tile) {
        int ax = at + threadIdx.x, by = at + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = y < n && ax < n ? a[size_t(y) * n + ax] : 0;
        above[threadIdx.y][threadIdx.x] = x < n && by < n ? b[size_t(by) * n + x] : 0;
        __syncthreads();
        for (int i = 0; i < tile; i++)
            sum += left[threadIdx.y][i] * above[i][threadIdx.x];
        __syncthreads();
    }
    if (x < n && y < n)
        c[size_t(y) * n + x] = alpha * sum + (c0 ? beta * c0[size_t(y) * n + x] : 0);
}

static inline void launch_multiply(const float *a, const float *b, const float *c0, float *c, int n, float alpha, float beta)
{
    spinio::launch(multiply, dim3(blocks(n, tile), blocks(n, tile)), dim3(tile, tile), a, b, c0, c, n, alpha, beta);
}

static inline std::vector<double> times(const float *a, const std::vector<double> &x, size_t n)
{
    std::vector<double> out(n);
    parallel(n, [&, a, n](size_t begin, size_t end) {
        for (size_t y = begin; y < end; y++)
            for (size_t i = 0; i < n; i++)
                out[y] += a[y * n + i] * x[i];
    });
    return out;
}

// Checks the whole product on the CPU: C s = alpha A (B s) + beta C0 s, where s is a vector of signs. The rounding
// error grows with n to the power of 1.5; the error of a lost page of A or C is hundreds of times as large, of B mostly
// several times.
static inline Verdict check_signed_sums(const float *a, const float *b, const float *c0, const float *c, size_t n, float alpha, float beta)
{
    std::vector<double> signs(n);
    for (size_t i = 0; i < n; i++)
        signs[i] = mixed(i ^ 70ull << 40) & 1 ? 1 : -1;
    std::vector<double> got = times(c, signs, n), expected = times(a, times(b, signs, n), n);
    std::vector<double> before = c0 ? times(c0, signs, n) : std::vector<double>(n);
    double tolerance = 4e-6 * std::max(1.0, std::abs(double(alpha))) * double(n) * std::sqrt(double(n));
    Verdict v;
    for (size_t y = 0; y < n; y++)
        v.add(std::abs(got[y] - (alpha * expected[y] + beta * before[y])) <= tolerance);
    return v;
}

// The check above, and some rows compared number by number.
static inline Verdict check_multiply(const float *a, const float *b, const float *c0, const float *c, size_t n, float alpha, float beta)
{
    std::vector<size_t> rows = sample(n, 48);
    Verdict all = check_signed_sums(a, b, c0, c, n, alpha, beta);
    all.add(judged(rows.size(), [=](size_t begin, size_t end) {
        Verdict v;
        std::vector<double> sum(n);
        for (size_t r = begin; r < end; r++) {
            size_t y = rows[r];
            std::fill(sum.begin(), sum.end(), 0.0);
            for (size_t i = 0; i < n; i++)
                for (size_t x = 0; x < n; x++)
                    sum[x] += double(a[y * n + i]) * b[i * n + x];
            for (size_t x = 0; x < n; x++)
                v.near(c[y * n + x], alpha * sum[x] + (c0 ? beta * c0[y * n + x] : 0), 1e-3);
        }
        return v;
    }));
    return all;
}

// ---- A x and Aᵀ x

// One block per row: its threads add up slices of the row.
[[maybe_unused]] __global__ static void times_vector(const float *a, const float *x, float *out, int n)
{
    __shared__ float part[256];
    const float *row = a + size_t(blockIdx.x) * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        sum += row[i] * x[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (int(threadIdx.x) < half)
            part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = part[0];
}

// One thread per column, a block of rows at a time; the caller has zeroed `out`.
static constexpr int rows_at_once = 256;

[[maybe_unused]] __global__ static void transposed_times_vector(const float *a, const float *x, float *out, int n)
{
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int first = blockIdx.y * rows_at_once, last = first + rows_at_once < n ? first + rows_at_once : n;
    if (column >= n)
        return;
    float sum = 0;
    for (int row = first; row < last; row++)
        sum += a[size_t(row) * n + column] * x[row];
    atomicAdd(&out[column], sum);
}

[[maybe_unused]] __global__ static void zero(float *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = 0;
}

static inline void launch_times_vector(const float *a, const float *x, float *out, int n)
{
    spinio::launch(times_vector, n, 256, a, x, out, n);
}

static inline void launch_transposed_times_vector(const float *a, const float *x, float *out, int n)
{
    spinio::launch(zero, blocks(n, 256), 256, out, n);
    spinio::launch(transposed_times_vector, dim3(blocks(n, 256), blocks(n, rows_at_once)), dim3(256), a, x, out, n);
}

static inline std::vector<double> transposed_times(const float *a, const std::vector<double> &x, size_t n)
{
    std::vector<double> out(n);
    // Split by columns, so that no two threads add to the same sum; 16 columns are a cache line.
    parallel(n, [&, a, n](size_t begin, size_t end) {
        for (size_t y = 0; y < n; y++)
            for (size_t i = begin; i < end; i++)
                out[i] += a[y * n + i] * x[y];
    }, 16);
    return out;
}

static inline std::vector<double> widened(const float *x, size_t n)
{
    return {x, x + n};
}

static inline Verdict compared(const float *got, const std::vector<double> &expected)
{
    // Each is about 0.5, with a rounding error of about 2e-7. A lost page of the largest matrix changes it by 3e-5.
    Verdict v;
    for (size_t i = 0; i < expected.size(); i++)
        v.near(got[i], expected[i], 5e-6);
    return v;
}

#endif
