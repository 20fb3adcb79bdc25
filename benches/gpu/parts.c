/* The cost of each part of a 4 KiB read while copies are in flight: parts FILE
 *
 * Prints one line per variant. "queued": the time the program observes; "done": until the device has all bytes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../common/gpu.h"
#include "../common/measure.h"

#define MIB ((size_t)1 << 20)

enum { QUERY = 1, CAPTURE = 2, CONTEXT = 4, CLOCK = 8, NO_READ = 16, NO_COPY = 32 };
enum { READS = 60000, LENGTH = 4096, BLOCKS = 64 };

static struct {
    int (*attributes)(unsigned, const int *, void **, gpu_ptr);
    int (*capturing)(void *, int *);
    int (*id)(void *, unsigned long long *);
    int (*current)(void **);
    int (*create)(void **, unsigned);
    int (*record)(void *, void *);
    int (*wait)(void *);
} more;
static gpu_ptr area;
static char *ring;
static void *event[BLOCKS];
static int fd;

static void run(const char *name, int with, size_t size) {
    size_t at = 0, block = 2 * MIB;
    int used[BLOCKS] = { 0 }, kind, ordinal, status;
    unsigned managed;
    size_t length;
    gpu_ptr start;
    unsigned long long id;
    void *context;
    const int which[7] = { 2, 1, 9, 11, 12, 8, 7 };
    void *into[7] = { &kind, &context, &ordinal, &start, &length, &managed, &id };
    GPU(cuCtxSynchronize());
    double begun = now(), waited = 0;
    for (size_t i = 0; i < READS; i++) {
        gpu_ptr to = area + i % 4096 * LENGTH;
        if (with & QUERY)
            more.attributes(7, which, into, to);
        if (with & CAPTURE)
            more.capturing(NULL, &status);
        for (int k = 0; with & CONTEXT && k < 3; k++)
            more.id(gpu.context, &id), more.current(&context);
        for (int k = 0; with & CLOCK && k < 4; k++)
            (void)now();
        size_t in = at % size;
        if (in % block == 0 && used[in / block]) {
            double w = now();
            more.wait(event[in / block]);
            waited += now() - w;
        }
        if (!(with & NO_READ) && pread(fd, ring + in, LENGTH, i * LENGTH) != LENGTH)
            exit(5);
        if (!(with & NO_COPY))
            GPU(cuMemcpyHtoDAsync_v2(to, ring + in, LENGTH, NULL));
        at += LENGTH;
        if (at % block == 0) {
            size_t filled = (at - 1) % size / block;
            more.record(event[filled], NULL);
            used[filled] = 1;
        }
    }
    double queued = now() - begun;
    GPU(cuCtxSynchronize());
    printf("%-34s ring %3zu MiB: %5.0f ns per read queued, %5.0f done, %5.0f waiting for the ring\n", name, size / MIB,
           queued / READS * 1e9, (now() - begun) / READS * 1e9, waited / READS * 1e9);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc < 2 || (fd = open(argv[1], O_RDONLY)) < 0)
        return fprintf(stderr, "usage: parts FILE (at least 240 MB)\n"), 2;
    gpu_open();
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    more.attributes = (int (*)(unsigned, const int *, void **, gpu_ptr))dlsym(driver, "cuPointerGetAttributes");
    more.capturing = (int (*)(void *, int *))dlsym(driver, "cuStreamIsCapturing");
    more.id = (int (*)(void *, unsigned long long *))dlsym(driver, "cuCtxGetId");
    more.current = (int (*)(void **))dlsym(driver, "cuCtxGetCurrent");
    more.create = (int (*)(void **, unsigned))dlsym(driver, "cuEventCreate");
    more.record = (int (*)(void *, void *))dlsym(driver, "cuEventRecord");
    more.wait = (int (*)(void *))dlsym(driver, "cuEventSynchronize");
    GPU(cuMemAlloc_v2(&area, 64 * MIB));
    for (int i = 0; i < BLOCKS; i++)
        more.create(&event[i], 2);
    for (int slabs = 0; slabs < 2; slabs++) {
        ring = mmap(NULL, 128 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(ring, 128 * MIB, MADV_HUGEPAGE);
        if (!slabs)
            memset(ring, 1, 128 * MIB);
        for (size_t o = 0, step = slabs ? 8 * MIB : 128 * MIB; o < 128 * MIB; o += step)
            GPU(cuMemHostRegister_v2(ring + o, step, 1));
        printf("ring registered %s\n", slabs ? "in slabs of 8 MiB, not touched before" : "as a whole, touched before");
        run("pread only", NO_COPY, 8 * MIB);
        run("copy only", NO_READ, 8 * MIB);
        run("pread + copy", 0, 4 * MIB);
        run("pread + copy", 0, 8 * MIB);
        run("pread + copy", 0, 32 * MIB);
        run("pread + copy", 0, 128 * MIB);
        run("+ pointer query", QUERY, 128 * MIB);
        run("+ is the stream captured", CAPTURE, 128 * MIB);
        run("+ 3 x context ID, current context", CONTEXT, 128 * MIB);
        run("+ 4 clock readings", CLOCK, 128 * MIB);
        run("+ all of these", QUERY | CAPTURE | CONTEXT | CLOCK, 128 * MIB);
        run("+ all of these", QUERY | CAPTURE | CONTEXT | CLOCK, 8 * MIB);
    }
    return 0;
}
