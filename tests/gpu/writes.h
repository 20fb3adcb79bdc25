/* Writes from GPU memory: tests of suite.c. */
#ifndef WRITES_H
#define WRITES_H

#include "harness.h"

/* Writes size bytes of `from` to the file at offset (-1: at the current offset) and checks that they are at `lands`. */
static void write_exactly(int f, gpu_ptr from, size_t size, off_t offset, off_t lands, const char *source, const char *what) {
    static char *seen;
    ssize_t n = offset < 0 ? write(f, (void *)from, size) : pwrite(f, (void *)from, size, offset);
    check(n == (ssize_t)size, "%s: a write of %zu returned %zd", what, size, n);
    seen = realloc(seen, size + 1);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", f);
    int again = open(path, O_RDONLY | O_CLOEXEC);
    check(pread(again, seen, size, lands) == (ssize_t)size, "%s: cannot read back %zu bytes at %lld", what, size, (long long)lands);
    check(memcmp(seen, source, size) == 0, "%s: wrong bytes in the file (%zu at %lld)", what, size, (long long)lands);
    close(again);
}

static void many_writes(gpu_ptr at, const char *what) {
    static const size_t sizes[] = { 1, 511, 4096, 4097, 65536, 65537, 1 << 20, (1 << 20) + 13, 8 << 20 };
    int f = new_file("written", 0);
    check(pread(fd, (void *)at, 12 * MIB, 77) == 12 * MIB, "pread");
    for (int i = 0; i < 60; i++) {
        size_t size = i < 36 ? sizes[i % 9] : random_below(8 * MIB) + 1, from = random_below(2) ? random_below(4 * MIB) : 0;
        off_t to = random_below(2) ? (off_t)random_below(20 * MIB) : (off_t)(random_below(4096) * 4096);
        write_exactly(f, at + from, size, to, to, content + 77 + from, what);
    }
    close(f);
    f = new_file("appended", O_APPEND);
    for (off_t end = lseek(f, 0, SEEK_END), i = 0; i < 9; end += sizes[i++])
        write_exactly(f, at, sizes[i], -1, end, content + 77, what);
    close(f);
    f = new_file("around", O_DIRECT);
    for (int i = 0; i < 12; i++) {
        size_t size = (1 + random_below(2048)) * 4096;
        off_t to = random_below(4096) * 4096;
        write_exactly(f, at + i, size, to, to, content + 77 + i, what);
    }
    close(f);
}

static void test_writes(void) {
    gpu_ptr at = device(16 * MIB);
    void *stream;
    many_writes(at, "cuMemAlloc");
    GPU(cuMemAllocManaged(&at, 16 * MIB, 1));
    many_writes(at, "managed");
    GPU(cuStreamCreate(&stream, 1));
    GPU(cuMemAllocAsync(&at, 16 * MIB, stream));
    GPU(cuStreamSynchronize(stream));
    many_writes(at, "pool");
}

static void test_writes_after_earlier_work(void) {
    gpu_ptr big = device(1024 * MIB), at = device(8 * MIB);
    int f = new_file("ordered", 0);
    char *expected = malloc(8 * MIB);
    for (int round = 0; round < 12; round++) {
        size_t size = round % 3 == 0 ? 4096 : round % 3 == 1 ? 64 * KIB : 8 * MIB;
        for (int i = 0; i < 10; i++) /* a few milliseconds of work, followed by one that fills the buffer */
            GPU(cuMemcpyDtoDAsync_v2(big, big + 512 * MIB, 512 * MIB, NULL));
        GPU(cuMemsetD8Async(at, round + 1, 8 * MIB, NULL));
        memset(expected, round + 1, size);
        write_exactly(f, at, size, 0, 0, expected, "after earlier work");
        GPU(cuMemsetD8Async(at, 0xaa, 8 * MIB, NULL)); /* too late for the file */
    }
}

static void test_writes_larger_than_the_bounce_limit(void) {
    size_t size = 300 * MIB;
    gpu_ptr at = device(size);
    for (size_t o = 0; o < size; o += 32 * MIB)
        GPU(cuMemcpyHtoD_v2(at + o, content, size - o < 32 * MIB ? size - o : 32 * MIB));
    int f = new_file("large", 0);
    check(write(f, (void *)at, size) == (ssize_t)size && lseek(f, 0, SEEK_CUR) == (off_t)size, "write of 300 MiB");
    char *seen = malloc(32 * MIB);
    for (size_t o = 0; o < size; o += 32 * MIB) {
        size_t n = size - o < 32 * MIB ? size - o : 32 * MIB;
        check(pread(f, seen, n, o) == (ssize_t)n && memcmp(seen, content, n) == 0, "the bytes from %zu on", o);
    }
}

static void test_captures_survive_writes(void) {
    for (int mode = 0; mode < 3; mode++) {
        gpu_ptr target = device(MIB), at = device(8 * MIB);
        int f = new_file("captured", 0);
        void *stream, *graph;
        check(pread(fd, (void *)at, 8 * MIB, 0) == 8 * MIB, "pread");
        GPU(cuStreamCreate(&stream, 0));
        GPU(cuCtxSynchronize());
        GPU(cuStreamBeginCapture_v2(stream, mode));
        GPU(cuMemsetD8Async(target, 0x11, MIB, stream));
        write_exactly(f, at, 4096, 0, 0, content, "during a capture");
        write_exactly(f, at, 8 * MIB, 0, 0, content, "during a capture");
        int code = gpu.cuStreamEndCapture(stream, &graph);
        check(code == 0, "the capture (mode %d) was invalidated: %d %s", mode, code, gpu_error(code));
        GPU(cuGraphDestroy(graph));
        GPU(cuStreamDestroy_v2(stream));
    }
}

static void test_writes_in_stream_order(void) {
    int (*later)(int, const void *, size_t, off_t, void *, ssize_t *) = (void *)dlsym(RTLD_DEFAULT, "spinio_pwrite_async");
    check(later != NULL, "spinio_pwrite_async");
    gpu_ptr big = device(256 * MIB), at = device(8 * MIB);
    static ssize_t wrote[20];
    char *seen = malloc(8 * MIB);
    void *stream;
    int f = new_file("later", 0);
    GPU(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 20; i++) {
        wrote[i] = -1000;
        for (int n = 0; n < 4; n++)
            GPU(cuMemcpyDtoDAsync_v2(big, big + 128 * MIB, 128 * MIB, stream));
        GPU(cuMemsetD8Async(at, i + 1, 8 * MIB, stream));
        check(later(f, (void *)at, 4 * MIB, i * 4 * MIB, stream, &wrote[i]) == 0, "spinio_pwrite_async");
        GPU(cuMemsetD8Async(at, 0xaa, 8 * MIB, stream));
    }
    int kept = dup(f);
    close(f);
    GPU(cuStreamSynchronize(stream));
    for (int i = 0; i < 20; i++) {
        check(wrote[i] == (ssize_t)(4 * MIB), "write %d returned %zd", i, wrote[i]);
        check(pread(kept, seen, 4 * MIB, i * 4 * MIB) == (ssize_t)(4 * MIB) && all(seen, 4 * MIB, i + 1), "write %d", i);
    }
}

#endif
