// GPU kernels that update their cells of a file which CPU programs and other GPUs are updating too.
//
//     update FILE WRITER ROUNDS
//
// Each round is one epoch: acquire, a kernel that loads and stores the file, release. Waits for a line on stdin before
// each round, so that all writers of the file go on together, and prints `round=N` after it. At the end of stdin a kernel
// compares the whole file with what all writers should have made of it. Then counters are printed as `name=value`.
// Exit status: 0 done, 1 an error (message on stderr), 2 usage.
#include <spinio.h>
#include <spinio/kernel.h>
#include <spinio_gaia.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cells.h"

__global__ void update(unsigned long long *file, size_t cells, unsigned writer, unsigned long long by)
{
    size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * WRITERS + writer;
    if (i < cells)
        file[i] += by;
}

// Counts the cells that are not as all writers should have left them.
__global__ void compare(const unsigned long long *file, size_t cells, unsigned rounds, unsigned long long *wrong)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < cells && file[i] != cell_after(i, rounds))
        atomicAdd(wrong, 1ull);
}

static int fail(const char *what)
{
    std::fprintf(stderr, "%s: %s\n", what, spinio_last_error());
    return 1;
}

enum { STALE = -1 };

// One epoch. STALE: the server was restarted in it, nothing was published, and it can be done again.
static int epoch(unsigned long long *file, size_t cells, unsigned writer)
{
    size_t size = cells * sizeof *file;
    if (spinio_gaia_acquire(file, size, SPINIO_GAIA_WRITE) < 0)
        return errno == ESTALE ? int(STALE) : fail("acquire");
    unsigned blocks = unsigned(((cells + WRITERS - 1) / WRITERS + 255) / 256);
    spinio::launch(update, blocks, 256, file, cells, writer, increment(writer));
    if (cudaGetLastError() || cudaDeviceSynchronize())
        return fail("kernel");
    if (spinio_gaia_release(file, size, 0) < 0)
        return errno == ESTALE ? int(STALE) : fail("release");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s FILE WRITER ROUNDS\n", argv[0]);
        return 2;
    }
    unsigned writer = std::atoi(argv[2]), rounds = std::atoi(argv[3]), lost = 0;
    std::setvbuf(stdout, nullptr, _IOLBF, 0);

    int fd = open(argv[1], O_RDWR);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        std::perror(argv[1]);
        return 1;
    }
    // The first call of a program puts the device to use.
    if (cudaDeviceSynchronize()) {
        std::fprintf(stderr, "no device\n");
        return 1;
    }
    size_t size = st.st_size, cells = size / sizeof(unsigned long long);
    auto *file = static_cast<unsigned long long *>(spinio_gaia_map(fd, 0, size, SPINIO_GAIA_WRITE));
    if (!file)
        return fail("map");
    char line[16];
    for (unsigned round = 1; round <= rounds && std::fgets(line, sizeof line, stdin); round++) {
        int done;
        while ((done = epoch(file, cells, writer)) == STALE)
            lost++;
        if (done != 0)
            return done;
        std::printf("round=%u\n", round);
    }
    while (std::fgets(line, sizeof line, stdin))
        ;
    unsigned long long *wrong, zero = 0, count;
    if (spinio_gaia_acquire(file, size, SPINIO_GAIA_READ) < 0)
        return fail("acquire");
    if (cudaMalloc(&wrong, sizeof *wrong) || cudaMemcpy(wrong, &zero, sizeof zero, cudaMemcpyHostToDevice))
        return fail("memory");
    spinio::launch(compare, unsigned((cells + 255) / 256), 256, file, cells, rounds, wrong);
    if (cudaMemcpy(&count, wrong, sizeof count, cudaMemcpyDeviceToHost) || cudaFree(wrong))
        return fail("compare");
    struct spinio_gaia_info info;
    if (spinio_gaia_info(file, &info, sizeof info) != 0)
        return fail("info");
    const struct {
        const char *name;
        unsigned long long value;
    } counters[] = {
        {"acquires", info.acquires},
        {"releases", info.releases},
        {"bytes_from_file", info.bytes_from_file},
        {"bytes_from_snapshots", info.bytes_from_snapshots},
        {"bytes_published", info.bytes_published},
        {"pages_committed", info.pages_committed},
        {"pages_merged", info.pages_merged},
        {"reattached", info.reattached},
        {"releases_recovered", info.releases_recovered},
        {"epochs_lost", lost},
        {"wrong_cells", count},
    };
    for (const auto &counter : counters)
        std::printf("%s=%llu\n", counter.name, counter.value);
    return spinio_gaia_unmap(file) == 0 ? 0 : fail("unmap");
}
