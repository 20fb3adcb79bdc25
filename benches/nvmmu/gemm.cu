// GEMM: C = alpha A B + beta C on matrices of floats, as in PolyBench. Three input files, one output.
#include "harness/matrix.h"

static constexpr float alpha = 0.75f, beta = -0.5f;

static Shape shape(size_t bytes)
{
    size_t n = square_side(bytes / 3 / sizeof(float)), matrix = n * n * sizeof(float);
    return {n, {matrix, matrix, matrix}, matrix};
}

static void fill(const Shape &s, int input, char *bytes)
{
    fill_floats(bytes, s.n * s.n, 6 + input, 0, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    launch_multiply(b.in<float>(0), b.in<float>(1), b.in<float>(2), b.out<float>(), int(s.n), alpha, beta);
}

static Verdict check(const Shape &s, const Files &f)
{
    return check_multiply(f.in<float>(0), f.in<float>(1), f.in<float>(2), f.out<float>(), s.n, alpha, beta);
}

static Register registered({"gemm", "PolyBench", "alpha A B + beta C of matrices", 768, shape, fill, compute, check});
