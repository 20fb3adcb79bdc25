/* What it costs that several threads make pinned memory at once, as the threads of a first long read do.
 *
 *   growing
 *
 * Each thread maps its own memory and registers it with the driver: 2 or 8 MiB, in small or huge pages, which the driver
 * makes or the thread itself before. The last rows: the same memory made by all threads and registered with one call.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>

#include "../common/gpu.h"
#include "../common/measure.h"

#define MIB ((size_t)1 << 20)

enum { POPULATE_WRITE = 23, PORTABLE = 1, MOST_THREADS = 16 };

static size_t length;
static int populate, together;
static char *memory;
static pthread_barrier_t ready;
static double populating[MOST_THREADS], registering[MOST_THREADS];

static void *grow(void *which) {
    size_t i = (size_t)which;
    GPU(cuCtxSetCurrent(gpu.context));
    pthread_barrier_wait(&ready);
    char *own = memory + i * length;
    double start = now();
    if (populate)
        madvise(own, length, POPULATE_WRITE);
    populating[i] = now() - start;
    if (!together)
        GPU(cuMemHostRegister_v2(own, length, PORTABLE));
    registering[i] = now() - start - populating[i];
    return NULL;
}

static void measure(int threads, int huge) {
    size_t all = threads * length, align = 2 * MIB;
    char *map = mmap(NULL, all + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        die("mmap");
    memory = (char *)(((uintptr_t)map + align - 1) & ~(uintptr_t)(align - 1));
    madvise(memory, all, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    pthread_t thread[MOST_THREADS];
    pthread_barrier_init(&ready, NULL, threads + 1);
    for (size_t i = 0; i < (size_t)threads; i++)
        if (pthread_create(&thread[i], NULL, grow, (void *)i))
            die("pthread_create");
    pthread_barrier_wait(&ready);
    double start = now(), made = 0, registered = 0;
    for (int i = 0; i < threads; i++) {
        pthread_join(thread[i], NULL);
        made += populating[i] / threads;
        registered += registering[i] / threads;
    }
    double one = now();
    if (together)
        GPU(cuMemHostRegister_v2(memory, all, PORTABLE));
    registered += together ? now() - one : 0;
    printf("%2d threads, %zu MiB each, %s pages made by %s, registered %s: all after %5.2f ms; pages %5.2f, registering %5.2f a thread\n",
           threads, length / MIB, huge ? "huge " : "small", populate ? "the thread" : "the driver",
           together ? "with one call" : "by each", (now() - start) * 1e3, made * 1e3, registered * 1e3);
    for (int i = 0; i < (together ? 1 : threads); i++)
        GPU(cuMemHostUnregister(memory + i * length));
    munmap(map, all + align);
}

int main(void) {
    gpu_open();
    static const int threads[] = { 1, 4, 8, 12 };
    for (together = 0; together < 2; together++)
        for (int huge = together; huge < 2; huge++)
            for (populate = together; populate < 2; populate++)
                for (length = 2 * MIB; length <= 8 * MIB; length *= 4)
                    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++)
                        measure(threads[i], huge);
    return 0;
}
