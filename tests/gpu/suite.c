/* The GPU suite: a program that uses CUDA, plain reads, and plain writes (writes.h), under LD_PRELOAD=libspinio.so.
 *
 *   suite SCRATCH [name...] [-name...]      runs all tests, or those named, except those with a minus; files are in SCRATCH
 *
 * Exit status: the number of failures, at most 100.
 */
#include "harness.h"
#include "writes.h"

/* Reads length bytes at offset to area + to; checks them, and that nothing else within [area, area + room) changed. */
static void read_exactly(gpu_ptr area, size_t room, size_t to, size_t length, off_t offset, const char *what) {
    GPU(cuMemsetD8_v2(area, 0xee, room));
    GPU(cuCtxSynchronize());
    size_t expect = offset >= FILE_SIZE ? 0 : (size_t)(FILE_SIZE - offset) < length ? (size_t)(FILE_SIZE - offset) : length;
    ssize_t n = pread(fd, (void *)(area + to), length, offset);
    check(n == (ssize_t)expect, "%s: pread(%zu at %lld) returned %zd, not %zu", what, length, (long long)offset, n, expect);
    char *now = back(area, room);
    check(all(now, to, 0xee), "%s: bytes before the buffer changed (%zu at %lld)", what, length, (long long)offset);
    check(memcmp(now + to, content + offset, expect) == 0, "%s: wrong bytes (%zu at %lld)", what, length, (long long)offset);
    check(all(now + to + expect, room - to - expect, 0xee), "%s: bytes after the %zu read changed", what, expect);
}

static void many_reads(gpu_ptr area, size_t room, const char *what) {
    static const size_t sizes[] = { 1, 511, 4096, 4097, 65536, 65537, 1 << 20, (1 << 20) + 13, 8 << 20 };
    for (int i = 0; i < 120; i++) {
        size_t length = i < 60 ? sizes[i % 9] : random_below(i < 110 ? 300 * KIB : 12 * MIB) + 1;
        if (length > room)
            length = room;
        size_t to = random_below(3) ? random_below(room - length + 1) : 0;
        off_t offset = random_below(2) ? (off_t)random_below(FILE_SIZE) : (off_t)(random_below(FILE_SIZE / 4096) * 4096);
        if (i % 20 == 19)
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        read_exactly(area, room, to, length, offset, what);
    }
}

/* ---- kinds of memory -------------------------------------------------------------------------------------------- */

static void test_malloc(void) {
    gpu_ptr at = device(16 * MIB);
    many_reads(at, 16 * MIB, "cuMemAlloc");
}

static void test_pool(void) {
    gpu_ptr at;
    void *stream;
    GPU(cuStreamCreate(&stream, 1));
    GPU(cuMemAllocAsync(&at, 16 * MIB, stream));
    GPU(cuStreamSynchronize(stream));
    many_reads(at, 16 * MIB, "pool");
    GPU(cuMemFreeAsync(at, stream));
    GPU(cuStreamSynchronize(stream));
    errno = 0;
    check(pread(fd, (void *)at, 100, 0) == -1 && errno == EFAULT, "a read into freed pool memory");
    gpu_ptr again;
    GPU(cuMemAllocAsync(&again, 1 * MIB, stream));
    GPU(cuStreamSynchronize(stream));
    ssize_t n = pread(fd, (void *)(again + MIB - 10), 4096, 0);
    check(n == 10 || (n == -1 && errno == EFAULT), "a read past the end of pool memory returned %zd", n);
}

static void test_managed(void) {
    gpu_ptr at;
    GPU(cuMemAllocManaged(&at, 4 * MIB, 1));
    many_reads(at, 4 * MIB, "managed");
    check(pread(fd, (void *)at, MIB, 4096) == (ssize_t)MIB, "pread");
    GPU(cuCtxSynchronize());
    check(memcmp((void *)at, content + 4096, MIB) == 0, "the CPU reads the bytes in managed memory");
}

/* The used part of CUmemAllocationProp and CUmemAccessDesc. */
struct prop { int type, handles, location_type, location_id; void *windows; unsigned char flags[8]; };
struct access { int location_type, location_id, flags; };

