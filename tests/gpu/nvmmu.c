/* NVMMU on a GPU: moves, stream-ordered moves, the pipeline. Prints each failure and exits with 1.
 *
 *     LD_PRELOAD=libspinio.so nvmmu FOLDER
 *
 * A device-to-device copy takes the place of a GPU kernel: this is built without nvcc. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <nvmmu.h>
#include <spinio.h>

#include "../../benches/common/gpu.h"
#include "../../benches/common/preloaded.h"

static int failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: check failed: %s (%s; %s)\n", __FILE__, __LINE__, #condition, strerror(errno),                    \
                   FIND(spinio_last_error)());                                                                         \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (0)

enum { SIZE = (200 << 20) + 12345, PIECE = 30 << 20 };

static unsigned char *host, *back;
static char input[4096], output[4096];
static gpu_ptr one, two;

static int output_is_right(size_t size)
{
    int fd = open(output, O_RDONLY);
    size_t got = 0;
    for (ssize_t n; got < size && (n = pread(fd, back + got, size - got, (off_t)got)) > 0;)
        got += (size_t)n;
    int right = got == size && lseek(fd, 0, SEEK_END) == (off_t)size && !memcmp(host, back, size);
    close(fd);
    unlink(output);
    return right;
}

static void moves(void)
{
    for (int round = 0; round < 2; round++) {
        CHECK(FIND(nvmmuBegin)(1, output) == 1);
        CHECK(FIND(nvmmuMove)(input, (void *)one, 0, SIZE, H2D) == SIZE);
        GPU(cuMemcpyDtoDAsync_v2(two, one, SIZE, NULL));
        CHECK(FIND(nvmmuMove)(output, (void *)two, 0, SIZE, D2H) == SIZE);
        CHECK(FIND(nvmmuEnd)(1) == 1);
        CHECK(output_is_right(SIZE));
    }
}

static void stream_ordered_moves(void)
{
    /* A download is deferred only as far as the bounce buffers suffice. */
    const size_t size = 100 << 20;
    struct nvmmu_ticket *up, *down;
    void *stream;
    GPU(cuStreamCreate(&stream, 1));
    CHECK(FIND(nvmmuBegin)(1, output) == 1);
    for (int round = 0; round < 3; round++) {
        CHECK(FIND(nvmmu_move_async)(input, (void *)one, 0, (int64_t)size, H2D, stream, &up) == 0);
        GPU(cuMemcpyDtoDAsync_v2(two, one, size, stream));
        GPU(cuMemsetD8Async(one, 0, size, stream));
        CHECK(FIND(nvmmu_move_async)(output, (void *)two, 0, (int64_t)size, D2H, stream, &down) == 0);
        GPU(cuMemsetD8Async(two, 0, size, stream));
        CHECK(FIND(nvmmu_wait)(down) == (int64_t)size && FIND(nvmmu_wait)(up) == (int64_t)size);
        /* Work that waits for the device waits for the file moves too, and for nothing else. */
        CHECK(FIND(nvmmu_move_async)(input, (void *)one, 0, (int64_t)size, H2D, stream, NULL) == 0);
        gpu_ptr other;
        GPU(cuMemAlloc_v2(&other, 1 << 20));
        GPU(cuMemFree_v2(other));
        GPU(cuCtxSynchronize());
    }
    CHECK(FIND(nvmmuEnd)(1) == 1);
    CHECK(output_is_right(size));
}

static int64_t copy(const struct nvmmu_step *step, void *unused)
{
    (void)unused;
    GPU(cuMemcpyDtoDAsync_v2((gpu_ptr)step->slot.output, (gpu_ptr)step->slot.input, step->length, step->slot.stream));
    return (int64_t)step->length;
}

static void pipeline(void)
{
    struct nvmmu_slot slots[3];
    for (int i = 0; i < 3; i++) {
        slots[i].input = (void *)(one + (gpu_ptr)i * PIECE);
        slots[i].output = (void *)(two + (gpu_ptr)i * PIECE);
        GPU(cuStreamCreate(&slots[i].stream, 1));
    }
    struct nvmmu_pieces through = {input, 0, SIZE, PIECE, output, 0};
    CHECK(FIND(nvmmuBegin)(1, output) == 1);
    CHECK(FIND(nvmmu_pipeline)(&through, slots, 3, copy, NULL) == SIZE);
    CHECK(FIND(nvmmuEnd)(1) == 1);
    CHECK(output_is_right(SIZE));
}

static void errors(void)
{
    CHECK(FIND(nvmmu_move)(input, (void *)one, 0, 10, H2D) == -1 && errno == ESRCH);
    CHECK(FIND(nvmmu_begin)(1, NULL) == 0);
    CHECK(FIND(nvmmu_move)(input, host, 0, 10, H2D) == -1 && errno == EFAULT);
    CHECK(FIND(nvmmu_move)(input, (void *)(two + SIZE - 5), 0, 10, H2D) == -1 && errno == EFAULT);
    CHECK(FIND(nvmmu_end)(1, NULL, 0) == 0);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return fprintf(stderr, "nvmmu FOLDER\n"), 2;
    gpu_open();
    snprintf(input, sizeof input, "%s/nvmmu.in", argv[1]);
    snprintf(output, sizeof output, "%s/nvmmu.out", argv[1]);
    host = malloc(SIZE);
    back = malloc(SIZE);
    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 11);
    int fd = open(input, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (size_t put = 0; put < SIZE;) {
        ssize_t n = write(fd, host + put, SIZE - put);
        if (n <= 0)
            return perror(input), 1;
        put += (size_t)n;
    }
    close(fd);
    GPU(cuMemAlloc_v2(&one, SIZE));
    GPU(cuMemAlloc_v2(&two, SIZE));
    moves();
    stream_ordered_moves();
    pipeline();
    errors();
    unlink(input);
    return failures != 0;
}
