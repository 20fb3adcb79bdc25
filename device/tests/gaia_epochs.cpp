// The scopes of <spinio/gaia.h> on a file of a mount: what they publish, what they drop, and what they throw. Prints each failure and
// exits with 1.
//
//   gaia_epochs FILE      at least 3 pages, below a mount
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include <spinio/gaia.h>

#define CHECK_CAUSE spinio_last_error()
#include "check.h"

constexpr size_t page = 4096, pages = 3;

// One byte in each page.
__global__ void mark(unsigned char *map, unsigned char value) { map[threadIdx.x * page + 7] = value; }

// The byte of a page in the file, as another program sees it.
static int seen(int fd, size_t at)
{
    unsigned char byte = 0;
    CHECK(pread(fd, &byte, 1, off_t(at * page + 7)) == 1);
    return byte;
}

static bool all_are(int fd, int value) { return seen(fd, 0) == value && seen(fd, 1) == value && seen(fd, 2) == value; }

static void released_epochs_publish(int fd, unsigned char *map)
{
    gaia::epoch epoch(map, pages * page, SPINIO_GAIA_WRITE);
    CHECK(epoch.bytes == pages * page);
    spinio::launch(mark, 1, 3, map, 11);
    CHECK(!all_are(fd, 11));
    CHECK(epoch.release() == pages * page);
    CHECK(all_are(fd, 11));
}

static void epochs_that_are_left_early_drop_their_stores(int fd, unsigned char *map)
{
    try {
        gaia::epoch epoch(map, pages * page, SPINIO_GAIA_WRITE);
        spinio::launch(mark, 1, 3, map, 22);
        throw 5;
    } catch (int) {
    }
    CHECK(all_are(fd, 11));
    // The next one begins with what the file has, not with what was dropped.
    gaia::epoch epoch(map, pages * page, SPINIO_GAIA_WRITE);
    spinio::launch(mark, 1, 1, map, 33);
    CHECK(epoch.release() == page);
    CHECK(seen(fd, 0) == 33 && seen(fd, 1) == 11 && seen(fd, 2) == 11);
}

static void errors_are_thrown_with_number_and_sentence(int fd, unsigned char *map)
{
    auto *reads = static_cast<unsigned char *>(spinio_gaia_map(fd, 0, pages * page, SPINIO_GAIA_READ));
    CHECK(reads);
    auto thrown = [](auto act) {
        try {
            act();
        } catch (const gaia::error &error) {
            CHECK(std::strlen(error.what()) > 10);
            return error.number;
        }
        return 0;
    };
    CHECK(thrown([&] { gaia::epoch epoch(reads, page, SPINIO_GAIA_WRITE); }) == EACCES);
    CHECK(thrown([&] { gaia::stream_epoch epoch(reads, page, SPINIO_GAIA_WRITE, nullptr); }) == EACCES);
    CHECK(thrown([&] { gaia::epoch epoch(&failures, page, SPINIO_GAIA_READ); }) == EINVAL);
    CHECK(thrown([&] {
              gaia::epoch epoch(map, page, SPINIO_GAIA_WRITE);
              CHECK(epoch.release() == 0);
              epoch.release();
          }) == EINVAL);
    CHECK(spinio_gaia_unmap(reads) == 0);
}

static void scopes_of_a_stream_are_in_its_order(int fd, unsigned char *map)
{
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    ssize_t published = 0, dropped = 1;
    {
        gaia::stream_epoch epoch(map, pages * page, SPINIO_GAIA_WRITE, stream, &published);
        spinio::launch_on(stream, mark, 1, 3, map, 44);
    }
    {
        gaia::stream_epoch epoch(map, pages * page, SPINIO_GAIA_WRITE, stream, &dropped);
        spinio::launch_on(stream, mark, 1, 3, map, 55);
        epoch.discard();
    }
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(published == ssize_t(pages * page) && dropped == 0);
    CHECK(all_are(fd, 44));
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

int main(int count, char **arguments)
{
    const int fd = count == 2 ? open(arguments[1], O_RDWR) : -1;
    CHECK(fd >= 0);
    cudaStream_t first;
    CHECK(cudaStreamCreate(&first) == cudaSuccess); // a device is in use from now on
    auto *map = static_cast<unsigned char *>(spinio_gaia_map(fd, 0, pages * page, SPINIO_GAIA_WRITE));
    CHECK(map);
    if (failures)
        return 1;
    released_epochs_publish(fd, map);
    epochs_that_are_left_early_drop_their_stores(fd, map);
    errors_are_thrown_with_number_and_sentence(fd, map);
    scopes_of_a_stream_are_in_its_order(fd, map);
    CHECK(spinio_gaia_unmap(map) == 0);
    return failures != 0;
}
