/* Random reads of a file into GPU memory: as one batch, one call each, from a pinned file, or as fast as the machine
 * can.
 *
 *   batch ROW MODE FILE [name=value ...]      prints one line of JSON
 *
 *   row     what is done                                            modes
 *   random  count reads of block bytes, random, warm                us (spinio_batch_fixed), held (pinned first),
 *                                                                   each (one pread per read), limit (the gather kernel
 *                                                                   alone, on pinned memory)
 *   cold    the same on a file that is not in the page cache        us, limit (io_uring, O_DIRECT, the same depth,
 *                                                                   into pinned memory)
 *   hold    8 MiB reads, sequential, of a pinned file               held, us (not pinned), limit (pinned copies)
 *   again   size bytes, repeatedly, of a pinned file                held, limit
 *   map     a GPU kernel reads the mapped pinned file               stream, random, limit (stream of pinned memory)
 *
 * Everything but "each" and the limits needs LD_PRELOAD=libspinio.so. CPU time is user + system of the whole process.
 */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#define GPU_MORE(F)                                                                                                    \
    F(cuModuleLoadData, (void **, const void *))                                                                       \
    F(cuModuleGetFunction, (void **, void *, const char *))                                                            \
    F(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))
#include "../common/rows.h"

#define DEPTH 128

static struct {
    const char *ptx;
    size_t size, block, count, times;
} arg = {.ptx = "gather.ptx", .block = 4096, .count = 1000000, .times = 4};
static int fd;
static size_t file_size;


static double t0, c0, t, c;
static void begin(void) {
    GPU(cuCtxSynchronize());
    t0 = now(), c0 = cpu();
}
/* Stops the clocks. Called before any comparison, which is not part of the measured work. */
static void stop_clocks(void) {
    t = now() - t0;
    usleep(200000); /* work deferred until after a call returned */
    c = cpu() - c0;
}
static void print_row(double bytes, const char *right) {
    printf("{\"row\":\"%s\",\"mode\":\"%s\",\"block\":%zu,\"count\":%zu,\"bytes\":%.0f,\"seconds\":%.6f,\"gbps\":%.3f,"
           "\"kiops\":%.1f,\"cpu\":%.4f,\"cpu_per_gb\":%.4f,\"right\":%s}\n",
           request.row, request.mode, arg.block, arg.count, bytes, t, bytes / t / 1e9, bytes / arg.block / t / 1e3, c,
           c / (bytes / 1e9), right);
    fflush(stdout);
}

static uint64_t *offsets;
static void choose_offsets(void) {
    offsets = malloc(arg.count * sizeof *offsets);
    for (size_t i = 0; i < arg.count; i++)
        offsets[i] = next_random() % (arg.size / arg.block) * arg.block;
}

/* Compares a thousand of the reads with the file. */
static const char *right(gpu_ptr to) {
    char *a = malloc(arg.block), *b = malloc(arg.block);
    for (size_t k = 0; k < 1000; k++) {
        size_t i = k < 2 ? k * (arg.count - 1) : next_random() % arg.count;
        GPU(cuMemcpyDtoH_v2(a, to + i * arg.block, arg.block));
        if (pread(fd, b, arg.block, offsets[i]) != (ssize_t)arg.block || memcmp(a, b, arg.block))
            return "false";
    }
    return "true";
}

static void pin_file(void) {
    int (*spinio_pin_file)(int) = (int (*)(int))spinio_function("spinio_pin_file");
    if (spinio_pin_file(fd))
        fail("spinio_pin_file");
}

/* ---- the GPU kernel --------------------------------------------------------------------------------------------- */

struct piece { uint64_t from, to, len; };

static void *gather_kernel(void) {
    FILE *f = fopen(arg.ptx, "r");
    if (!f)
        fail(arg.ptx);
    char *text = calloc(1, MIB);
    if (!fread(text, 1, MIB - 1, f))
        fail(arg.ptx);
    fclose(f);
    void *module, *function;
    GPU(cuModuleLoadData(&module, text));
    GPU(cuModuleGetFunction(&function, module, "spinio_gather"));
    return function;
}

static void launch(void *kernel, struct piece *list, size_t count) {
    unsigned n = count, blocks = (n + 63) / 64 < 1056 ? (n + 63) / 64 : 1056;
    uint64_t at = (uint64_t)list;
    void *with[] = {&at, &n};
    GPU(cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, NULL, with, NULL));
}

/* ---- random reads, warm ----------------------------------------------------------------------------------------- */

