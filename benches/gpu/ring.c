/* How a ring with a kernel thread (io_uring, SQPOLL) reads storage into the GPU, against O_DIRECT pread and a copy.
 *
 *   ring FOLDER [size=BYTES] [count=READS]  [memory=0|1|2] [buffers=N]
 *
 * Makes a file in FOLDER (4 GiB; removed at the end) that is not in the page cache, reads blocks of it at random into device
 * memory, each way by turns in random order, and prints the median time of each way, its least time and the rate that the
 * mean time corresponds to. buffers: of 8 MiB each, taken in turn. memory: 0 of cuMemHostAlloc, 1 registered huge pages, 2 registered small pages.
 * Ways:
 *   pread    one O_DIRECT pread into pinned memory, then a copy
 *   N        N reads in the ring, published one by one; each is copied when it is over
 *   Nb       the same, published at once
 *   Nf, Nbf  with buffers that are registered with the ring
 *   Nh       N reads of half a piece each, with holes between them: half of the bytes
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../common/gpu.h"
#include "../common/measure.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

enum { ENTRIES = 128, MOST_READS = 4096, IDLE_MS = 2000 };

/* ---- the ring ---------------------------------------------------------------------------------------------------- */

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_flags, *cq_head, *cq_tail, *cq_mask, *sq_array;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *done;
} ring;

static void open_ring(int file, void *buffer, size_t len) {
    struct io_uring_params p = { .flags = IORING_SETUP_SQPOLL, .sq_thread_idle = IDLE_MS };
    if ((ring.fd = syscall(SYS_io_uring_setup, ENTRIES, &p)) < 0)
        die("io_uring_setup");
    size_t size = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    size_t sq_size = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    char *map = mmap(NULL, size > sq_size ? size : sq_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
    ring.entries = mmap(NULL, p.sq_entries * sizeof *ring.entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    if (map == MAP_FAILED || ring.entries == MAP_FAILED)
        die("mmap of the ring");
    ring.sq_tail = (unsigned *)(map + p.sq_off.tail), ring.sq_mask = (unsigned *)(map + p.sq_off.ring_mask);
    ring.sq_flags = (unsigned *)(map + p.sq_off.flags), ring.sq_array = (unsigned *)(map + p.sq_off.array);
    ring.cq_head = (unsigned *)(map + p.cq_off.head), ring.cq_tail = (unsigned *)(map + p.cq_off.tail);
    ring.cq_mask = (unsigned *)(map + p.cq_off.ring_mask), ring.done = (struct io_uring_cqe *)(map + p.cq_off.cqes);
    for (unsigned i = 0; i < p.sq_entries; i++)
        ring.sq_array[i] = i;
    if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES, &file, 1))
        die("IORING_REGISTER_FILES");
    struct iovec whole = { buffer, len };
    if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &whole, 1))
        die("IORING_REGISTER_BUFFERS");
}

static unsigned tail;

static void fill_entry(void *to, size_t len, off_t at, unsigned token, int fixed) {
    struct io_uring_sqe *e = &ring.entries[tail++ & *ring.sq_mask];
    *e = (struct io_uring_sqe) { .opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ, .flags = IOSQE_FIXED_FILE,
        .fd = 0, .off = at, .addr = (uintptr_t)to, .len = len, .user_data = token };
}

static void publish(void) {
    __atomic_store_n(ring.sq_tail, tail, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(ring.sq_flags, __ATOMIC_RELAXED) & IORING_SQ_NEED_WAKEUP)
        syscall(SYS_io_uring_enter, ring.fd, 0, 0, IORING_ENTER_SQ_WAKEUP, NULL, 0);
}

static unsigned next_done(int want) {
    unsigned head = *ring.cq_head;
    while (__atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) == head)
        __builtin_ia32_pause();
    struct io_uring_cqe *c = &ring.done[head & *ring.cq_mask];
    unsigned token = c->user_data;
    if (c->res != want) {
        errno = c->res < 0 ? -c->res : EIO;
        die("read in the ring");
    }
    __atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
    return token;
}

/* ---- the ways ---------------------------------------------------------------------------------------------------- */

struct way { const char *name; unsigned pieces; int batch, fixed, holes; };
static const struct way ways[] = {
    { "pread", 0, 0, 0, 0 },
    { "1", 1, 0, 0, 0 }, { "2", 2, 0, 0, 0 }, { "4", 4, 0, 0, 0 }, { "8", 8, 0, 0, 0 },
    { "2b", 2, 1, 0, 0 }, { "4b", 4, 1, 0, 0 }, { "8b", 8, 1, 0, 0 },
    { "1f", 1, 0, 1, 0 }, { "4f", 4, 0, 1, 0 }, { "8bf", 8, 1, 1, 0 },
    { "1h", 1, 0, 0, 1 }, { "2h", 2, 0, 0, 1 }, { "4h", 4, 0, 0, 1 }, { "8h", 8, 0, 0, 1 }, { "16h", 16, 0, 0, 1 },
    { "32h", 32, 0, 0, 1 },
};
enum { WAYS = sizeof ways / sizeof *ways };

