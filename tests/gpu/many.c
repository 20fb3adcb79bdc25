/* Batches and pinned files on a GPU, under LD_PRELOAD=libspinio.so.
 *
 *   many SCRATCH [name...] [-name...]      as the suite
 */
#define GPU_MORE(F) F(cuMemcpy, (gpu_ptr, gpu_ptr, size_t))
#include "harness.h"

struct piece {
    int fd;
    unsigned reserved;
    uint64_t offset, size;
    gpu_ptr buffer;
    int64_t result;
};

static ssize_t (*spinio_batch)(struct piece *, size_t);
static ssize_t (*spinio_batch_fixed)(int, const uint64_t *, size_t, gpu_ptr, int64_t *, size_t);
static void *(*spinio_batch_submit)(struct piece *, size_t);
static ssize_t (*spinio_batch_wait)(void *);
static int (*spinio_pin_file)(int), (*spinio_unpin_file)(int), (*spinio_is_pinned)(int), (*spinio_map_revoked)(gpu_ptr), (*spinio_unmap)(gpu_ptr);
static gpu_ptr (*spinio_map)(int, off_t, size_t, unsigned);

static void open_all(void) {
    gpu_open();
#define F(name) check((*(void **)&name = dlsym(RTLD_DEFAULT, #name)) != NULL, "no " #name);
    F(spinio_batch) F(spinio_batch_fixed) F(spinio_batch_submit) F(spinio_batch_wait) F(spinio_pin_file) F(spinio_unpin_file)
    F(spinio_is_pinned) F(spinio_map_revoked) F(spinio_unmap) F(spinio_map)
#undef F
}

enum { PIECES = 3000, AREA = 40 << 20 };
static struct piece piece[PIECES];

/* Reads of any size, offset and address; their destinations do not overlap. */
static size_t choose_reads(int from, gpu_ptr at, size_t longest) {
    size_t to = 0, n = 0;
    for (; n < PIECES; n++) {
        size_t size = random_below(3) == 0 ? 512 : random_below(2) ? 4096 : 1 + random_below(longest);
        if (to + size + 64 > AREA)
            break;
        to += random_below(2) ? 16 - to % 16 : random_below(20);
        off_t offset = random_below(2) ? random_below(FILE_SIZE / 512) * 512 : random_below(FILE_SIZE);
        piece[n] = (struct piece){.fd = from, .offset = offset, .size = size, .buffer = at + to};
        to += size;
    }
    return n;
}

/* Each read has the file's bytes, and all bytes between them are unchanged. */
static void compare(gpu_ptr at, size_t n, const char *of, const char *what) {
    char *now = back(at, AREA);
    size_t end = 0;
    for (size_t i = 0; i < n; i++) {
        size_t to = piece[i].buffer - at, left = FILE_SIZE - piece[i].offset;
        size_t size = piece[i].size < left ? piece[i].size : left;
        check(piece[i].result == (int64_t)size, "%s: read %zu of %zu bytes at %lld returned %lld", what, i, size, (long long)piece[i].offset, (long long)piece[i].result);
        check(all(now + end, to - end, 0xee), "%s: bytes before read %zu changed", what, i);
        check(memcmp(now + to, of + piece[i].offset, size) == 0, "%s: wrong bytes in read %zu: %zu at %lld", what, i, size, (long long)piece[i].offset);
        end = to + size;
    }
    check(all(now + end, AREA - end, 0xee), "%s: bytes after the last read changed", what);
}

static void one_batch(int from, gpu_ptr at, const char *of, const char *what) {
    size_t n = choose_reads(from, at, random_below(2) ? 9000 : 300 * KIB);
    GPU(cuMemsetD8_v2(at, 0xee, AREA));
    GPU(cuCtxSynchronize());
    check(spinio_batch(piece, n) > 0, "%s: spinio_batch", what);
    compare(at, n, of, what);
}

static void test_batches(void) {
    gpu_ptr at = device(AREA);
    for (int i = 0; i < 12; i++) {
        if (i % 4 == 3)
            posix_fadvise(fd, 0, FILE_SIZE / (1 + i % 3), POSIX_FADV_DONTNEED);
        one_batch(fd, at, content, i % 4 == 3 ? "partly absent" : "cached");
    }
}

static void test_small_pieces(void) {
    enum { COUNT = 200000, SIZE = 64 };
    gpu_ptr at = device(COUNT * SIZE);
    uint64_t *offset = malloc(COUNT * sizeof *offset);
    for (int cold = 0; cold < 2; cold++) {
        for (int i = 0; i < COUNT; i++)
            offset[i] = random_below(FILE_SIZE - SIZE);
        if (cold)
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        check(spinio_batch_fixed(fd, offset, SIZE, at, NULL, COUNT) == COUNT * SIZE, "spinio_batch_fixed");
        char *now = back(at, COUNT * SIZE);
        for (int i = 0; i < COUNT; i++)
            check(memcmp(now + i * SIZE, content + offset[i], SIZE) == 0, "read %d at %lld, %s", i, (long long)offset[i], cold ? "cold" : "warm");
    }
}

