// string match: the positions of some keys in a text, as in Mars. Input: text; output: for each byte, the keys that
// begin there.
#include "harness/text.h"

static constexpr int keys = 4, longest = 16;

struct Keys {
    char text[keys][longest];
    int length[keys];
};

static const Keys wanted = {{"page cache", "storage of", "kernel", "direct\nx"}, {10, 10, 6, 8}};

__global__ static void search(const char *text, unsigned char *found, size_t n, Keys wanted)
{
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= n)
        return;
    unsigned char here = 0;
    for (int k = 0; k < keys; k++) {
        int i = 0;
        while (i < wanted.length[k] && at + i < n && text[at + i] == wanted.text[k][i])
            i++;
        if (i == wanted.length[k])
            here |= 1 << k;
    }
    found[at] = here;
}

static Shape shape(size_t bytes)
{
    return {bytes, {bytes}, bytes};
}

static void fill(const Shape &s, int, char *bytes)
{
    fill_text(bytes, s.n, [](size_t number, char *line) {
        size_t length = 0;
        for (uint64_t i = 0; length < 48; i++)
            length += size_t(std::snprintf(line + length, 64 - length, "%s ", word(mixed(number * 32 + i))));
        return length;
    });
}

static void compute(const Shape &s, const Buffers &b)
{
    spinio::launch(search, blocks(s.n, 256), 256, b.in<char>(0), b.out<unsigned char>(), s.n, wanted);
}

static Verdict check(const Shape &s, const Files &f)
{
    const char *text = f.in<char>(0);
    auto out = f.out<unsigned char>();
    std::vector<unsigned char> expected(s.n);
    for (int k = 0; k < keys; k++) {
        size_t length = size_t(wanted.length[k]);
        const char *at = text, *end = text + s.n;
        while ((at = static_cast<const char *>(memmem(at, size_t(end - at), wanted.text[k], length))))
            expected[size_t(at++ - text)] |= 1 << k;
    }
    return judged(s.n, [&](size_t begin, size_t end) {
        Verdict v;
        for (size_t at = begin; at < end; at++)
            v.add(out[at] == expected[at]);
        return v;
    });
}

static Register registered({"stringmatch", "Mars", "places of keys in a text", 512, shape, fill, compute, check});
