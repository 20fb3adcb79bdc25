/* Maps of a file in the order of streams: acquire, GPU work and release without a wait of the CPU between them.
 *
 *     LD_PRELOAD=libspinio.so maps FILE      below a GAIA mount; it is replaced
 *
 * And a file of four times the device memory that maps may have.
 *
 * Copies and memsets take the place of GPU kernels: this is built without nvcc. A hang ends after two minutes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spinio.h>
#include <spinio_gaia.h>

#define GPU_MORE(F)                                                                                                    \
    F(cuMemcpyDtoHAsync_v2, (void *, gpu_ptr, size_t, void *))                                                         \
    F(cuStreamCreateWithPriority, (void **, unsigned, int))
#include "../../benches/common/gpu.h"
#include "../../benches/common/preloaded.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: check failed: %s (%s; %s)\n", __FILE__, __LINE__, #condition, strerror(errno),              \
                   FIND(spinio_last_error)());                                                                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* More streams than a GPU has channels. */
enum { PAGE = 4096, PAGES = 512, SIZE = PAGES * PAGE, STREAMS = 24, ROUNDS = 30, COPY = 256 << 10, BIG = 64 << 20 };

static int fd;
static unsigned char *map, *pinned;
static gpu_ptr base, big;
/* The calls wait: work of the driver's fake is never behind, and with few channels nothing runs beside a stopped stream. */
static int waits;

static gpu_ptr at(size_t offset) { return base + offset; }
static int acquire(size_t offset, size_t size, void *stream)
{
    return FIND(spinio_gaia_acquire_async)(map + offset, size, SPINIO_GAIA_WRITE, stream);
}
static int release(size_t offset, size_t size, void *stream, ssize_t *published)
{
    return FIND(spinio_gaia_release_async)(map + offset, size, 0, stream, published);
}

static unsigned char byte(off_t offset)
{
    unsigned char byte;
    CHECK(pread(fd, &byte, 1, offset) == 1);
    return byte;
}

static void write_later(void *unused)
{
    (void)unused;
    usleep(100000);
    if (pwrite(fd, "\x32", 1, 1) != 1)
        abort();
}

/* The acquire sees what was written while the stream was not there yet, the release what earlier work has stored. */
static void order(void *stream)
{
    static volatile ssize_t published;
    CHECK(pwrite(fd, "\7\7\7", 3, 0) == 3);
    published = -1000;
    pinned[0] = 0;
    GPU(cuLaunchHostFunc(stream, write_later, NULL));
    CHECK(acquire(0, SIZE, stream) == 0);
    GPU(cuMemcpyDtoHAsync_v2(pinned, at(1), 1, stream));
    for (int i = 0; i < 20; i++)
        GPU(cuMemsetD8Async(big, i, BIG, stream));
    GPU(cuMemsetD8Async(at(0), 100, 1, stream));
    CHECK(release(0, SIZE, stream, (ssize_t *)&published) == 0);
    GPU(cuMemsetD8Async(at(2), 9, 1, stream));
    CHECK(waits ? published == PAGE : published == -1000);
    GPU(cuStreamSynchronize(stream));
    CHECK(pinned[0] == 50 && published == PAGE && byte(0) == 100 && byte(1) == 50 && byte(2) == 7);
    CHECK(FIND(spinio_gaia_acquire)(map, SIZE, SPINIO_GAIA_WRITE) == SIZE);
    CHECK(FIND(spinio_gaia_release)(map, SIZE, SPINIO_GAIA_DISCARD) == 0);
}

/* Each stream has a page of its own, and copies that wait behind its stops, as the GPU's copy engines do. */
static void many(void **streams)
{
    for (int round = 1; round <= ROUNDS; round++)
        for (int i = 0; i < STREAMS; i++) {
            CHECK(acquire((size_t)i * PAGE, PAGE, streams[i]) == 0);
            GPU(cuMemcpyHtoDAsync_v2(big + (size_t)i * COPY, pinned, COPY, streams[i]));
            GPU(cuMemsetD8Async(at((size_t)i * PAGE + 10), round, 3, streams[i]));
            GPU(cuMemcpyDtoHAsync_v2(pinned + COPY + i, at((size_t)i * PAGE + 10), 1, streams[i]));
            CHECK(release((size_t)i * PAGE, PAGE, streams[i], NULL) == 0);
        }
    for (int i = 0; i < STREAMS; i++) {
        GPU(cuStreamSynchronize(streams[i]));
        CHECK(pinned[COPY + i] == ROUNDS && byte(i * PAGE + 10) == ROUNDS && byte(i * PAGE + 13) == 0);
    }
    CHECK(FIND(spinio_gaia_sync)(map, SIZE) == 0);
}

