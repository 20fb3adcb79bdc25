/* Writes GPU memory to a file: with plain pwrite, as a program without SPIN must, or as fast as the machine can.
 *
 *   writes ROW MODE FILE [name=value ...]     prints one line of JSON
 *
 *   row      what is done                                        modes
 *   page     total bytes in sequence into the page cache,        us, plain (cudaMemcpy into malloc, pwrite),
 *            block by block; over=1: over cached pages             pinned (the same through pinned memory),
 *                                                                  alone (pwrite from pinned memory, nothing copied)
 *   direct   total bytes through an O_DIRECT descriptor,         us, limit (from pinned memory, nothing copied)
 *            in calls of 'block' bytes from 'threads' threads
 *
 * "us": this program calls pwrite with a device address; valid only with LD_PRELOAD=libspinio.so.
 * FILE is created, and removed at the end. CPU time is user + system of the whole process.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "../common/rows.h"

#define AREA (64 * MIB) /* of random bytes */

static struct {
    size_t block, total, threads, over;
} arg = { .block = 8 * MIB, .total = 2048 * MIB, .threads = 1 };
static int fd;
static unsigned char *bytes; /* AREA bytes; the device has them repeatedly */

static void write_all(int to, const void *from, size_t size, off_t at) {
    const char *p = from;
    while (size) {
        ssize_t n = pwrite(to, p, size, at);
        if (n <= 0)
            fail("pwrite");
        p += n, at += n, size -= n;
    }
}

/* Device memory of a size, filled with `bytes` as the file has them from offset `at`. */
static gpu_ptr device(size_t size, off_t at) {
    gpu_ptr p;
    GPU(cuMemAlloc_v2(&p, size));
    for (size_t o = 0; o < size;) {
        size_t from = (at + o) % AREA, n = AREA - from < size - o ? AREA - from : size - o;
        GPU(cuMemcpyHtoD_v2(p + o, bytes + from, n));
        o += n;
    }
    GPU(cuCtxSynchronize());
    return p;
}

/* Whether the file has the device's bytes; compares samples. */
static int right(void) {
    static unsigned char have[64 << 10];
    unsigned long x = 88172645463325252ul;
    int file = open(request.file, O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < 200; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        size_t o = i == 0 ? 0 : x % (arg.total / 4096) * 4096, n = sizeof have;
        if (o % AREA + n > AREA || o + n > arg.total)
            n = 4096;
        if (pread(file, have, n, o) != (ssize_t)n || memcmp(have, bytes + o % AREA, n))
            return 0;
    }
    close(file);
    return 1;
}

static void print_row(double t, double c, int looked) {
    printf("{\"row\":\"%s\",\"mode\":\"%s\",\"block\":%zu,\"threads\":%zu,\"over\":%zu,\"bytes\":%zu,\"seconds\":%.6f,"
           "\"gbps\":%.3f,\"cpu\":%.4f,\"cpu_per_gb\":%.4f,\"right\":%s}\n",
           request.row, request.mode, arg.block, arg.threads, arg.over, arg.total, t, arg.total / t / 1e9, c,
           c / (arg.total / 1e9), !looked ? "null" : right() ? "true" : "false");
}

/* Allocates all of the file, so that no block is allocated during the measurement. */
static void fill(int direct) {
    int to = open(request.file, O_WRONLY | (direct ? O_DIRECT : 0) | O_CLOEXEC);
    char *zeros = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(zeros, 0, 8 * MIB);
    for (size_t o = 0; o < arg.total; o += 8 * MIB)
        write_all(to, zeros, arg.total - o < 8 * MIB ? arg.total - o : 8 * MIB, o);
    if (direct)
        fsync(to);
    munmap(zeros, 8 * MIB);
    close(to);
}

static void row_page(void) {
    gpu_ptr from = device(AREA, 0);
    char *ordinary = malloc(arg.block), *fixed = pinned(arg.block);
    memset(ordinary, 1, arg.block);
    if (is("us")) /* threads, bounce buffers, the first touch of everything */
        for (int i = 0; i < 8; i++)
            write_all(fd, (void *)from, arg.block, 0);
    if (arg.over)
        fill(0);
    else if (ftruncate(fd, 0))
        fail("ftruncate");
    GPU(cuCtxSynchronize());
    double c = cpu(), t = now();
    for (size_t o = 0; o < arg.total; o += arg.block) {
        gpu_ptr at = from + o % AREA;
        if (is("us")) {
            write_all(fd, (void *)at, arg.block, o);
        } else if (is("alone")) {
            write_all(fd, fixed, arg.block, o);
        } else {
            char *host = is("plain") ? ordinary : fixed;
            GPU(cuMemcpyDtoH_v2(host, at, arg.block));
            write_all(fd, host, arg.block, o);
        }
    }
    t = now() - t;
    print_row(t, cpu() - c, !is("alone"));
}

static size_t next_block;
static pthread_barrier_t gate;
static void *writer(void *unused) {
    (void)unused;
    GPU(cuCtxSetCurrent(gpu.context));
    int us = is("us");
    size_t room = arg.block < AREA ? AREA : arg.block;
    gpu_ptr from = us ? device(room, 0) : 0;
    char *host = us ? NULL : pinned(arg.block);
    if (us)
        write_all(fd, (void *)from, arg.block < 16 * MIB ? arg.block : 16 * MIB, 0);
    pthread_barrier_wait(&gate);
    pthread_barrier_wait(&gate);
    for (;;) {
        size_t o = __atomic_fetch_add(&next_block, arg.block, __ATOMIC_RELAXED);
        if (o >= arg.total)
            break;
        if (us)
            write_all(fd, (void *)(from + (arg.block < AREA ? o % AREA : 0)), arg.block, o);
        else
            write_all(fd, host, arg.block, o);
    }
    pthread_barrier_wait(&gate);
    return NULL;
}

static void row_direct(void) {
    pthread_t t[64];
    close(fd);
    fill(1);
    fd = open(request.file, O_WRONLY | O_DIRECT | O_CLOEXEC);
    pthread_barrier_init(&gate, NULL, arg.threads + 1);
    for (size_t i = 0; i < arg.threads; i++)
        pthread_create(&t[i], NULL, writer, NULL);
    pthread_barrier_wait(&gate);
    double c = cpu(), began = now();
    pthread_barrier_wait(&gate);
    pthread_barrier_wait(&gate);
    began = now() - began;
    print_row(began, cpu() - c, is("us"));
    for (size_t i = 0; i < arg.threads; i++)
        pthread_join(t[i], NULL);
}

int main(int argc, char **argv) {
    static const struct option options[] = { { "block", &arg.block, NULL },
                                             { "total", &arg.total, NULL },
                                             { "threads", &arg.threads, NULL },
                                             { "over", &arg.over, NULL } };
    static const struct row rows[] = { { "page", row_page }, { "direct", row_direct } };
    parse_args(argc, argv, options, COUNT(options));
    if (!arg.block)
        return 2;
    arg.total = arg.total / arg.block * arg.block;
    /* A block never crosses the end of the area, or is a multiple of it. */
    if ((AREA % arg.block && arg.block % AREA) || !arg.threads || arg.threads > 64)
        return 2;
    gpu_open();
    bytes = malloc(AREA);
    unsigned long x = 0x9e3779b97f4a7c15ul;
    for (size_t i = 0; i < AREA; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        memcpy(bytes + i, &x, 8);
    }
    unlink(request.file);
    fd = open(request.file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        fail(request.file);
    int status = measure(rows, COUNT(rows));
    close(fd);
    unlink(request.file);
    return status;
}