static void test_mappings(void) {
    struct prop prop = { 1, 0, 1, 0, NULL, { 0 } };
    struct access access = { 1, 0, 3 };
    gpu_ptr at;
    GPU(cuMemAddressReserve(&at, 32 * MIB, 0, 0, 0));
    for (int i = 0; i < 5; i++) { /* 2 MiB each; a hole after the fourth */
        unsigned long long handle;
        GPU(cuMemCreate(&handle, 2 * MIB, &prop, 0));
        GPU(cuMemMap(at + (i < 4 ? i : 6) * 2 * MIB, 2 * MIB, 0, handle, 0));
        GPU(cuMemSetAccess(at + (i < 4 ? i : 6) * 2 * MIB, 2 * MIB, &access, 1));
    }
    many_reads(at, 8 * MIB, "mappings");
    GPU(cuMemsetD8_v2(at + 12 * MIB, 0xee, 2 * MIB));
    ssize_t n = pread(fd, (void *)(at + 7 * MIB), 8 * MIB, 0);
    check(n == (ssize_t)MIB, "a read ends at the end of the mappings: %zd", n);
    check(memcmp(back(at + 7 * MIB, MIB), content, MIB) == 0, "its bytes");
    check(all(back(at + 12 * MIB, 2 * MIB), 2 * MIB, 0xee), "nothing changed after the hole");
    errno = 0;
    check(pread(fd, (void *)(at + 8 * MIB), 100, 0) == -1 && errno == EFAULT, "a read into the hole");
}

static void test_host_memory_of_cuda(void) {
    void *at;
    GPU(cuMemHostAlloc(&at, MIB, 1));
    char *registered = aligned_alloc(4096, MIB);
    memset(registered, 1, MIB);
    GPU(cuMemHostRegister_v2(registered, MIB, 1));
    for (int i = 0; i < 100; i++) {
        char *to = i & 1 ? registered : at;
        size_t length = random_below(MIB) + 1, offset = random_below(FILE_SIZE - MIB);
        check(pread(fd, to, length, offset) == (ssize_t)length, "pread");
        check(memcmp(to, content + offset, length) == 0, "bytes in pinned host memory");
    }
}

/* ---- the end of an allocation, and its reuse --------------------------------------------------------------------- */

static void test_never_past_the_end(void) {
    gpu_ptr a = device(4096), b = device(4096);
    gpu_ptr low = a < b ? a : b, high = a < b ? b : a;
    ssize_t n = pread(fd, (void *)(low + 4000), 8192, 7);
    check(n == 96, "a read at the end of an allocation returned %zd, not 96", n);
    check(memcmp(back(low + 4000, 96), content + 7, 96) == 0, "its bytes");
    check(all(back(low, 4000), 4000, 0xee) && all(back(high, 4096), 4096, 0xee), "the neighbour changed");
    gpu_ptr big = device(3 * MIB + 512);
    n = pread(fd, (void *)(big + MIB), 16 * MIB, 0);
    check(n == (ssize_t)(2 * MIB + 512), "a large read returned %zd", n);
    check(memcmp(back(big + MIB, n), content, n) == 0, "its bytes");
}

static void test_reuse_of_an_address(void) {
    int same = 0;
    for (int i = 0; i < 30; i++) {
        gpu_ptr a = device(8 * MIB);
        check(pread(fd, (void *)a, 8 * MIB, 0) == (ssize_t)(8 * MIB), "pread");
        GPU(cuMemFree_v2(a));
        errno = 0;
        check(pread(fd, (void *)a, 100, 0) == -1 && errno == EFAULT, "a read into freed memory");
        gpu_ptr b = device(2 * MIB + 4096);
        same += a == b;
        ssize_t n = pread(fd, (void *)(b + 2 * MIB), MIB, i * 4096);
        check(n == 4096, "a read stops at the new allocation's end: %zd", n);
        check(memcmp(back(b + 2 * MIB, 4096), content + i * 4096, 4096) == 0, "its bytes");
        GPU(cuMemFree_v2(b));
    }
    printf("    (%d of 30 at the same address)\n", same);
}

/* ---- order and captures ------------------------------------------------------------------------------------------ */

