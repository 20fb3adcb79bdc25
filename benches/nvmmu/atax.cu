// ATAX: y = Aᵀ(A x), as in PolyBench. Input: a large matrix and a vector; output: a vector.
#include "harness/matrix.h"

static Shape shape(size_t bytes)
{
    size_t n = square_side(bytes / sizeof(float)), vector = n * sizeof(float);
    return {n, {n * vector, vector}, vector, vector};
}

static void fill(const Shape &s, int input, char *bytes)
{
    // Rows add up to about 1.
    input == 0 ? fill_floats(bytes, s.n * s.n, 10, 0, 2 / float(s.n)) : fill_floats(bytes, s.n, 11, 0, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    auto half_way = static_cast<float *>(b.scratch);
    launch_times_vector(b.in<float>(0), b.in<float>(1), half_way, int(s.n));
    launch_transposed_times_vector(b.in<float>(0), half_way, b.out<float>(), int(s.n));
}

static Verdict check(const Shape &s, const Files &f)
{
    const float *a = f.in<float>(0);
    return compared(f.out<float>(), transposed_times(a, times(a, widened(f.in<float>(1), s.n), s.n), s.n));
}

static Register registered({"atax", "PolyBench", "transposed matrix times matrix times vector", 1024, shape, fill, compute, check});
