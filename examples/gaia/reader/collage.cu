// A collage: each block of a picture becomes the most similar tile of a gallery, a file that may be larger than the memory
// of the device. The kernel reads the tiles that it needs on demand, and which these are only the kernel knows.
//
//     collage GALLERY PICTURE OUTPUT CACHE PAGE
//
// PICTURE and OUTPUT are PPM files; CACHE, in bytes, is the device memory for pages of PAGE bytes. The same kernel then
// works on all of the gallery in device memory, read by spinio_pread(). Both are compared with a computation on the CPU.
// Prints
//
//     blocks, different tiles in the collage, wrong blocks of both ways,
//     bytes read on demand, microseconds of it, bytes of the gallery, microseconds of reading all of it and of the kernel
//
// Exit status: 0 done, whatever was compared; 1 an error (message on stderr); 2 usage.
#include <spinio.h>
#include <spinio_gaia.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "collage.h"

static constexpr unsigned BLOCK = spinio::emulated ? 32 : 128, GRID = spinio::emulated ? 4 : 132;

[[noreturn]] static void fail(const char *what, const char *why)
{
    std::fprintf(stderr, "%s: %s\n", what, why);
    std::exit(1);
}

// For calls of SPIN and of CUDA.
static void check(bool right, const char *what)
{
    if (!right)
        fail(what, spinio_last_error());
}

struct Picture {
    unsigned columns, rows; // of blocks; what is left at the right and below is cut off
    std::vector<uint32_t> pixels;
};

static Picture read_picture(const char *path)
{
    FILE *in = std::fopen(path, "rb");
    unsigned width, height, most;
    if (!in || std::fscanf(in, "P6 %u %u %u", &width, &height, &most) != 3 || std::fgetc(in) == EOF)
        fail(path, "no PPM picture (P6)");
    if (most != 255 || width < SIDE || height < SIDE || width > 1 << 15 || height > 1 << 15)
        fail(path, "not 32 to 32768 pixels wide and high, of 3 bytes each");
    std::vector<unsigned char> bytes(size_t(width) * height * 3);
    if (std::fread(bytes.data(), 1, bytes.size(), in) != bytes.size())
        fail(path, "the picture is not complete");
    std::fclose(in);
    Picture picture = {width / SIDE, height / SIDE, {}};
    for (size_t y = 0; y < picture.rows * size_t(SIDE); y++)
        for (size_t x = 0; x < picture.columns * size_t(SIDE); x++) {
            const unsigned char *from = &bytes[(y * width + x) * 3];
            picture.pixels.push_back(uint32_t(from[0]) | uint32_t(from[1]) << 8 | uint32_t(from[2]) << 16);
        }
    return picture;
}

static void write_picture(const char *path, const Picture &picture)
{
    FILE *out = std::fopen(path, "wb");
    bool good = out && std::fprintf(out, "P6\n%u %u\n255\n", picture.columns * SIDE, picture.rows * SIDE) > 0;
    for (uint32_t pixel : picture.pixels)
        for (int c = 0; c < 3; c++)
            good = good && std::fputc(int(pixel >> 8 * c & 255), out) != EOF;
    if (!good || std::fclose(out) != 0) {
        std::perror(path);
        std::exit(1);
    }
}

// What the kernels must find: the tile of a block.
static uint32_t best_tile(const gallery &g, const uint32_t *file, const Picture &picture, unsigned block)
{
    std::vector<uint32_t> pixels;
    color_sum sum = {{0, 0, 0}};
    for (unsigned i = 0; i < PIXELS; i++) {
        size_t y = block / picture.columns * SIDE + i / SIDE, x = block % picture.columns * SIDE + i % SIDE;
        pixels.push_back(picture.pixels[y * picture.columns * SIDE + x]);
        add_pixel(&sum, pixels.back());
    }
    uint32_t best = ~0u, least = ~0u;
    const uint32_t *index = file + INDEX_AT + bucket_of(&sum);
    for (uint32_t tile = index[0]; tile < index[1]; tile++) {
        uint32_t difference = 0;
        for (unsigned i = 0; i < PIXELS; i++)
            difference += distance(file[tile_at(&g, tile) + i], pixels[i]);
        if (difference < least) {
            least = difference;
            best = tile;
        }
    }
    return best;
}

// The device memory of one run, and its results.
struct Run {
    uint32_t *picture, *output, *chosen;
    unsigned *failed;
    std::vector<uint32_t> pixels, tiles;