static void test_order_after_earlier_work(void) {
    gpu_ptr big = device(1024 * MIB), at = device(16 * MIB);
    for (int round = 0; round < 12; round++) {
        size_t length = round % 3 == 0 ? 4096 : round % 3 == 1 ? 64 * KIB : 8 * MIB;
        for (int i = 0; i < 10; i++) /* a few milliseconds of work, followed by one that covers the buffer */
            GPU(cuMemcpyDtoDAsync_v2(big, big + 512 * MIB, 512 * MIB, NULL));
        GPU(cuMemsetD8Async(at, 0xaa, 16 * MIB, NULL));
        check(pread(fd, (void *)at, length, 4096 * round) == (ssize_t)length, "pread");
        GPU(cuMemcpyDtoDAsync_v2(at + 8 * MIB, at, length, NULL));
        char *now = back(at, 16 * MIB);
        check(memcmp(now, content + 4096 * round, length) == 0, "a read of %zu ran before work queued earlier", length);
        check(memcmp(now + 8 * MIB, now, length) == 0, "work queued after a read of %zu did not see it", length);
    }
}

static void test_overlapping_reads_keep_their_order(void) {
    gpu_ptr at = device(MIB);
    for (int i = 0; i < 400; i++) {
        size_t length = random_below(2) ? 1 + random_below(64 * KIB) : 1 + random_below(400 * KIB);
        off_t first = random_below(FILE_SIZE / 2), second = random_below(FILE_SIZE / 2);
        check(pread(fd, (void *)at, length, first) == (ssize_t)length, "pread");
        check(pread(fd, (void *)(at + length / 2), length, second) == (ssize_t)length, "pread");
        char *now = back(at, length + length / 2);
        check(memcmp(now, content + first, length / 2) == 0 && memcmp(now + length / 2, content + second, length) == 0,
              "two reads of %zu bytes were mixed up", length);
    }
}

static void capture(void *stream, int mode) {
    gpu_ptr target = device(MIB), at = device(32 * MIB);
    static const size_t sizes[] = { 1, 4096, 64 * KIB, MIB, 24 * MIB };
    void *graph, *run;
    GPU(cuCtxSynchronize());
    GPU(cuStreamBeginCapture_v2(stream, mode));
    GPU(cuMemsetD8Async(target, 0x11, MIB, stream));
    for (int i = 0; i < 5; i++)
        check(pread(fd, (void *)at, sizes[i], i) == (ssize_t)sizes[i], "pread of %zu during a capture", sizes[i]);
    GPU(cuMemsetD8Async(target, 0x22, 100, stream));
    int code = gpu.cuStreamEndCapture(stream, &graph);
    check(code == 0, "the capture (mode %d) was invalidated: %d %s", mode, code, gpu_error(code));
    char *now = back(at, 24 * MIB);
    check(memcmp(now, content + 4, 24 * MIB) == 0, "bytes read during a capture");
    GPU(cuGraphInstantiateWithFlags(&run, graph, 0));
    GPU(cuGraphLaunch(run, stream));
    GPU(cuStreamSynchronize(stream));
    check(all(back(target, 100), 100, 0x22) && all(back(target + 100, 1000), 1000, 0x11), "the graph runs correctly");
    GPU(cuGraphExecDestroy(run));
    GPU(cuGraphDestroy(graph));
    GPU(cuMemFree_v2(at));
    GPU(cuMemFree_v2(target));
}

static void test_captures_survive(void) {
    for (int warm = 0; warm < 2; warm++) /* the first read of the process, and later ones */
        for (int flags = 0; flags < 2; flags++)
            for (int mode = 0; mode < 3; mode++) {
                void *stream;
                GPU(cuStreamCreate(&stream, flags));
                capture(stream, mode);
                GPU(cuStreamDestroy_v2(stream));
            }
}

static void *read_during_capture(void *p) {
    volatile int *stop = p;
    GPU(cuCtxSetCurrent(gpu.context));
    gpu_ptr at;
    int code = gpu.cuMemAlloc_v2(&at, 16 * MIB);
    check(code == 0, "alloc %d", code);
    *(stop + 1) = 1;
    for (int i = 0; !*stop; i++) {
        size_t length = i % 3 == 0 ? 100 : i % 3 == 1 ? 64 * KIB : 8 * MIB;
        check(pread(fd, (void *)at, length, i % 1000) == (ssize_t)length, "pread during a capture of another thread");
    }
    return NULL;
}