static int file;
static char *stage;
static size_t size = 4096 * MIB, count = 300, memory, buffers = 1;
static gpu_ptr device;

static void read_block(const struct way *way, size_t block, off_t at) {
    if (!way->pieces) {
        if (pread(file, stage, block, at) != (ssize_t)block)
            die("pread");
        GPU(cuMemcpyHtoDAsync_v2(device, stage, block, NULL));
    } else {
        size_t step = block / way->pieces, piece = step >> way->holes;
        for (unsigned i = 0; i < way->pieces; i++) {
            fill_entry(stage + i * step, piece, at + i * step, i, way->fixed);
            if (!way->batch)
                publish();
        }
        if (way->batch)
            publish();
        for (unsigned i = 0; i < way->pieces; i++) {
            size_t from = next_done(piece) * step;
            GPU(cuMemcpyHtoDAsync_v2(device + from, stage + from, piece, NULL));
        }
    }
    GPU(cuCtxSynchronize());
}

/* Memory that reads go to, which the device can copy from. */
static char *pinned(void) {
    size_t len = buffers * 8 * MIB;
    void *at;
    if (memory == 0) {
        GPU(cuMemHostAlloc(&at, len, 1));
        return at;
    }
    if ((at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) == MAP_FAILED)
        die("mmap");
    if (madvise(at, len, memory == 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE))
        perror("madvise");
    memset(at, 1, len);
    GPU(cuMemHostRegister_v2(at, len, 1));
    return at;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: ring FOLDER [size=BYTES] [count=READS] [memory=0|1|2] [buffers=N]\n");
        return 2;
    }
    for (int i = 2; i < argc; i++)
        if (sscanf(argv[i], "size=%zu", &size) != 1 && sscanf(argv[i], "count=%zu", &count) != 1 &&
            sscanf(argv[i], "memory=%zu", &memory) != 1 && sscanf(argv[i], "buffers=%zu", &buffers) != 1) {
            fprintf(stderr, "ring: %s?\n", argv[i]);
            return 2;
        }
    if (count > MOST_READS)
        count = MOST_READS;
    char path[4096];
    snprintf(path, sizeof path, "%s/ring.XXXXXX", argv[1]);
    int make = mkstemp(path);
    if (make < 0)
        die(path);
    char *block = calloc(1, 8 * MIB);
    memset(block, 7, 8 * MIB);
    for (size_t at = 0; at < size; at += 8 * MIB)
        if (pwrite(make, block, 8 * MIB, at) != (ssize_t)(8 * MIB))
            die("pwrite");
    if (fsync(make) || posix_fadvise(make, 0, 0, POSIX_FADV_DONTNEED))
        die("fsync");
    if ((file = open(path, O_RDONLY | O_DIRECT)) < 0)
        die("open with O_DIRECT");
    unlink(path);
    gpu_open();
    char *memory_at = stage = pinned();
    GPU(cuMemAlloc_v2(&device, 8 * MIB));
    open_ring(file, stage, buffers * 8 * MIB);
    static const size_t sizes[] = { 256 * KIB, 512 * KIB, MIB, 4 * MIB, 8 * MIB };
    static double each[WAYS][MOST_READS];
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t reads = count * MIB / (sizes[s] > MIB ? sizes[s] : MIB);
        for (size_t r = 0; r < reads; r++) {
            size_t order[WAYS];
            shuffle(order, WAYS);
            for (unsigned i = 0; i < WAYS; i++) {
                stage = memory_at + (size_t)(r * WAYS + i) % buffers * 8 * MIB;
                double began = now();
                read_block(&ways[order[i]], sizes[s], random_below(size / sizes[s]) * sizes[s]);
                each[order[i]][r] = now() - began;
            }
        }
        for (unsigned w = 0; w < WAYS; w++) {
            double sum = 0;
            for (size_t r = 0; r < reads; r++)
                sum += each[w][r];
            double middle = median(each[w], reads);
            printf("%5zu KiB  %-5s  median %7.0f us  least %7.0f us  %5.2f GB/s\n", sizes[s] / KIB, ways[w].name, middle * 1e6,
                   each[w][0] * 1e6, sizes[s] * reads / sum / 1e9);
        }
        fflush(stdout);
    }
    return 0;
}
