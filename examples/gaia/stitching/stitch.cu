// GPU kernels that stitch their tiles into the picture, while a CPU program and other GPUs stitch theirs.
//
//     stitch TILES PICTURE WRITER WRITERS
//
// Prints `ready` after an acquire of the whole picture and waits for a line on stdin, so that all writers change the
// same pages from the same state on. After the release it prints its number of tiles, microseconds, bytes published,
// pages published, and how many of these others had changed meanwhile. Exit status: 0 done, 1 an error (message on
// stderr), 2 usage.
#include <spinio.h>
#include <spinio_gaia.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stitch.h"

static int fail(const char *what)
{
    std::fprintf(stderr, "%s: %s\n", what, spinio_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        std::fprintf(stderr, "usage: %s TILES PICTURE WRITER WRITERS\n", argv[0]);
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    Work work = {};
    work.writer = std::atoi(argv[3]);
    work.writers = std::atoi(argv[4]);
    int in = open(argv[1], O_RDONLY), fd = open(argv[2], O_RDWR);
    struct stat st;
    if (in < 0 || pread(in, &work.t, sizeof work.t, 0) != ssize_t(sizeof work.t) || work.t.magic != TILES_MAGIC) {
        std::fprintf(stderr, "%s: no tiles\n", argv[1]);
        return 1;
    }
    if (fd < 0 || fstat(fd, &st) != 0) {
        std::perror(argv[2]);
        return 1;
    }
    // The first call of a program puts the device to use.
    if (cudaDeviceSynchronize()) {
        std::fprintf(stderr, "no device\n");
        return 1;
    }
    size_t count = size_t(work.t.columns) * work.t.rows, bytes = overview_bytes(&work.t) + tiles_bytes(&work.t);
    unsigned char *images;
    if (cudaMalloc(&images, bytes) || cudaMalloc(&work.differences, count * POSITIONS * sizeof(unsigned)) ||
        cudaMalloc(&work.found, count * sizeof(unsigned)))
        return fail("memory");
    if (spinio_pread(in, images, bytes, sizeof work.t) != ssize_t(bytes))
        return fail("read");
    work.overview = images;
    work.images = images + overview_bytes(&work.t);

    size_t size = st.st_size, head = size - picture_bytes(&work.t);
    auto *file = static_cast<unsigned char *>(spinio_gaia_map(fd, 0, size, SPINIO_GAIA_WRITE));
    if (!file)
        return fail("map");
    if (spinio_gaia_acquire(file, size, SPINIO_GAIA_WRITE) < 0)
        return fail("acquire");
    char line[16];
    std::puts("ready");
    if (!std::fgets(line, sizeof line, stdin))
        return 1;
    auto begun = std::chrono::steady_clock::now();
    for (;;) {
        if (!stitch(work, file + head))
            return fail("kernels");
        if (spinio_gaia_release(file, size, 0) >= 0)
            break;
        // The server was restarted in the epoch: nothing was published, and it is done again.
        if (errno != ESTALE)
            return fail("release");
        while (spinio_gaia_acquire(file, size, SPINIO_GAIA_WRITE) < 0)
            if (errno != ESTALE)
                return fail("acquire");
    }
    auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun).count();
    struct spinio_gaia_info info;
    if (spinio_gaia_info(file, &info, sizeof info) != 0)
        return fail("info");
    unsigned mine = 0;
    for (unsigned tile = 0; tile < count; tile++)
        mine += writer_of(&work.t, tile, work.writers) == work.writer;
    std::printf("%u %lld %llu %llu %llu\n", mine, (long long)took, (unsigned long long)info.bytes_published,
                (unsigned long long)info.pages_committed, (unsigned long long)info.pages_merged);
    return spinio_gaia_unmap(file) == 0 ? 0 : fail("unmap");
}