    explicit Run(const Picture &from) : pixels(from.pixels.size()), tiles(size_t(from.columns) * from.rows)
    {
        size_t bytes = pixels.size() * 4;
        unsigned zero = 0;
        bool good = !cudaMalloc(&picture, bytes) && !cudaMalloc(&output, bytes) && !cudaMalloc(&chosen, tiles.size() * 4) &&
                    !cudaMalloc(&failed, 4) && !cudaMemcpy(picture, from.pixels.data(), bytes, cudaMemcpyHostToDevice) &&
                    !cudaMemcpy(output, pixels.data(), bytes, cudaMemcpyHostToDevice) &&
                    !cudaMemcpy(failed, &zero, 4, cudaMemcpyHostToDevice);
        check(good, "device memory");
    }

    template <typename Gallery>
    void make(const Gallery &file, const gallery &g, unsigned columns)
    {
        spinio::launch(make_collage<Gallery>, GRID, BLOCK, file, g, static_cast<const uint32_t *>(picture), columns,
                       unsigned(tiles.size()), output, chosen, failed);
        // Before any copy: the reader's threads copy while the kernel runs.
        check(!cudaGetLastError() && !cudaDeviceSynchronize(), "kernel");
    }

    // Blocks with another tile than the CPU has found, or other pixels than that tile's.
    unsigned wrong(const gallery &g, const uint32_t *file, const std::vector<uint32_t> &right, unsigned columns)
    {
        bool good = !cudaMemcpy(pixels.data(), output, pixels.size() * 4, cudaMemcpyDeviceToHost) &&
                    !cudaMemcpy(tiles.data(), chosen, tiles.size() * 4, cudaMemcpyDeviceToHost);
        check(good, "copy");
        unsigned wrong = 0;
        for (unsigned block = 0; block < tiles.size(); block++) {
            bool same = tiles[block] == right[block];
            for (unsigned i = 0; same && i < PIXELS; i++) {
                size_t y = block / columns * SIDE + i / SIDE, x = block % columns * SIDE + i % SIDE;
                same = pixels[y * columns * SIDE + x] == file[tile_at(&g, right[block]) + i];
            }
            wrong += !same;
        }
        return wrong;
    }
};

int main(int argc, char **argv)
{
    if (argc != 6) {
        std::fprintf(stderr, "usage: %s GALLERY PICTURE OUTPUT CACHE PAGE\n", argv[0]);
        return 2;
    }
    // A kernel that is loaded while another one waits for the CPU would wait for it. Before the first call of CUDA.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    int fd = open(argv[1], O_RDONLY);
    struct stat st;
    gallery g;
    if (fd < 0 || fstat(fd, &st) != 0 || pread(fd, &g, sizeof g, 0) != ssize_t(sizeof g)) {
        std::perror(argv[1]);
        return 1;
    }
    size_t size = size_t(st.st_size);
    if (g.magic != GALLERY_MAGIC || size < g.tiles_at + g.tiles * uint64_t(TILE_BYTES))
        fail(argv[1], "not a gallery");
    Picture picture = read_picture(argv[2]);
    // The first call of a program puts the device to use.
    if (cudaDeviceSynchronize())
        fail("device", "there is none");
    auto now = [] { return std::chrono::steady_clock::now(); };
    auto microseconds = [](auto from, auto to) {
        return (long long)std::chrono::duration_cast<std::chrono::microseconds>(to - from).count();
    };

    Run demand(picture), whole(picture);
    auto begun = now();
    struct spinio_gaia_reader file;
    check(spinio_gaia_reader_open(fd, std::strtoull(argv[4], nullptr, 10), unsigned(std::strtoul(argv[5], nullptr, 10)),
                                  SPINIO_GAIA_RANDOM, &file) == 0, "reader");
    demand.make(OnDemand(file), g, picture.columns);
    auto made = now();
    struct spinio_gaia_reader_stats stats;
    check(spinio_gaia_reader_stats(&file, &stats, sizeof stats) == 0 && spinio_gaia_reader_close(&file) == 0, "reader");

    uint32_t *all;
    check(!cudaMalloc(&all, size), "device memory");
    auto before = now();
    check(spinio_pread(fd, all, size, 0) == ssize_t(size), "read");
    auto read = now();
    whole.make(InMemory(all), g, picture.columns);
    auto done = now();

    auto *bytes = static_cast<const uint32_t *>(mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0));
    if (bytes == MAP_FAILED) {
        std::perror(argv[1]);
        return 1;
    }
    std::vector<uint32_t> right;
    for (unsigned block = 0; block < picture.columns * picture.rows; block++)
        right.push_back(best_tile(g, bytes, picture, block));
    unsigned wrong = demand.wrong(g, bytes, right, picture.columns), other = whole.wrong(g, bytes, right, picture.columns);
    picture.pixels = demand.pixels;
    write_picture(argv[3], picture);
    std::printf("%zu %zu %u %u %llu %lld %zu %lld %lld\n", right.size(), std::set<uint32_t>(right.begin(), right.end()).size(),
                wrong, other, (unsigned long long)stats.bytes, microseconds(begun, made), size, microseconds(before, read),
                microseconds(read, done));
    return 0;
}