static void test_vectors(void) {
    gpu_ptr at = device(16 * MIB);
    struct iovec v[600];
    for (int round = 0; round < 4; round++) {
        size_t total = 0;
        for (int i = 0; i < 600; i++) {
            v[i] = (struct iovec){(void *)(at + i * 20000), 1 + random_below(19000)};
            total += v[i].iov_len;
        }
        off_t offset = random_below(FILE_SIZE - total);
        if (round == 3)
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        check(preadv(fd, v, 600, offset) == (ssize_t)total, "preadv");
        char *now = back(at, 16 * MIB);
        for (int i = 0; i < 600; offset += v[i++].iov_len)
            check(memcmp(now + i * 20000, content + offset, v[i].iov_len) == 0, "part %d", i);
    }
}

static void test_order_after_earlier_work(void) {
    gpu_ptr big = device(1024 * MIB), at = device(AREA);
    for (int round = 0; round < 6; round++) {
        size_t n = choose_reads(fd, at, 9000);
        for (int i = 0; i < 10; i++) /* a few milliseconds of work, followed by one that covers the buffer */
            GPU(cuMemcpyDtoDAsync_v2(big, big + 512 * MIB, 512 * MIB, NULL));
        GPU(cuMemsetD8Async(at, 0xee, AREA, NULL));
        if (round % 2) {
            check(spinio_batch(piece, n) > 0, "spinio_batch");
        } else {
            void *ticket = spinio_batch_submit(piece, n);
            check(ticket && spinio_batch_wait(ticket) > 0, "spinio_batch_submit");
        }
        compare(at, n, content, "after earlier work");
    }
}

static void test_captures_survive(void) {
    gpu_ptr at = device(AREA), target = device(4096);
    for (int flags = 0; flags < 2; flags++)
        for (int mode = 0; mode < 3; mode++) {
            void *stream, *graph;
            GPU(cuStreamCreate(&stream, flags));
            size_t n = choose_reads(fd, at, 9000);
            GPU(cuMemsetD8_v2(at, 0xee, AREA));
            GPU(cuCtxSynchronize());
            GPU(cuStreamBeginCapture_v2(stream, mode));
            GPU(cuMemsetD8Async(target, 1, 4096, stream));
            check(spinio_batch(piece, n) > 0, "spinio_batch during a capture");
            int code = gpu.cuStreamEndCapture(stream, &graph);
            check(code == 0, "the capture (flags %d, mode %d) was invalidated: %d %s", flags, mode, code, gpu_error(code));
            compare(at, n, content, "during a capture");
            GPU(cuGraphDestroy(graph));
            GPU(cuStreamDestroy_v2(stream));
        }
}

static void test_reset(void) {
    for (int i = 0; i < 3; i++) {
        gpu_ptr at = device(AREA);
        one_batch(fd, at, content, "after a reset");
        GPU(cuDevicePrimaryCtxReset_v2(gpu.device));
        choose_reads(fd, at, 9000);
        spinio_batch(piece, 100);
        check(piece[0].result == -EFAULT, "a read into memory of a destroyed context returned %lld", (long long)piece[0].result);
        GPU(cuDevicePrimaryCtxRetain(&gpu.context, gpu.device));
        GPU(cuCtxSetCurrent(gpu.context));
    }
}

static void *thread_batches(void *p) {
    gpu_ptr at = (gpu_ptr)p; /* this thread has no current context */
    unsigned long my = at;
    enum { COUNT = 2000, SIZE = 1000 };
    uint64_t *offset = malloc(COUNT * sizeof *offset);
    char *now = malloc(COUNT * SIZE);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < COUNT; i++) {
            my = my * 6364136223846793005ul + 1442695040888963407ul;
            offset[i] = (my >> 20) % (FILE_SIZE - SIZE);
        }
        check(spinio_batch_fixed(fd, offset, SIZE, at, NULL, COUNT) == COUNT * SIZE, "a batch in a thread");
        GPU(cuCtxSetCurrent(gpu.context));
        GPU(cuMemcpyDtoH_v2(now, at, COUNT * SIZE));
        for (int i = 0; i < COUNT; i++)
            check(memcmp(now + i * SIZE, content + offset[i], SIZE) == 0, "a read in a thread");
        GPU(cuCtxSetCurrent(NULL));
    }
    return NULL;
}