static void test_captures_of_another_thread_survive(void) {
    volatile int stop[2] = { 0, 0 };
    pthread_t thread;
    pthread_create(&thread, NULL, read_during_capture, (void *)stop);
    while (!stop[1])
        usleep(1000);
    for (int i = 0; i < 40; i++) { /* a non-blocking stream: with a blocking one no thread could use the default stream */
        void *stream, *graph;
        gpu_ptr target;
        GPU(cuStreamCreate(&stream, 1));
        GPU(cuMemAlloc_v2(&target, 4096));
        GPU(cuStreamBeginCapture_v2(stream, i % 3));
        GPU(cuMemsetD8Async(target, 1, 4096, stream));
        usleep(3000);
        int code = gpu.cuStreamEndCapture(stream, &graph);
        check(code == 0, "round %d: the capture was invalidated: %d %s", i, code, gpu_error(code));
        GPU(cuGraphDestroy(graph));
        GPU(cuStreamDestroy_v2(stream));
    }
    stop[0] = 1;
    pthread_join(thread, NULL);
}

/* ---- threads, contexts, processes -------------------------------------------------------------------------------- */

static void *thread_reads(void *p) {
    gpu_ptr at = (gpu_ptr)p; /* this thread has no current context */
    unsigned long my = at;
    for (int i = 0; i < 100; i++) {
        my = my * 6364136223846793005ul + 1442695040888963407ul;
        size_t length = 1 + (my >> 33) % (i % 10 ? 100 * KIB : 8 * MIB);
        off_t offset = (my >> 20) % (FILE_SIZE - 8 * MIB);
        check(pread(fd, (void *)at, length, offset) == (ssize_t)length, "pread in a thread");
        GPU(cuCtxSetCurrent(gpu.context));
        char *now = malloc(length);
        GPU(cuMemcpyDtoH_v2(now, at, length));
        check(memcmp(now, content + offset, length) == 0, "bytes read in a thread");
        free(now);
        GPU(cuCtxSetCurrent(NULL));
    }
    return NULL;
}

static void test_threads_without_a_context(void) {
    pthread_t t[8];
    for (int i = 0; i < 8; i++)
        pthread_create(&t[i], NULL, thread_reads, (void *)device(8 * MIB));
    for (int i = 0; i < 8; i++)
        pthread_join(t[i], NULL);
}

static void test_reset(void) {
    for (int i = 0; i < 4; i++) {
        gpu_ptr at = device(16 * MIB);
        read_exactly(at, 16 * MIB, 100, 4000, 5, "after a reset, small");
        read_exactly(at, 16 * MIB, 100, 12 * MIB, 5, "after a reset, large");
        check(pread(fd, (void *)at, 4096, 0) == 4096, "pread"); /* still queued when the context is destroyed */
        GPU(cuDevicePrimaryCtxReset_v2(gpu.device));
        errno = 0;
        check(pread(fd, (void *)at, 100, 0) == -1 && errno == EFAULT, "a read into memory of a destroyed context");
        GPU(cuDevicePrimaryCtxRetain(&gpu.context, gpu.device));
        GPU(cuCtxSetCurrent(gpu.context));
    }
}

static void test_fork(void) {
    gpu_ptr at = device(16 * MIB);
    read_exactly(at, 16 * MIB, 0, 12 * MIB, 0, "before fork");
    for (int i = 0; i < 5; i++) {
        check(pread(fd, (void *)at, 4096, 0) == 4096, "pread"); /* still queued */
        pid_t child = fork();
        if (child == 0) {
            static char host[100000];
            int good = pread(fd, host, sizeof host, 77) == sizeof host && memcmp(host, content + 77, sizeof host) == 0;
            errno = 0;
            good = good && pread(fd, (void *)at, 4096, 0) == -1 && errno == EFAULT;
            _exit(good ? 0 : 1);
        }
        int status;
        waitpid(child, &status, 0);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child: status %x", status);
        read_exactly(at, 16 * MIB, 5, 10 * MIB, 3, "the parent after fork");
    }
}

static int callback_failed = -1;
static void callback(void *unused) {
    (void)unused;
    static char host[50000];
    callback_failed = !(pread(fd, host, sizeof host, 99) == sizeof host && memcmp(host, content + 99, sizeof host) == 0);
}
static void test_callback(void) {
    void *stream;
    gpu_ptr at = device(4096);
    check(pread(fd, (void *)at, 100, 0) == 100, "pread");
    GPU(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 3; i++) {
        GPU(cuLaunchHostFunc(stream, callback, NULL));
        GPU(cuStreamSynchronize(stream));
        check(callback_failed == 0, "a host read inside a callback of the driver");
    }
}

