/* What registering pages of the page cache with the driver costs, and what it does to who works beside it.
 *
 *   registering FOLDER [size=BYTES]
 *
 * Makes a file in FOLDER (2 GiB; gone at the end), has it in the page cache, and prints a line a measurement: nanoseconds
 * for each page of 4 KiB, and the bandwidth that this would be. Then how long calls of another thread take meanwhile.
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

static void fresh(void) {
    if (map)
        munmap(map, size);
    if ((map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED)
        die("mmap");
}

static void take(size_t from, size_t to, size_t piece) {
    GPU(cuCtxSetCurrent(gpu.context));
    for (size_t at = from; at < to; at += piece)
        GPU(cuMemHostRegister_v2(map + at, at + piece < to ? piece : to - at, READ_ONLY));
}

static void give_back(size_t from, size_t to, size_t piece) {
    GPU(cuCtxSetCurrent(gpu.context));
    for (size_t at = from; at < to; at += piece)
        GPU(cuMemHostUnregister(map + at));
}

static void populate(size_t from, size_t to, size_t piece) {
    for (size_t at = from; at < to; at += piece)
        if (madvise(map + at, at + piece < to ? piece : to - at, POPULATE_READ))
            die("MADV_POPULATE_READ");
}

static void copy(size_t from, size_t to, size_t piece) {
    for (size_t at = from; at < to; at += piece)
        if (pread(fd, ring + at % (64 * MIB), piece, at) != (ssize_t)piece)
            die("pread");
}

/* ---- threads ------------------------------------------------------------------------------------------------------ */

struct share {
    void (*what)(size_t from, size_t to, size_t piece);
    size_t from, to, piece;
};

static void *one(void *arg) {
    struct share *s = arg;
    s->what(s->from, s->to, s->piece);
    return NULL;
}

static void together(struct share *shares, int count) {
    pthread_t threads[MOST_THREADS];
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, one, &shares[i]))
            die("pthread_create");
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

static void divided(int threads, void (*what)(size_t, size_t, size_t), size_t piece) {
    struct share shares[MOST_THREADS];
    for (int i = 0; i < threads; i++)
        shares[i] = (struct share){ what, size / threads * i, size / threads * (i + 1), piece };
    together(shares, threads);
}

/* ---- what is printed ---------------------------------------------------------------------------------------------- */

static void say(const char *what, double begun, double bytes) {
    double t = now() - begun;
    printf("%-72s %6.1f ns a page  %6.1f GB/s\n", what, t / (bytes / PAGE) * 1e9, bytes / t / 1e9);
    fflush(stdout);
}

static void alone(void) {
    char line[100];
    double begun;
    for (size_t piece = 2 * MIB; piece <= 128 * MIB; piece *= 4) {
        fresh();
        begun = now();
        take(0, size, piece);
        snprintf(line, sizeof line, "register, fresh mapping, %zu MiB at a time", piece / MIB);
        say(line, begun, size);
        begun = now();
        give_back(0, size, piece);
        say("  give back", begun, size);
    }
    fresh();
    begun = now();
    populate(0, size, 32 * MIB);
    say("fill page tables, fresh mapping", begun, size);
    begun = now();
    take(0, size, 32 * MIB);
    say("  then register, 32 MiB at a time", begun, size);
    give_back(0, size, 32 * MIB);
    for (int threads = 1; threads <= MOST_THREADS; threads *= 2) {
        begun = now();
        divided(threads, copy, 2 * MIB);
        snprintf(line, sizeof line, "pread of 2 MiB into pinned memory, %d threads", threads);
        say(line, begun, size);
    }
}

static void two_at_once(void) {
    fresh();
    double begun = now();
    divided(2, take, 32 * MIB);
    say("register, 32 MiB at a time, 2 threads", begun, size);
    begun = now();
    divided(2, give_back, 32 * MIB);
    say("  give back, 2 threads", begun, size);
    fresh();
    take(0, size / 2, 32 * MIB);
    struct share both[2] = { { give_back, 0, size / 2, 32 * MIB }, { take, size / 2, size, 32 * MIB } };
    begun = now();
    together(both, 2);
    say("register one half while the other is given back", begun, size / 2);
    give_back(size / 2, size, 32 * MIB);
}

/* ---- beside others ------------------------------------------------------------------------------------------------ */

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