static void test_threads(void) {
    pthread_t t[6];
    for (int i = 0; i < 6; i++)
        pthread_create(&t[i], NULL, thread_batches, (void *)device(4 * MIB));
    for (int i = 0; i < 6; i++)
        pthread_join(t[i], NULL);
}

/* ---- pinned files ------------------------------------------------------------------------------------------------ */

/* A pinned file of the same random bytes, which no process has open for writing. */
static int new_pinned_file(const char *name) {
    char path[4096];
    int f = new_file(name, O_TRUNC);
    for (size_t done = 0; done < FILE_SIZE;) {
        ssize_t n = pwrite(f, content + done, FILE_SIZE - done, done);
        check(n > 0, "pwrite");
        done += n;
    }
    fsync(f);
    close(f);
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    f = open(path, O_RDONLY | O_CLOEXEC);
    check(f >= 0, "open");
    if (spinio_pin_file(f) && errno == EOPNOTSUPP) {
        printf("    skipped: no leases on this file system\n");
        _exit(0);
    }
    check(spinio_is_pinned(f) == 1, "spinio_pin_file");
    return f;
}

static void test_pinned_file(void) {
    int f = new_pinned_file("held");
    gpu_ptr at = device(AREA);
    for (int i = 0; i < 5; i++) {
        one_batch(f, at, content, "pinned");
        size_t size = 8 * MIB + random_below(24 * MIB);
        off_t offset = random_below(FILE_SIZE - size);
        check(pread(f, (void *)at, size, offset) == (ssize_t)size, "pread");
        check(memcmp(back(at, size), content + offset, size) == 0, "a read of a pinned file");
    }
    /* Another context, and no context. */
    GPU(cuDevicePrimaryCtxReset_v2(gpu.device));
    GPU(cuDevicePrimaryCtxRetain(&gpu.context, gpu.device));
    GPU(cuCtxSetCurrent(gpu.context));
    at = device(AREA);
    one_batch(f, at, content, "pinned, after a reset");
    check(spinio_unpin_file(f) == 0 && spinio_is_pinned(f) == 0, "spinio_unpin_file");
    one_batch(f, at, content, "no longer pinned");
}

static void test_writer_unpins_file(void) {
    int f = new_pinned_file("written");
    gpu_ptr at = device(AREA);
    char path[4096], *other = malloc(FILE_SIZE);
    snprintf(path, sizeof path, "%s/written", scratch);
    for (int i = 0; i < 4; i++) {
        one_batch(f, at, i ? other : content, "before the writer");
        int w = open(path, O_WRONLY); /* waits until the file is unpinned */
        check(w >= 0 && spinio_is_pinned(f) == 0, "the writer's open returns, and the file is not pinned");
        for (size_t k = 0; k < FILE_SIZE; k++)
            other[k] = content[k] ^ (i + 1);
        check(pwrite(w, other, FILE_SIZE, 0) == FILE_SIZE, "pwrite");
        one_batch(f, at, other, "while open for writing");
        errno = 0;
        check(spinio_pin_file(f) == -1 && errno == ETXTBSY, "spinio_pin_file while open for writing");
        close(w);
        check(spinio_pin_file(f) == 0, "pinned again");
        one_batch(f, at, other, "pinned again");
    }
}

static void test_maps(void) {
    int f = new_pinned_file("mapped");
    gpu_ptr map = spinio_map(f, 4096, 32 * MIB, 0), at = device(MIB);
    check(map != 0, "spinio_map");
    GPU(cuMemcpy(at, map + 5 * MIB, MIB));
    check(memcmp(back(at, MIB), content + 4096 + 5 * MIB, MIB) == 0, "bytes of the mapping");
    check(spinio_map_revoked(map) == 0, "no process waits");
    char path[4096];
    snprintf(path, sizeof path, "%s/mapped", scratch);
    pid_t child = fork();
    if (child == 0)
        _exit(open(path, O_WRONLY) < 0);
    while (spinio_map_revoked(map) == 0)
        usleep(1000);
    int status;
    check(waitpid(child, &status, WNOHANG) == 0, "the writer waits for the mapping");
    check(spinio_unmap(map) == 0, "spinio_unmap");
    check(waitpid(child, &status, 0) == child && status == 0, "the writer's open returns");
    errno = 0;
    check(spinio_unmap(map) == -1 && errno == EINVAL, "unmapped once");
}

#define TESTS(T)                                                                                                       \
    T(batches) T(small_pieces) T(vectors) T(order_after_earlier_work) T(captures_survive) T(reset) T(threads) T(pinned_file) \
    T(writer_unpins_file) T(maps)

static const struct test tests[] = {
#define T(name) { #name, test_##name },
    TESTS(T)
#undef T
};

int main(int argc, char **argv) {
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests, open_all);
}
