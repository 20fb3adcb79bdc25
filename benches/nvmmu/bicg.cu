// BICG: q = A p and s = Aᵀ r, as in PolyBench. Input: a large matrix and two vectors; output: two vectors.
#include "harness/matrix.h"

static Shape shape(size_t bytes)
{
    size_t n = square_side(bytes / sizeof(float)), vector = n * sizeof(float);
    return {n, {n * vector, vector, vector}, 2 * vector};
}

static void fill(const Shape &s, int input, char *bytes)
{
    // Rows add up to about 1.
    input == 0 ? fill_floats(bytes, s.n * s.n, 12, 0, 2 / float(s.n)) : fill_floats(bytes, s.n, 12 + input, 0, 1);
}

static void compute(const Shape &s, const Buffers &b)
{
    launch_times_vector(b.in<float>(0), b.in<float>(1), b.out<float>(), int(s.n));
    launch_transposed_times_vector(b.in<float>(0), b.in<float>(2), b.out<float>() + s.n, int(s.n));
}

static Verdict check(const Shape &s, const Files &f)
{
    Verdict v = compared(f.out<float>(), times(f.in<float>(0), widened(f.in<float>(1), s.n), s.n));
    v.add(compared(f.out<float>() + s.n, transposed_times(f.in<float>(0), widened(f.in<float>(2), s.n), s.n)));
    return v;
}

static Register registered({"bicg", "PolyBench", "matrix and transposed matrix times vectors", 1024, shape, fill, compute, check});