/* ---- POSIX semantics --------------------------------------------------------------------------------------------- */

static void test_host_reads_are_untouched(void) {
    static char in_data[200000];
    char on_stack[50000];
    char *on_heap = malloc(2 * MIB);
    for (int i = 0; i < 2000; i++) {
        char *to = i % 3 == 0 ? in_data : i % 3 == 1 ? on_stack : on_heap;
        size_t length = 1 + random_below(i % 3 == 2 ? 2 * MIB : 50000), offset = random_below(FILE_SIZE - 2 * MIB);
        check(pread(fd, to, length, offset) == (ssize_t)length, "pread");
        check(memcmp(to, content + offset, length) == 0, "bytes in host memory");
    }
}

static void test_errors(void) {
    gpu_ptr at = device(MIB);
    struct { const char *what; int fd; off_t offset; int error; } cases[] = {
        { "a closed descriptor", 987, 0, EBADF },
        { "a descriptor for writing", new_file("writable", 0), 0, EBADF },
        { "a directory", open(scratch, O_RDONLY | O_DIRECTORY), 0, EISDIR },
        { "a negative offset", fd, -1, EINVAL } };
    char path[4096];
    snprintf(path, sizeof path, "%s/writable", scratch);
    cases[1].fd = open(path, O_WRONLY);
    for (int small = 0; small < 2; small++)
        for (int i = 0; i < 4; i++) {
            errno = 0;
            ssize_t n = pread(cases[i].fd, (void *)at, small ? 100 : MIB, cases[i].offset);
            check(n == -1 && errno == cases[i].error, "%s: %zd", cases[i].what, n);
        }
    check(pread(fd, (void *)at, 0, 0) == 0, "no bytes");
    check(pread(fd, (void *)at, 100, FILE_SIZE) == 0, "at the end");
    check(pread(fd, (void *)at, MIB, FILE_SIZE + 5) == 0, "past the end");
    check(pread(fd, (void *)at, MIB, FILE_SIZE - 5) == 5, "short at the end");
    check(all(back(at + 5, MIB - 5), MIB - 5, 0xee), "no bytes past the returned count");
}

static void test_other_calls(void) {
    gpu_ptr at = device(4 * MIB);
    int f = open("/proc/self/exe", O_RDONLY);
    close(f);
    char path[4096];
    snprintf(path, sizeof path, "%s/noise", scratch);
    f = open(path, O_RDONLY | O_CLOEXEC);
    check(lseek(f, 1000, SEEK_SET) == 1000, "lseek");
    check(read(f, (void *)at, 5000) == 5000 && lseek(f, 0, SEEK_CUR) == 6000, "read moves the offset");
    check(read(f, (void *)(at + 5000), MIB) == (ssize_t)MIB && lseek(f, 0, SEEK_CUR) == (off_t)(6000 + MIB), "a large read too");
    check(memcmp(back(at, 5000 + MIB), content + 1000, 5000 + MIB) == 0, "their bytes");
    char host[300];
    struct iovec v[3] = { { (void *)at, 1000 }, { host, 300 }, { (void *)(at + 2000), 200 * KIB } };
    check(preadv(fd, v, 3, 50) == (ssize_t)(1300 + 200 * KIB), "preadv into device and host");
    check(memcmp(back(at, 1000), content + 50, 1000) == 0 && memcmp(host, content + 1050, 300) == 0 &&
          memcmp(back(at + 2000, 200 * KIB), content + 1350, 200 * KIB) == 0, "its bytes");
    FILE *stream = fopen(path, "r");
    check(fread(host, 1, 10, stream) == 10 && fread((void *)at, 1, 100000, stream) == 100000, "fread");
    check(memcmp(back(at, 100000), content + 10, 100000) == 0, "its bytes");
    int p[2];
    check(pipe(p) == 0 && write(p[1], content, 5000) == 5000, "pipe");
    check(read(p[0], (void *)at, 10000) == 5000, "a read from a pipe");
    check(memcmp(back(at, 5000), content, 5000) == 0, "its bytes");
    int direct = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (direct >= 0) {
        check(pread(direct, (void *)at, MIB, 8192) == (ssize_t)MIB, "through a descriptor with O_DIRECT");
        check(memcmp(back(at, MIB), content + 8192, MIB) == 0, "its bytes");
    }
}

