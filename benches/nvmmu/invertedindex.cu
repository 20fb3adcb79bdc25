// inverted index: the positions of page links in a collection of HTML, as in Mars. Input: text; output: for each of
// 4096 classes of addresses the positions of its links: beginnings of the classes, then the positions, then 0xffffffff.
#include "harness/text.h"

static constexpr unsigned classes = 4096, nothing = ~0u;

// The class of the link that begins at a byte, `classes` if none does.
__device__ static unsigned link_class(const char *text, size_t at, size_t n)
{
    const char *tag = "<a href=\"";
    for (int i = 0; i < 9; i++)
        if (at + i >= n || text[at + i] != tag[i])
            return classes;
    unsigned hash = 2166136261u;
    for (size_t i = at + 9; i < n && text[i] != '"'; i++)
        hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    return hash % classes;
}

__global__ static void clear(unsigned *count, unsigned *places, size_t most)
{
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < classes)
        count[at] = 0;
    if (at < most)
        places[at] = nothing;
}

__global__ static void count_links(const char *text, size_t n, unsigned *count)
{
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned c = at < n ? link_class(text, at, n) : classes;
    if (c < classes)
        atomicAdd(&count[c], 1u);
}

// Prefix sum, counts to beginnings: one block, four classes per thread.
__global__ static void add_up(unsigned *count, unsigned *begin)
{
    __shared__ unsigned sum[1024];
    unsigned mine[4], total = 0, t = threadIdx.x;
    for (unsigned i = 0; i < 4; i++) {
        mine[i] = total;
        total += count[t * 4 + i];
    }
    sum[t] = total;
    __syncthreads();
    for (unsigned far = 1; far < 1024; far *= 2) {
        unsigned before = t >= far ? sum[t - far] : 0;
        __syncthreads();
        sum[t] += before;
        __syncthreads();
    }
    unsigned first = sum[t] - total;
    for (unsigned i = 0; i < 4; i++)
        begin[t * 4 + i] = count[t * 4 + i] = first + mine[i];
    if (t == 1023)
        begin[classes] = sum[t];
}

// `next`: the next free position of each class.
__global__ static void write_places(const char *text, size_t n, unsigned *next, unsigned *places)
{
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned c = at < n ? link_class(text, at, n) : classes;
    if (c < classes)
        places[atomicAdd(&next[c], 1u)] = unsigned(at);
}

static Shape shape(size_t bytes)
{
    // A line of 64 bytes has at most one link.
    size_t most = bytes / 64 + 1;
    return {bytes, {bytes}, (classes + 1 + most) * sizeof(unsigned), classes * sizeof(unsigned)};
}

static void fill(const Shape &s, int, char *bytes)
{
    fill_text(bytes, s.n, [](size_t number, char *line) {
        uint64_t chance = mixed(number ^ 50ull << 40);
        if (chance % 4)
            return size_t(std::snprintf(line, 64, "<p>%s %s %s</p>", word(chance >> 8), word(chance >> 16), word(chance >> 24)));
        return size_t(std::snprintf(line, 64, "<a href=\"http://site%u.example/page%u\">%s</a>", unsigned(chance >> 8) % 999,
                                    unsigned(chance >> 24) % 97, word(chance >> 32)));
    });
}

static void compute(const Shape &s, const Buffers &b)
{
    auto text = b.in<char>(0);
    unsigned *begin = b.out<unsigned>(), *places = begin + classes + 1, *count = static_cast<unsigned *>(b.scratch);
    size_t most = s.output / sizeof(unsigned) - classes - 1;
    spinio::launch(clear, blocks(std::max<size_t>(most, classes), 256), 256, count, places, most);
    spinio::launch(count_links, blocks(s.n, 256), 256, text, s.n, count);
    spinio::launch(add_up, 1, 1024, count, begin);
    spinio::launch(write_places, blocks(s.n, 256), 256, text, s.n, count, places);
}

static Verdict check(const Shape &s, const Files &f)
{
    std::vector<std::vector<unsigned>> expected(classes);
    const std::string tag = "<a href=\"";
    const char *text = f.in<char>(0), *end = text + s.n, *at = text;
    while ((at = static_cast<const char *>(memmem(at, size_t(end - at), tag.data(), tag.size())))) {
        const char *address = at + tag.size();
        auto quote = static_cast<const char *>(memchr(address, '"', size_t(end - address)));
        unsigned hash = 2166136261u;
        for (const char *c = address; c < (quote ? quote : end); c++)
            hash = (hash ^ (unsigned char)*c) * 16777619u;
        expected[hash % classes].push_back(unsigned(at++ - text));
    }
    const unsigned *begin = f.out<unsigned>(), *places = begin + classes + 1;
    size_t most = s.output / sizeof(unsigned) - classes - 1, links = 0;
    Verdict v;
    for (unsigned c = 0; c < classes; c++) {
        bool there = begin[c] == links && begin[c] + expected[c].size() <= most;
        v.add(there);
        if (!there)
            break;
        // Within a class the order depends on thread scheduling.
        std::vector<unsigned> got(places + links, places + links + expected[c].size());
        std::sort(got.begin(), got.end());
        v.add(got == expected[c]);
        links += expected[c].size();
    }
    v.add(begin[classes] == links);
    for (size_t i = links; i < most; i++)
        v.add(places[i] == nothing);
    return v;
}

static Register registered({"invertedindex", "Mars", "links of HTML by their address", 512, shape, fill, compute, check});
