// MM: the product of two matrices of floats, as in PolyBench. Two input files, an output half as large as both
// together.
#include "harness/matrix.h"

static Shape shape(size_t bytes)
{
    size_t n = square_side(bytes / 2 / sizeof(float)), matrix = n * n * sizeof(float);
    return {n, {matrix, matrix}, matrix};
}

static void fill(const Shape &s, int input, char *bytes)
{
    fill_floats(bytes, s.n * s.n, 3 + input, 0, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    launch_multiply(b.in<float>(0), b.in<float>(1), nullptr, b.out<float>(), int(s.n), 1, 0);
}

static Verdict check(const Shape &s, const Files &f)
{
    return check_multiply(f.in<float>(0), f.in<float>(1), nullptr, f.out<float>(), s.n, 1, 0);
}

static Register registered({"mm", "PolyBench", "product of two matrices", 512, shape, fill, compute, check});