static void failures(void *stream)
{
    ssize_t first = 0, second = 0, third = 0;
    CHECK(release(0, PAGE, stream, &first) == 0);
    GPU(cuStreamSynchronize(stream));
    CHECK(first == -EINVAL);
    CHECK(acquire(0, PAGE, stream) == -1 && errno == EINVAL && strstr(FIND(spinio_last_error)(), "earlier release"));
    CHECK(acquire(0, PAGE, stream) == 0 && release(0, PAGE, stream, &second) == 0);
    GPU(cuStreamSynchronize(stream));
    CHECK(second == 0);
    CHECK(acquire(0, SIZE + 1, stream) == -1 && errno == EINVAL);

    void *graph, *captured;
    GPU(cuStreamCreate(&captured, 1));
    GPU(cuStreamBeginCapture_v2(captured, 2));
    CHECK(acquire(0, PAGE, captured) == -1 && errno == EBUSY);
    CHECK(release(0, PAGE, captured, &third) == -1 && errno == EBUSY && third == 0);
    GPU(cuStreamEndCapture(captured, &graph));
    GPU(cuGraphDestroy(graph));
}

/* Unmapping, which frees memory, waits for what is queued on this map and on others. */
static void unmap(void **streams, int other)
{
    ssize_t published[STREAMS], in_other = 0;
    unsigned char *second = FIND(spinio_gaia_map)(other, 0, PAGE, SPINIO_GAIA_WRITE);
    CHECK(second);
    for (int i = 0; i < STREAMS; i++) {
        CHECK(acquire((size_t)i * PAGE, PAGE, streams[i]) == 0);
        GPU(cuMemsetD8Async(big, 1, BIG, streams[i]));
        GPU(cuMemsetD8Async(at((size_t)i * PAGE), 200, 1, streams[i]));
        CHECK(release((size_t)i * PAGE, PAGE, streams[i], &published[i]) == 0);
    }
    CHECK(FIND(spinio_gaia_acquire_async)(second, PAGE, SPINIO_GAIA_WRITE, streams[0]) == 0);
    CHECK(FIND(spinio_gaia_release_async)(second, PAGE, 0, streams[0], &in_other) == 0);
    CHECK(FIND(spinio_gaia_unmap)(map) == 0);
    for (int i = 0; i < STREAMS; i++)
        CHECK(published[i] == PAGE && byte(i * PAGE) == 200);
    CHECK(FIND(spinio_gaia_unmap)(second) == 0 && in_other == 0);
}

