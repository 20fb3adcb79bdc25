// k-means: points of 16 floats into 8 clusters, a few rounds, as in Rodinia and Mars. Input: points; output: the
// cluster of each, and the centres.
#include "harness/program.h"

static constexpr int wide = 16, clusters = 8, rounds = 3;

// The accumulators of a round: sums of coordinates, then counts.
static constexpr int sums = clusters * wide, words = sums + clusters;

__global__ static void clear(float *total)
{
    if (threadIdx.x < words)
        total[threadIdx.x] = 0;
}

__global__ static void choose_first(const float *points, float *centres)
{
    centres[threadIdx.x] = points[threadIdx.x];
}

// Finds the nearest centre of each point, and adds the point to that cluster's accumulators.
__global__ static void assign(const float *points, const float *centres, int *labels, float *total, int n)
{
    __shared__ float centre[sums], part[words];
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        part[i] = 0;
        if (i < sums)
            centre[i] = centres[i];
    }
    __syncthreads();
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += gridDim.x * blockDim.x) {
        float point[wide], best = 0;
        int nearest = -1;
        for (int d = 0; d < wide; d++)
            point[d] = points[size_t(at) * wide + d];
        for (int c = 0; c < clusters; c++) {
            float far = 0;
            for (int d = 0; d < wide; d++)
                far += (point[d] - centre[c * wide + d]) * (point[d] - centre[c * wide + d]);
            if (nearest < 0 || far < best) {
                nearest = c;
                best = far;
            }
        }
        labels[at] = nearest;
        for (int d = 0; d < wide; d++)
            atomicAdd(&part[nearest * wide + d], point[d]);
        atomicAdd(&part[sums + nearest], 1.0f);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        atomicAdd(&total[i], part[i]);
}

// A cluster that lost all its points keeps its centre.
__global__ static void move_centres(const float *total, float *centres)
{
    float count = total[sums + threadIdx.x / wide];
    if (count > 0)
        centres[threadIdx.x] = total[threadIdx.x] / count;
}

static Shape shape(size_t bytes)
{
    size_t n = std::max<size_t>(bytes / (wide * sizeof(float)), clusters);
    return {n, {n * wide * sizeof(float)}, n * sizeof(int) + sums * sizeof(float), words * sizeof(float)};
}

static void fill(const Shape &s, int, char *bytes)
{
    auto out = reinterpret_cast<float *>(bytes);
    parallel(s.n, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) {
            // The first points, which are the first centres, come from different clusters.
            uint64_t cluster = i < clusters ? i : mixed(i ^ 30ull << 40) % clusters;
            for (size_t d = 0; d < wide; d++)
                out[i * wide + d] = 10 * fraction(cluster * wide + d) + 2 * fraction(31ull << 40 ^ (i * wide + d));
        }
    });
}

static void compute(const Shape &s, const Buffers &b)
{
    int *labels = b.out<int>(), n = int(s.n);
    auto centres = reinterpret_cast<float *>(labels + s.n), total = static_cast<float *>(b.scratch);
    spinio::launch(choose_first, 1, sums, b.in<float>(0), centres);
    for (int i = 0; i < rounds; i++) {
        spinio::launch(clear, 1, 256, total);
        spinio::launch(assign, std::min(blocks(n, 256), 1056u), 256, b.in<float>(0), (const float *)centres, labels, total, n);
        spinio::launch(move_centres, 1, sums, (const float *)total, centres);
    }
}

static double distance(const float *point, const double *centre)
{
    double far = 0;
    for (int d = 0; d < wide; d++)
        far += (point[d] - centre[d]) * (point[d] - centre[d]);
    return far;
}

static int nearest(const float *point, const std::vector<double> &centres)
{
    int best = 0;
    for (int c = 1; c < clusters; c++)
        if (distance(point, &centres[c * wide]) < distance(point, &centres[best * wide]))
            best = c;
    return best;
}

static Verdict check(const Shape &s, const Files &f)
{
    const float *points = f.in<float>(0);
    const int *labels = f.out<int>();
    auto got = reinterpret_cast<const float *>(labels + s.n);
    std::vector<double> centres(points, points + sums), before;
    for (int i = 0; i < rounds; i++) {
        before = centres;
        std::vector<std::vector<double>> parts;
        size_t slice = s.n / std::max(1u, std::thread::hardware_concurrency()) + 1;
        parts.resize((s.n + slice - 1) / slice, std::vector<double>(words));
        parallel(parts.size(), [&](size_t begin, size_t end) {
            for (size_t part = begin; part < end; part++)
                for (size_t at = part * slice; at < std::min((part + 1) * slice, s.n); at++) {
                    int c = nearest(points + at * wide, before);
                    for (int d = 0; d < wide; d++)
                        parts[part][c * wide + d] += points[at * wide + d];
                    parts[part][sums + c]++;
                }
        });
        for (int w = 0; w < sums; w++) {
            double sum = 0, count = 0;
            for (auto &part : parts) {
                sum += part[w];
                count += part[sums + w / wide];
            }
            if (count > 0)
                centres[w] = sum / count;
        }
    }
    Verdict v = judged(s.n, [&](size_t begin, size_t end) {
        Verdict v;
        for (size_t at = begin; at < end; at++) {
            // Half-way between two centres, either is correct.
            const float *point = points + at * wide;
            int c = labels[at];
            double best = distance(point, &before[nearest(point, before) * wide]);
            v.add(c >= 0 && c < clusters && distance(point, &before[c * wide]) <= best * (1 + 1e-3) + 1e-3);
        }
        return v;
    });
    for (int w = 0; w < sums; w++)
        v.near(got[w], centres[w], 5e-3);
    return v;
}

static Register registered({"kmeans", "Mars", "k-means clustering of points", 512, shape, fill, compute, check});