static void row_random(void) {
    gpu_ptr to;
    size_t room = arg.count * arg.block;
    choose_offsets();
    GPU(cuMemAlloc_v2(&to, room));
    GPU(cuMemsetD8_v2(to, 0, room));
    if (is("limit")) {
        size_t size = arg.size < 4096 * MIB ? arg.size : 4096 * MIB;
        char *from = pinned(size);
        struct piece *list = pinned(arg.count * sizeof *list);
        for (size_t i = 0; i < arg.count; i++)
            list[i] = (struct piece){(uint64_t)from + offsets[i] % size, to + i * arg.block, arg.block};
        void *kernel = gather_kernel();
        launch(kernel, list, 1);
        begin();
        launch(kernel, list, arg.count);
        GPU(cuCtxSynchronize());
        stop_clocks();
        print_row(room, "true");
        return;
    }
    if (is("each")) {
        begin();
        for (size_t i = 0; i < arg.count; i++)
            if (pread(fd, (void *)(to + i * arg.block), arg.block, offsets[i]) != (ssize_t)arg.block)
                fail("pread");
        GPU(cuCtxSynchronize());
        stop_clocks();
        print_row(room, right(to));
        return;
    }
    ssize_t (*batch)(int, const uint64_t *, size_t, void *, int64_t *, size_t) =
        (ssize_t(*)(int, const uint64_t *, size_t, void *, int64_t *, size_t))spinio_function("spinio_batch_fixed");
    if (is("held"))
        pin_file();
    /* Warm-up with other offsets: a first batch starts threads, allocates bounce buffers and loads the GPU kernel. */
    uint64_t *others = malloc(20000 * sizeof *others);
    for (size_t i = 0; i < 20000; i++)
        others[i] = next_random() % (arg.size / arg.block) * arg.block;
    for (int i = 0; i < 3; i++)
        if (batch(fd, others, arg.block, (void *)to, NULL, arg.count < 20000 ? arg.count : 20000) < 0)
            fail("spinio_batch_fixed");
    usleep(100000);
    GPU(cuMemsetD8_v2(to, 0, room));
    begin();
    if (batch(fd, offsets, arg.block, (void *)to, NULL, arg.count) != (ssize_t)room)
        fail("spinio_batch_fixed");
    stop_clocks();
    print_row(room, right(to));
}

/* ---- random reads, cold ----------------------------------------------------------------------------------------- */

/* A ring of this program with the same number of reads in flight: the throughput that storage gives a program that does
 * nothing else. */
static void storage_limit(void) {
    struct { unsigned sq, cq, flags, thread[2], features, more[4], so[10], co[10]; } p = {.flags = 1u << 4};
    int ring = syscall(425, DEPTH, &p);
    if (ring < 0)
        fail("io_uring_setup");
    size_t size = p.co[5] + p.cq * 16 > p.so[6] + p.sq * 4 ? p.co[5] + p.cq * 16 : p.so[6] + p.sq * 4;
    char *rings = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, 0);
    uint64_t(*sqe)[8] = mmap(NULL, p.sq * 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, 0x10000000);
    int direct = open(request.file, O_RDONLY | O_DIRECT);
    if (rings == MAP_FAILED || (void *)sqe == MAP_FAILED || direct < 0)
        fail("ring");
    size_t unit = arg.block < 512 ? 512 : arg.block;
    char *room = pinned(DEPTH * unit);
    unsigned *tail = (unsigned *)(rings + p.so[1]), *array = (unsigned *)(rings + p.so[6]);
    unsigned *head = (unsigned *)(rings + p.co[0]), *end_ = (unsigned *)(rings + p.co[1]);
    unsigned slots[DEPTH], free_slots = DEPTH;
    for (unsigned i = 0; i < DEPTH; i++)
        slots[i] = i;
    size_t next = 0, done = 0;
    begin();
    while (done < arg.count) {
        unsigned added = 0;
        while (free_slots && next < arg.count) {
            unsigned slot = slots[--free_slots], at = (*tail + added) & (p.sq - 1);
            uint64_t e[8] = {22 | (uint64_t)direct << 32, offsets[next++], (uint64_t)(room + slot * unit), unit, slot};
            memcpy(sqe[at], e, sizeof e);
            array[at] = at, added++;
        }
        __atomic_store_n(tail, *tail + added, __ATOMIC_RELEASE);
        if (syscall(426, ring, added, 1, 1, NULL, 0) < 0)
            fail("io_uring_enter");
        while (*head != __atomic_load_n(end_, __ATOMIC_ACQUIRE)) {
            char *c = rings + p.co[5] + (*head & (p.cq - 1)) * 16;
            if (*(int *)(c + 8) != (int)unit)
                errno = -*(int *)(c + 8), fail("read");
            slots[free_slots++] = *(uint64_t *)c;
            __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE), done++;
        }
    }
    stop_clocks();
    print_row((double)arg.count * arg.block, "true");
}