/* In a process of its own, since the library reads its limit when it is loaded. */
static int evict(const char *name)
{
    enum { LIMIT = 64 << 20, FILE_SIZE = 4 * LIMIT, WINDOW = 20 << 20 };
    struct spinio_gaia_info info;
    unsigned char *content = malloc(FILE_SIZE), *now = malloc(FILE_SIZE);
    void *stream;
    fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && content && now);
    for (size_t i = 0; i < FILE_SIZE; i++)
        content[i] = (unsigned char)(i * 7 % 251);
    for (size_t done = 0; done < FILE_SIZE;) {
        ssize_t n = pwrite(fd, content + done, FILE_SIZE - done, (off_t)done);
        CHECK(n > 0);
        done += (size_t)n;
    }
    gpu_open();
    GPU(cuStreamCreate(&stream, 1));
    unsigned char *whole = FIND(spinio_gaia_map)(fd, 0, FILE_SIZE, SPINIO_GAIA_WRITE);
    CHECK(whole);
    map = whole, base = (gpu_ptr)(uintptr_t)whole;
    CHECK(FIND(spinio_gaia_acquire)(whole, FILE_SIZE, SPINIO_GAIA_READ) == -1 && errno == ENOMEM);
    /* Windows that begin and end inside of chunks: read, then written, waiting and in stream order. */
    for (int round = 0; round < 3; round++)
        for (size_t first = 0; first < FILE_SIZE; first += WINDOW) {
            size_t size = FILE_SIZE - first < WINDOW ? FILE_SIZE - first : WINDOW;
            if (round == 2) {
                CHECK(acquire(first, size, stream) == 0);
                GPU(cuMemsetD8Async(at(first), 200, 1, stream));
                GPU(cuMemsetD8Async(at(first + size - 1), 201, 1, stream));
                CHECK(release(first, size, stream, NULL) == 0);
                content[first] = 200, content[first + size - 1] = 201;
                continue;
            }
            int access = round == 0 ? SPINIO_GAIA_READ : SPINIO_GAIA_WRITE;
            CHECK(FIND(spinio_gaia_acquire)(whole + first, size, access) == (ssize_t)size);
            GPU(cuMemcpyDtoH_v2(now, at(first), size));
            CHECK(memcmp(now, content + first, size) == 0);
            if (round == 1) {
                GPU(cuMemsetD8Async(at(first + size / 2), 202, 3, stream));
                GPU(cuStreamSynchronize(stream));
                memset(content + first + size / 2, 202, 3);
            }
            CHECK(FIND(spinio_gaia_release)(whole + first, size, 0) >= 0);
            CHECK(FIND(spinio_gaia_info)(whole, &info, sizeof info) == 0 && info.device_bytes <= LIMIT);
        }
    CHECK(FIND(spinio_gaia_sync)(whole, FILE_SIZE) == 0);
    for (size_t done = 0; done < FILE_SIZE;) {
        ssize_t n = pread(fd, now + done, FILE_SIZE - done, (off_t)done);
        CHECK(n > 0);
        done += (size_t)n;
    }
    CHECK(memcmp(now, content, FILE_SIZE) == 0);
    CHECK(FIND(spinio_gaia_info)(whole, &info, sizeof info) == 0 && info.chunks_evicted >= 3 * (FILE_SIZE - LIMIT) / (8 << 20) / 2);
    /* What is in use stays, and one release makes room. */
    CHECK(FIND(spinio_gaia_acquire)(whole, LIMIT, SPINIO_GAIA_READ) == LIMIT);
    CHECK(FIND(spinio_gaia_acquire)(whole + LIMIT, 1, SPINIO_GAIA_READ) == -1 && errno == ENOMEM);
    CHECK(FIND(spinio_gaia_release)(whole, LIMIT, 0) == 0);
    CHECK(FIND(spinio_gaia_acquire)(whole + LIMIT, 1, SPINIO_GAIA_READ) == 1);
    CHECK(FIND(spinio_gaia_advise)(whole, FILE_SIZE, SPINIO_GAIA_DONTNEED) == 0);
    CHECK(FIND(spinio_gaia_info)(whole, &info, sizeof info) == 0 && info.device_bytes == 0);
    CHECK(FIND(spinio_gaia_unmap)(whole) == 0);
    puts("ok    eviction");
    return 0;
}

static void evict_in_child(char *program, char *name)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        setenv("SPINIO_GAIA_MEMORY", "64M", 1);
        execl("/proc/self/exe", program, name, "evict", (char *)NULL);
        _exit(127);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void map_file(void)
{
    map = FIND(spinio_gaia_map)(fd, 0, SIZE, SPINIO_GAIA_WRITE);
    CHECK(map);
    base = (gpu_ptr)(uintptr_t)map;
}

int main(int argc, char **argv)
{
    char name[100] = "";
    void *streams[STREAMS], *highest;
    if (argc < 2)
        return fprintf(stderr, "%s FILE\n", argv[0]), 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    alarm(120);
    if (argc == 3)
        return evict(argv[1]);
    /* Before this process uses CUDA. */
    evict_in_child(argv[0], argv[1]);
    gpu_open();
    GPU(cuDeviceGetName(name, sizeof name, gpu.device));
    const char *channels = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    waits = strncmp(name, "Fake", 4) == 0 || (channels && atoi(channels) < 8);
    fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0);
    map_file();
    GPU(cuMemAlloc_v2(&big, BIG));
    GPU(cuMemHostAlloc((void **)&pinned, COPY + PAGE, 0));
    /* Streams that wait for the default stream, and that do not; and the default streams. */
    for (int i = 2; i < STREAMS; i++)
        GPU(cuStreamCreate(&streams[i], i % 2));
    GPU(cuStreamCreateWithPriority(&highest, 1, -100));
    streams[0] = NULL, streams[1] = (void *)2;
    for (int i = 0; i < 4; i++)
        order(streams[i]);
    puts("ok    order");
    many(streams);
    puts("ok    many streams");
    failures(streams[3]);
    puts("ok    failures");
    unmap(streams, fd);
    puts("ok    unmap");
    /* The library's own stream has this priority too. */
    map_file();
    for (int i = 0; i < 5; i++)
        order(highest);
    CHECK(FIND(spinio_gaia_unmap)(map) == 0);
    puts("ok    highest priority");
    return 0;
}
