// program.h: the description of one of the twelve programs, and shared functions.
//
//   make     fill the input files                      (once)
//   run      files -> device, kernels, device -> file  (the measured part; move.h has the two modes)
//   check    the output file against a CPU reference   (once for each mode)
//
// A program is one file: kernels, reference, and a `Program` that names them. It does not depend on how its bytes are
// moved.
#ifndef PROGRAM_H
#define PROGRAM_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <spinio/kernel.h>

// Dimensions of a problem, and the sizes in bytes that follow from them.
struct Shape {
    size_t n = 0;               // the program's own
    std::vector<size_t> inputs; // bytes of each input file
    size_t output = 0;          // bytes of the output file
    size_t scratch = 0;         // bytes of additional device memory
};

// Device memory during a run.
struct Buffers {
    std::vector<void *> inputs;
    void *output, *scratch;

    template <typename T>
    const T *in(int i) const
    {
        return static_cast<const T *>(inputs[i]);
    }
    template <typename T>
    T *out() const
    {
        return static_cast<T *>(output);
    }
};

// Host copies of the files during a check.
struct Files {
    std::vector<std::vector<char>> inputs;
    std::vector<char> output;

    template <typename T>
    const T *in(int i) const
    {
        return reinterpret_cast<const T *>(inputs[i].data());
    }
    template <typename T>
    const T *out() const
    {
        return reinterpret_cast<const T *>(output.data());
    }
};

// The result of a check.
struct Verdict {
    size_t checked = 0, wrong = 0;

    void add(bool right)
    {
        checked++;
        wrong += !right;
    }
    void near(double got, double expected, double tolerance)
    {
        add(std::abs(got - expected) <= tolerance * std::max(1.0, std::abs(expected)));
    }
    void add(const Verdict &other)
    {
        checked += other.checked;
        wrong += other.wrong;
    }
};

struct Program {
    const char *name, *suite, *about;
    size_t mib; // input for a measurement on a large GPU
    Shape (*shape)(size_t bytes);
    void (*fill)(const Shape &, int input, char *bytes);
    void (*compute)(const Shape &, const Buffers &);
    Verdict (*check)(const Shape &, const Files &);
};

// All programs that are linked in.
inline std::vector<Program> &programs()
{
    static std::vector<Program> all;
    return all;
}

struct Register {
    explicit Register(const Program &program)
    {
        programs().push_back(program);
    }
};

// ---- CPU side

// Calls part(begin, end) for slices of 0..n on all processors; slices are multiples of `unit`.
template <typename Part>
void parallel(size_t n, Part part, size_t unit = 1)
{
    size_t workers = std::max(1u, std::thread::hardware_concurrency());
    size_t slice = (n / workers / unit + 1) * unit;
    std::vector<std::thread> threads;
    for (size_t begin = 0; begin < n; begin += slice)
        threads.emplace_back([=] { part(begin, std::min(begin + slice, n)); });
    for (auto &thread : threads)
        thread.join();
}

// As `parallel`, and adds up the results of the slices.
template <typename Part>
Verdict judged(size_t n, Part part)
{
    size_t workers = std::max(1u, std::thread::hardware_concurrency()), slice = n / workers + 1;
    std::vector<Verdict> verdicts((n + slice - 1) / slice);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < verdicts.size(); i++)
        threads.emplace_back([&, i] { verdicts[i] = part(i * slice, std::min((i + 1) * slice, n)); });
    Verdict all;
    for (size_t i = 0; i < verdicts.size(); i++) {
        threads[i].join();
        all.add(verdicts[i]);
    }
    return all;
}

// A pseudo-random number that depends only on its position.
inline uint64_t mixed(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// In [0, 1).
inline float fraction(uint64_t x)
{
    return float(mixed(x) >> 40) * 0x1p-24f;
}

// Floats in [low, high).
inline void fill_floats(char *bytes, size_t count, uint64_t seed, float low, float high)
{
    auto out = reinterpret_cast<float *>(bytes);
    parallel(count, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++)
            out[i] = low + (high - low) * fraction(seed << 40 ^ i);
    });
}

// Side of the largest square, or cube, of at most that many elements.
inline size_t square_side(size_t elements)
{
    size_t n = size_t(std::sqrt(double(elements)));
    return std::max<size_t>(n, 4);
}

inline size_t cube_side(size_t elements)
{
    size_t n = size_t(std::cbrt(double(elements)));
    return std::max<size_t>(n, 4);
}

// Rows to check where the reference is too slow for all: all rows if they are few, else `most` rows far apart.
inline std::vector<size_t> sample(size_t rows, size_t most)
{
    std::vector<size_t> some;
    for (size_t i = 0; i < std::min(rows, most); i++)
        some.push_back(rows <= most ? i : i * (rows - 1) / (most - 1));
    return some;
}

// The number of blocks of `threads` that cover n.
inline unsigned blocks(size_t n, unsigned threads)
{
    return unsigned((n + threads - 1) / threads);
}

#endif