static void test_holes_and_large_files(void) {
    int f = new_file("sparse", O_TRUNC);
    size_t size = 3072 * MIB;
    check(ftruncate(f, size) == 0, "ftruncate");
    check(pwrite(f, "begin", 5, 0) == 5 && pwrite(f, "middle", 6, 2500 * MIB) == 6 && pwrite(f, "end", 3, size - 3) == 3, "pwrite");
    gpu_ptr at = device(size);
    ssize_t n = pread(f, (void *)at, size, 0);
    check(n == 0x7ffff000, "one pread moves as much as the host's: %zd", n);
    ssize_t (*whole)(int, void *, size_t, off_t) = (void *)dlsym(RTLD_DEFAULT, "spinio_pread");
    check(whole != NULL, "spinio_pread exists");
    n = whole(f, (void *)at, size, 0);
    check(n == (ssize_t)size, "spinio_pread moves all: %zd", n);
    check(memcmp(back(at, 5), "begin", 5) == 0 && memcmp(back(at + 2500 * MIB, 6), "middle", 6) == 0 &&
          memcmp(back(at + size - 3, 3), "end", 3) == 0, "the marks");
    for (int i = 0; i < 50; i++)
        check(all(back(at + 4096 + random_below(2400) * MIB, 100 * KIB), 100 * KIB, 0), "a hole reads zeros");
}

static int descriptors(void) {
    int n = 0;
    for (int i = 0; i < 1024; i++)
        n += fcntl(i, F_GETFD) >= 0;
    return n;
}
static void test_no_descriptor_of_ours(void) {
    int before = descriptors();
    gpu_ptr at = device(32 * MIB);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    check(pread(fd, (void *)at, 32 * MIB, 0) == (ssize_t)(32 * MIB), "pread");
    check(pread(fd, (void *)at, 32 * MIB, 0) == (ssize_t)(32 * MIB), "pread");
    check(pread(fd, (void *)at, 4096, 0) == 4096, "pread");
    check(descriptors() == before, "the program's fd table has %d descriptors, not %d", descriptors(), before);
}

static void test_sees_every_write(void) {
    int f = new_file("written", O_TRUNC);
    gpu_ptr at = device(8 * MIB);
    char *data = malloc(8 * MIB);
    for (int i = 0; i < 40; i++) {
        size_t size = i % 2 ? 8 * MIB : 64 * KIB;
        memset(data, i + 1, size);
        check(pwrite(f, data, size, 0) == (ssize_t)size, "pwrite");
        check(pread(f, (void *)at, size, 0) == (ssize_t)size, "pread");
        check(all(back(at, size), size, i + 1), "round %d: a read does not see the preceding write", i);
        if (i % 5 == 4) {
            check(fsync(f) == 0, "fsync");
            posix_fadvise(f, 0, 0, POSIX_FADV_DONTNEED);
            check(pread(f, (void *)at, size, 0) == (ssize_t)size && all(back(at, size), size, i + 1), "and from the disk");
        }
    }
}

/* ---- the runner -------------------------------------------------------------------------------------------------- */

#define TESTS(T)                                                                                                       \
    T(malloc) T(pool) T(managed) T(mappings) T(host_memory_of_cuda) T(never_past_the_end) T(reuse_of_an_address)       \
    T(order_after_earlier_work) T(overlapping_reads_keep_their_order) T(captures_survive)                             \
    T(captures_of_another_thread_survive) T(threads_without_a_context) T(reset) T(fork) T(callback)                    \
    T(host_reads_are_untouched) T(errors) T(other_calls) T(holes_and_large_files) T(no_descriptor_of_ours)             \
    T(sees_every_write) T(writes) T(writes_after_earlier_work) T(writes_larger_than_the_bounce_limit)               \
    T(captures_survive_writes) T(writes_in_stream_order)

static const struct test tests[] = {
#define T(name) { #name, test_##name },
    TESTS(T)
#undef T
};

int main(int argc, char **argv) {
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests, gpu_open);
}