static void row_cold(void) {
    choose_offsets();
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (is("limit")) {
        storage_limit();
        return;
    }
    gpu_ptr to;
    size_t room = arg.count * arg.block;
    GPU(cuMemAlloc_v2(&to, room));
    GPU(cuMemsetD8_v2(to, 0, room));
    ssize_t (*batch)(int, const uint64_t *, size_t, void *, int64_t *, size_t) =
        (ssize_t(*)(int, const uint64_t *, size_t, void *, int64_t *, size_t))spinio_function("spinio_batch_fixed");
    uint64_t first[64];
    for (int i = 0; i < 64; i++)
        first[i] = i * arg.block;
    if (batch(fd, first, arg.block, (void *)to, NULL, 64) < 0)
        fail("spinio_batch_fixed");
    begin();
    if (batch(fd, offsets, arg.block, (void *)to, NULL, arg.count) != (ssize_t)room)
        fail("spinio_batch_fixed");
    stop_clocks();
    print_row(room, right(to));
}

/* ---- pinned files ----------------------------------------------------------------------------------------------- */

static const char *compare(gpu_ptr to, size_t size, size_t at) {
    char *a = malloc(MIB), *b = malloc(MIB);
    for (size_t o = 0; o + MIB <= size; o += size / 8 > MIB ? size / 8 : MIB) {
        GPU(cuMemcpyDtoH_v2(a, to + o, MIB));
        if (pread(fd, b, MIB, at + o) != (ssize_t)MIB || memcmp(a, b, MIB))
            return "false";
    }
    return "true";
}

static void row_hold(void) {
    gpu_ptr to;
    int again = strcmp(request.row, "again") == 0;
    size_t block = again ? arg.size : arg.block, total = again ? arg.size * arg.times : arg.size;
    GPU(cuMemAlloc_v2(&to, block));
    if (is("limit")) {
        char *from = pinned(block < 1024 * MIB ? block : 1024 * MIB);
        size_t step = block < 1024 * MIB ? block : 1024 * MIB;
        GPU(cuMemcpyHtoD_v2(to, from, step));
        begin();
        for (size_t o = 0; o < total; o += step)
            GPU(cuMemcpyHtoD_v2(to + o % block, from, step));
        stop_clocks();
        print_row(total, "true");
        return;
    }
    if (is("held"))
        pin_file();
    ssize_t (*read_)(int, void *, size_t, off_t) = (ssize_t(*)(int, void *, size_t, off_t))spinio_function("spinio_pread");
    for (int i = 0; i < 6; i++)
        if (read_(fd, (void *)to, block < 64 * MIB ? block : 64 * MIB, 0) < 0)
            fail("spinio_pread");
    usleep(100000);
    begin();
    size_t last = 0;
    for (size_t o = 0; o + block <= total; o += block) {
        last = o % arg.size;
        if (read_(fd, (void *)to, block, last) != (ssize_t)block)
            fail("spinio_pread");
    }
    stop_clocks();
    print_row(total / block * block, compare(to, block, last));
}

/* GPU kernels without knowledge of SPIN: they take an address, and ranges of it to read. */
static void row_map(void) {
    size_t block = is("random") ? 4096 : 64 << 10, count = is("random") ? arg.count : arg.size / block;
    gpu_ptr to, from;
    size_t room = is("random") ? count * block : arg.size;
    arg.block = block, arg.count = count;
    GPU(cuMemAlloc_v2(&to, room));
    GPU(cuMemsetD8_v2(to, 0, room));
    if (is("limit")) {
        from = (gpu_ptr)pinned(arg.size);
    } else {
        void *(*map)(int, off_t, size_t, unsigned) = (void *(*)(int, off_t, size_t, unsigned))spinio_function("spinio_map");
        pin_file();
        from = (gpu_ptr)map(fd, 0, arg.size, 0);
        if (!from)
            fail("spinio_map");
    }
    struct piece *list = pinned(count * sizeof *list);
    choose_offsets();
    for (size_t i = 0; i < count; i++) {
        if (!is("random"))
            offsets[i] = i * block;
        list[i] = (struct piece){from + offsets[i], to + i * block, block};
    }
    void *kernel = gather_kernel();
    launch(kernel, list, 1);
    begin();
    launch(kernel, list, count);
    GPU(cuCtxSynchronize());
    stop_clocks();
    print_row((double)count * block, is("limit") ? "true" : right(to));
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"size", &arg.size, NULL},
                                            {"block", &arg.block, NULL},
                                            {"count", &arg.count, NULL},
                                            {"times", &arg.times, NULL},
                                            {"ptx", NULL, &arg.ptx}};
    static const struct row rows[] = {
        {"random", row_random}, {"cold", row_cold}, {"hold", row_hold}, {"again", row_hold}, {"map", row_map}};
    parse_args(argc, argv, options, COUNT(options));
    file_size = open_both(&fd);
    if (!arg.size || arg.size > file_size)
        arg.size = file_size;
    return measure(rows, COUNT(rows));
}