static void beside(int threads) {
    pthread_t t[MOST_THREADS];
    char line[100];
    fresh();
    moved = 0, stop = 0;
    for (int i = 0; i < threads; i++)
        if (pthread_create(&t[i], NULL, reader, (void *)(size_t)i))
            die("pthread_create");
    usleep(20000);
    double begun = now();
    take(0, size, 32 * MIB);
    snprintf(line, sizeof line, "register, 32 MiB at a time, beside %d threads that pread 2 MiB", threads);
    say(line, begun, size);
    double took = now() - begun + 0.02;
    stop = 1;
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    printf("%-72s %26.1f GB/s\n", "  and these moved", moved / took / 1e9);
    give_back(0, size, 32 * MIB);
}

static struct { const char *name; int which; double sum, most; size_t calls; } asked;

static void *caller(void *arg) {
    (void)arg;
    void *stream, *event;
    GPU(cuCtxSetCurrent(gpu.context));
    GPU(cuStreamCreate(&stream, 1));
    GPU(cuEventCreate(&event, 2));
    asked.sum = asked.most = asked.calls = 0;
    while (!stop) {
        double begun = now();
        switch (asked.which) {
        case 0: GPU(cuMemcpyHtoDAsync_v2(area, ring, 2 * MIB, stream)); break;
        case 1: GPU(cuMemcpyHtoDAsync_v2(area, ring, 64 << 10, stream)); break;
        case 2: GPU(cuEventRecord(event, stream)); break;
        case 3: gpu.cuEventQuery(event); break;
        }
        double took = now() - begun;
        asked.sum += took, asked.calls++;
        if (took > asked.most)
            asked.most = took;
        if (asked.which < 2)
            usleep(50);
    }
    GPU(cuStreamSynchronize(stream));
    return NULL;
}

/* What the other thread does meanwhile, so many bytes at a time with a pause behind each. */
static const struct { const char *name; void (*what)(size_t, size_t, size_t); size_t piece; unsigned pause; } others[] = {
    { "nothing", NULL, 0, 0 },
    { "register 8 MiB at a time", take, 8 * MIB, 0 },
    { "register 32 MiB at a time", take, 32 * MIB, 0 },
    { "register 128 MiB at a time", take, 128 * MIB, 0 },
    { "register 64 MiB at a time, 30 us between", take, 64 * MIB, 30 },
    { "give back 64 MiB at a time", give_back, 64 * MIB, 0 },
    { "give back 64 MiB at a time, 30 us between", give_back, 64 * MIB, 30 },
    { "give back 8 MiB at a time", give_back, 8 * MIB, 0 },
    { "give back 8 MiB at a time, 30 us between", give_back, 8 * MIB, 30 },
};

/* How long calls of a thread take beside another one. */
static void calls(void) {
    static const char *const names[] = { "queue a copy of 2 MiB", "queue a copy of 64 KiB", "record an event", "ask an event" };
    for (int which = 0; which < 4; which++)
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            pthread_t t;
            size_t piece = others[i].piece;
            fresh();
            if (others[i].what == give_back)
                take(0, size, piece);
            stop = 0, asked.which = which;
            if (pthread_create(&t, NULL, caller, NULL))
                die("pthread_create");
            usleep(30000);
            double begun = now();
            for (size_t at = 0; piece && at < size; at += piece) {
                others[i].what(at, at + piece, piece);
                if (others[i].pause)
                    usleep(others[i].pause);
            }
            double took = now() - begun;
            stop = 1;
            pthread_join(t, NULL);
            if (others[i].what == take)
                give_back(0, size, piece);
            printf("%-22s beside: %-42s %6zu calls, %6.1f us each, %6.0f us the longest; %5.1f ms\n", names[which], others[i].name,
                   asked.calls, asked.sum / asked.calls * 1e6, asked.most * 1e6, took * 1e3);
            fflush(stdout);
        }
}

int main(int argc, char **argv) {
    char name[4096];
    if (argc < 2 || (argc > 2 && strncmp(argv[2], "size=", 5)))
        return fprintf(stderr, "registering FOLDER [size=BYTES]\n"), 2;
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
    alone();
    two_at_once();
    for (int threads = 1; threads <= 4; threads++)
        beside(threads);
    calls();
    return 0;
}
