/* The cost of registering page-cache pages with the driver, and its effect on threads that work concurrently.
 *
 *   registering FOLDER [size=BYTES]
 *
 * Makes a file in FOLDER (2 GiB; removed at the end), keeps it in the page cache, and prints one line per measurement:
 * nanoseconds per page of 4 KiB, and the corresponding bandwidth. Then the time of another thread's calls meanwhile.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GPU_MORE(F)                                                                                                    \
    F(cuEventCreate, (void **, unsigned))                                                                              \
    F(cuEventRecord, (void *, void *))                                                                                 \
    F(cuEventQuery, (void *))
#include "../common/gpu.h"
#include "../common/measure.h"

#define MIB ((size_t)1 << 20)

enum { PAGE = 4096, READ_ONLY = 8, PORTABLE = 1, POPULATE_READ = 22, MOST_THREADS = 16 };

static size_t size = 2048 * MIB;
static int fd;
static char *map, *ring;
static gpu_ptr area;

/* ---- parts of the work ------------------------------------------------------------------------------------------- */

static void remap(void) {
    if (map)
        munmap(map, size);
    if ((map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED)
        die("mmap");
}

static void register_range(size_t from, size_t to, size_t piece) {
    GPU(cuCtxSetCurrent(gpu.context));
    for (size_t at = from; at < to; at += piece)
        GPU(cuMemHostRegister_v2(map + at, at + piece < to ? piece : to - at, READ_ONLY));
}

static void unregister_range(size_t from, size_t to, size_t piece) {
    GPU(cuCtxSetCurrent(gpu.context));
    for (size_t at = from; at < to; at += piece)
        GPU(cuMemHostUnregister(map + at));
}

static void prefault(size_t from, size_t to, size_t piece) {
    for (size_t at = from; at < to; at += piece)
        if (madvise(map + at, at + piece < to ? piece : to - at, POPULATE_READ))
            die("MADV_POPULATE_READ");
}

static void read_range(size_t from, size_t to, size_t piece) {
    for (size_t at = from; at < to; at += piece)
        if (pread(fd, ring + at % (64 * MIB), piece, at) != (ssize_t)piece)
            die("pread");
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

struct share {
    void (*work)(size_t from, size_t to, size_t piece);
    size_t from, to, piece;
};

static void *run_share(void *arg) {
    struct share *s = arg;
    s->work(s->from, s->to, s->piece);
    return NULL;
}

static void run_threads(struct share *shares, int count) {
    pthread_t threads[MOST_THREADS];
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, run_share, &shares[i]))
            die("pthread_create");
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

static void run_divided(int threads, void (*work)(size_t, size_t, size_t), size_t piece) {
    struct share shares[MOST_THREADS];
    for (int i = 0; i < threads; i++)
        shares[i] = (struct share){ work, size / threads * i, size / threads * (i + 1), piece };
    run_threads(shares, threads);
}

/* ---- printing ---------------------------------------------------------------------------------------------------- */

static void report(const char *work, double begun, double bytes) {
    double t = now() - begun;
    printf("%-72s %6.1f ns per page  %6.1f GB/s\n", work, t / (bytes / PAGE) * 1e9, bytes / t / 1e9);
    fflush(stdout);
}

static void measure_alone(void) {
    char line[100];
    double begun;
    for (size_t piece = 2 * MIB; piece <= 128 * MIB; piece *= 4) {
        remap();
        begun = now();
        register_range(0, size, piece);
        snprintf(line, sizeof line, "register, fresh mapping, %zu MiB at a time", piece / MIB);
        report(line, begun, size);
        begun = now();
        unregister_range(0, size, piece);
        report("  unregister", begun, size);
    }
    remap();
    begun = now();
    prefault(0, size, 32 * MIB);
    report("prefault, fresh mapping", begun, size);
    begun = now();
    register_range(0, size, 32 * MIB);
    report("  then register, 32 MiB at a time", begun, size);
    unregister_range(0, size, 32 * MIB);
    for (int threads = 1; threads <= MOST_THREADS; threads *= 2) {
        begun = now();
        run_divided(threads, read_range, 2 * MIB);
        snprintf(line, sizeof line, "pread of 2 MiB into pinned memory, %d threads", threads);
        report(line, begun, size);
    }
}

static void measure_two_threads(void) {
    remap();
    double begun = now();
    run_divided(2, register_range, 32 * MIB);
    report("register, 32 MiB at a time, 2 threads", begun, size);
    begun = now();
    run_divided(2, unregister_range, 32 * MIB);
    report("  unregister, 2 threads", begun, size);
    remap();
    register_range(0, size / 2, 32 * MIB);
    struct share both[2] = { { unregister_range, 0, size / 2, 32 * MIB }, { register_range, size / 2, size, 32 * MIB } };
    begun = now();
    run_threads(both, 2);
    report("register one half while the other is unregistered", begun, size / 2);
    unregister_range(size / 2, size, 32 * MIB);
}

/* ---- concurrent threads ------------------------------------------------------------------------------------------ */

static volatile int stop;
static size_t moved;

static void *reader(void *arg) {
    size_t bytes = 0, me = (size_t)arg;
    for (size_t at = me * 128 * MIB % size; !stop; at = (at + 2 * MIB) % (size - 2 * MIB), bytes += 2 * MIB)
        if (pread(fd, ring + me * 4 * MIB, 2 * MIB, at) != (ssize_t)(2 * MIB))
            die("pread");
    __atomic_add_fetch(&moved, bytes, __ATOMIC_RELAXED);
    return NULL;
}

static void measure_with_readers(int threads) {
    pthread_t t[MOST_THREADS];
    char line[100];
    remap();
    moved = 0, stop = 0;
    for (int i = 0; i < threads; i++)
        if (pthread_create(&t[i], NULL, reader, (void *)(size_t)i))
            die("pthread_create");
    usleep(20000);
    double begun = now();
    register_range(0, size, 32 * MIB);
    snprintf(line, sizeof line, "register, 32 MiB at a time, while %d threads pread 2 MiB", threads);
    report(line, begun, size);
    double took = now() - begun + 0.02;
    stop = 1;
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    printf("%-72s %26.1f GB/s\n", "  throughput of these threads", moved / took / 1e9);
    unregister_range(0, size, 32 * MIB);
}

static struct { const char *name; int which; double sum, most; size_t calls; } measured;

static void *caller(void *arg) {
    (void)arg;
    void *stream, *event;
    GPU(cuCtxSetCurrent(gpu.context));
    GPU(cuStreamCreate(&stream, 1));
    GPU(cuEventCreate(&event, 2));
    measured.sum = measured.most = measured.calls = 0;
    while (!stop) {
        double begun = now();
        switch (measured.which) {
        case 0: GPU(cuMemcpyHtoDAsync_v2(area, ring, 2 * MIB, stream)); break;
        case 1: GPU(cuMemcpyHtoDAsync_v2(area, ring, 64 << 10, stream)); break;
        case 2: GPU(cuEventRecord(event, stream)); break;
        case 3: gpu.cuEventQuery(event); break;
        }
        double took = now() - begun;
        measured.sum += took, measured.calls++;
        if (took > measured.most)
            measured.most = took;
        if (measured.which < 2)
            usleep(50);
    }
    GPU(cuStreamSynchronize(stream));
    return NULL;
}

/* Work of the other thread: `piece` bytes at a time, with a pause after each. */
static const struct { const char *name; void (*work)(size_t, size_t, size_t); size_t piece; unsigned pause; } loads[] = {
    { "nothing", NULL, 0, 0 },
    { "register 8 MiB at a time", register_range, 8 * MIB, 0 },
    { "register 32 MiB at a time", register_range, 32 * MIB, 0 },
    { "register 128 MiB at a time", register_range, 128 * MIB, 0 },
    { "register 64 MiB at a time, pauses of 30 us", register_range, 64 * MIB, 30 },
    { "unregister 64 MiB at a time", unregister_range, 64 * MIB, 0 },
    { "unregister 64 MiB at a time, pauses of 30 us", unregister_range, 64 * MIB, 30 },
    { "unregister 8 MiB at a time", unregister_range, 8 * MIB, 0 },
    { "unregister 8 MiB at a time, pauses of 30 us", unregister_range, 8 * MIB, 30 },
};

/* The time of a thread's calls while another thread works. */
static void measure_calls(void) {
    static const char *const names[] = { "queue a copy of 2 MiB", "queue a copy of 64 KiB", "record an event", "query an event" };
    for (int which = 0; which < 4; which++)
        for (size_t i = 0; i < sizeof loads / sizeof *loads; i++) {
            pthread_t t;
            size_t piece = loads[i].piece;
            remap();
            if (loads[i].work == unregister_range)
                register_range(0, size, piece);
            stop = 0, measured.which = which;
            if (pthread_create(&t, NULL, caller, NULL))
                die("pthread_create");
            usleep(30000);
            double begun = now();
            for (size_t at = 0; piece && at < size; at += piece) {
                loads[i].work(at, at + piece, piece);
                if (loads[i].pause)
                    usleep(loads[i].pause);
            }
            double took = now() - begun;
            stop = 1;
            pthread_join(t, NULL);
            if (loads[i].work == register_range)
                unregister_range(0, size, piece);
            printf("%-22s during: %-44s %6zu calls, %6.1f us each, %6.0f us at most; %5.1f ms\n", names[which], loads[i].name,
                   measured.calls, measured.sum / measured.calls * 1e6, measured.most * 1e6, took * 1e3);
            fflush(stdout);
        }
}

int main(int argc, char **argv) {
    char name[4096];
    if (argc < 2 || (argc > 2 && strncmp(argv[2], "size=", 5)))
        return fprintf(stderr, "usage: registering FOLDER [size=BYTES]\n"), 2;
    if (argc > 2)
        size = strtoull(argv[2] + 5, NULL, 0) / (128 * MIB) * (128 * MIB);
    gpu_open();
    snprintf(name, sizeof name, "%s/registering-XXXXXX", argv[1]);
    if (size == 0 || (fd = mkstemp(name)) < 0 || unlink(name))
        die(name);
    ring = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ring == MAP_FAILED)
        die("mmap");
    madvise(ring, 64 * MIB, MADV_HUGEPAGE);
    memset(ring, 7, 64 * MIB);
    GPU(cuMemHostRegister_v2(ring, 64 * MIB, PORTABLE));
    GPU(cuMemAlloc_v2(&area, 64 * MIB));
    for (size_t at = 0; at < size; at += 64 * MIB)
        if (pwrite(fd, ring, 64 * MIB, at) != (ssize_t)(64 * MIB))
            die("pwrite");
    measure_alone();
    measure_two_threads();
    for (int threads = 1; threads <= 4; threads++)
        measure_with_readers(threads);
    measure_calls();
    return 0;
}
