/* Reads a file into GPU memory: with plain pread, as a program without SPIN must, or as fast as the machine can.
 *
 *   reads ROW MODE FILE [name=value ...]      prints one line of JSON per measurement
 *
 *   row     what is done                                   modes
 *   start   size bytes, once, as the process's first read  us, us1 (spinio_pread), plain
 *   big     the same after reads of another file           us, us1, plain, limit
 *   again   size bytes, 'times' times, all work counted    us, plain, limit
 *   seq     total bytes in sequence, block by block        us, plain
 *   trickle total bytes in sequence by each of threads     us, plain, direct (O_DIRECT, one block at a time)
 *           threads, one range after the other, starting
 *           at byte 'from': none of it in the page cache
 *   par     as seq, from threads threads                   us, plain
 *   cold    size bytes that are not in the page cache      us, plain, limit (O_DIRECT into pinned memory)
 *   mix     random 1 MiB reads of partly cached blocks     us, cached, random, direct
 *   first   the first device reads of a process            us
 *   beside  launches and copies of another thread while the file is read   us, plain, none (nothing beside)
 *   host    reads into host memory, with CUDA at work      us (or anything)
 *
 * "us": this program calls pread with a device address; valid only with LD_PRELOAD=libspinio.so.
 * CPU time is user + system of the whole process, taken after work deferred until after a return has had time to
 * finish.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../common/rows.h"

#define MAX_PREAD 0x7ffff000u /* the most that one pread moves */

static struct {
    size_t size, block, total, times, threads, count, from;
} arg = { .block = 8 * MIB, .times = 4, .threads = 16, .count = 150 };
static int fd;
static size_t file_size;

/* Reads until all bytes are read; exits on an error or an early end of file. */
static void read_all(int from, void *to, size_t size, off_t at) {
    char *p = to;
    while (size) {
        ssize_t n = pread(from, p, size < MAX_PREAD ? size : MAX_PREAD, at);
        if (n <= 0)
            fail("pread");
        p += n, at += n, size -= n;
    }
}

/* Whether size bytes of device memory at `at` equal the file's at `offset`; compares samples. */
static int right(gpu_ptr at, size_t size, off_t offset) {
    enum { SAMPLE = 64 << 10, SAMPLES = 34 };
    static char want[SAMPLE], have[SAMPLE];
    unsigned long x = 88172645463325252ul;
    for (int i = 0; i < SAMPLES; i++) {
        size_t n = size < SAMPLE ? size : SAMPLE;
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        size_t o = i == 0 ? 0 : i == 1 ? size - n : x % (size - n + 1);
        GPU(cuMemcpyDtoH_v2(have, at + o, n));
        read_all(fd, want, n, offset + o);
        if (memcmp(want, have, n))
            return 0;
    }
    return 1;
}

static double t0, c0;
static void begin(void) {
    GPU(cuCtxSynchronize());
    c0 = cpu();
    t0 = now();
}

/* Ends a measurement: wall time now, CPU time after deferred work is done. */
static void end(double bytes, int ok_at, gpu_ptr at, size_t size, off_t offset) {
    GPU(cuCtxSynchronize());
    double t = now() - t0;
    usleep(250000);
    double c = cpu() - c0;
    const char *ok = !ok_at ? "null" : right(at, size, offset) ? "true" : "false";
    printf("{\"row\":\"%s\",\"mode\":\"%s\",\"block\":%zu,\"threads\":%zu,\"bytes\":%.0f,\"seconds\":%.6f,\"gbps\":%.3f,"
           "\"cpu\":%.4f,\"cpu_per_gb\":%.4f,\"right\":%s}\n",
           request.row, request.mode, arg.block, arg.threads, bytes, t, bytes / t / 1e9, c, c / (bytes / 1e9), ok);
    fflush(stdout);
}

/* ---- large reads ------------------------------------------------------------------------------------------------ */

static char *host; /* for "plain": pageable memory */
static void plain_read(gpu_ptr to, size_t size, off_t at) {
    for (size_t o = 0; o < size; o += 8 * MIB) {
        size_t n = size - o < 8 * MIB ? size - o : 8 * MIB;
        read_all(fd, host, n, at + o);
        GPU(cuMemcpyHtoD_v2(to + o, host, n));
    }
}

/* Warm-up on another file, FILE.warm: starts threads, allocates bounce buffers, touches everything once. */
static void warm_up(gpu_ptr to, size_t room) {
    char name[4096];
    snprintf(name, sizeof name, "%s.warm", request.file);
    int other = open(name, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (other < 0 || fstat(other, &st)) {
        fprintf(stderr, "reads: no %s: the first read includes all one-time set-up\n", name);
        return;
    }
    size_t size = (size_t)st.st_size < room ? (size_t)st.st_size : room;
    for (int i = 0; i < 3; i++)
        read_all(other, (void *)to, size, 0);
    close(other);
    usleep(100000);
}

static int by_pread(void) { return is("us") || is("us1"); }

static void one_read(gpu_ptr to, size_t size) {
    if (is("us1")) {
        ssize_t (*spinio_pread)(int, void *, size_t, off_t) = spinio_function("spinio_pread");
        if (spinio_pread(fd, (void *)to, size, 0) != (ssize_t)size)
            fail("spinio_pread");
    } else if (is("plain")) {
        plain_read(to, size, 0);
    } else {
        read_all(fd, (void *)to, size, 0);
    }
}

/* The bandwidth of the link: 1 GiB copies from pinned memory. */
static void link_limit(gpu_ptr to, size_t size, size_t times) {
    size_t step = size < 1024 * MIB ? size : 1024 * MIB;
    char *from = pinned(step);
    GPU(cuMemcpyHtoD_v2(to, from, step));
    begin();
    for (size_t i = 0; i < times; i++)
        for (size_t o = 0; o < size; o += step)
            GPU(cuMemcpyHtoD_v2(to + o, from, size - o < step ? size - o : step));
    end((double)size * times, 0, 0, 0, 0);
}

static void row_big(void) {
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, arg.size));
    size_t times = strcmp(request.row, "again") == 0 ? arg.times : 1;
    if (is("limit")) {
        link_limit(to, arg.size, times);
        return;
    }
    if (by_pread() && strcmp(request.row, "start") != 0)
        warm_up(to, arg.size);
    GPU(cuMemsetD8_v2(to, 0, arg.size));
    begin();
    for (size_t i = 0; i < times; i++)
        one_read(to, arg.size);
    end((double)arg.size * times, 1, to, arg.size, 0);
}

/* ---- block by block --------------------------------------------------------------------------------------------- */

static void row_seq(void) {
    size_t area = arg.block > 64 * MIB ? arg.block : 64 * MIB / arg.block * arg.block;
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, area));
    size_t total = arg.total / arg.block * arg.block, o = 0;
    int plain = !is("us");
    for (int warm = 0; warm < 4; warm++) /* threads, bounce buffers, the first touch of everything */
        plain ? plain_read(to, arg.block, 0) : read_all(fd, (void *)to, arg.block, 0);
    begin();
    for (; o < total; o += arg.block) {
        if (plain) {
            read_all(fd, host, arg.block, o);
            GPU(cuMemcpyHtoD_v2(to + o % area, host, arg.block));
        } else {
            read_all(fd, (void *)(to + o % area), arg.block, o);
        }
    }
    end(total, 1, to + (o - arg.block) % area, arg.block, o - arg.block);
}

static size_t next_block;
static pthread_barrier_t gate;
static void *reader(void *area) {
    gpu_ptr to = (gpu_ptr)area;
    GPU(cuCtxSetCurrent(gpu.context));
    char *mine = malloc(arg.block);
    memset(mine, 1, arg.block);
    int plain = is("plain");
    if (!plain)
        read_all(fd, (void *)to, arg.block, 0);
    pthread_barrier_wait(&gate);
    pthread_barrier_wait(&gate);
    for (;;) {
        size_t o = __atomic_fetch_add(&next_block, arg.block, __ATOMIC_RELAXED);
        if (o >= arg.total)
            break;
        if (plain) {
            read_all(fd, mine, arg.block, o);
            GPU(cuMemcpyHtoD_v2(to, mine, arg.block));
        } else {
            read_all(fd, (void *)to, arg.block, o);
        }
    }
    pthread_barrier_wait(&gate);
    free(mine);
    return NULL;
}

static void row_par(void) {
    pthread_t t[64];
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, arg.threads * arg.block));
    arg.total = arg.total / arg.block * arg.block;
    pthread_barrier_init(&gate, NULL, arg.threads + 1);
    for (size_t i = 0; i < arg.threads; i++)
        pthread_create(&t[i], NULL, reader, (void *)(to + i * arg.block));
    pthread_barrier_wait(&gate);
    begin();
    pthread_barrier_wait(&gate);
    pthread_barrier_wait(&gate);
    end(arg.total, 0, 0, 0, 0);
    for (size_t i = 0; i < arg.threads; i++)
        pthread_join(t[i], NULL);
}

/* ---- not cached ------------------------------------------------------------------------------------------------- */

/* Percent of a range that is in the page cache, by mincore on a mapping that is never touched. Owner or root only. */
static double resident(size_t at, size_t size) {
    static unsigned char map[(64 << 20) / 4096];
    size_t in = 0;
    for (size_t o = 0; o < size; o += 64 * MIB) {
        size_t n = size - o < 64 * MIB ? size - o : 64 * MIB, pages = (n + 4095) / 4096;
        void *p = mmap(NULL, n, PROT_READ, MAP_SHARED, fd, at + o);
        if (p == MAP_FAILED || mincore(p, n, map))
            fail("mincore");
        for (size_t i = 0; i < pages; i++)
            in += map[i] & 1;
        munmap(p, n);
    }
    return 100.0 * in * 4096 / size;
}

/* Reads its range from front to back, with a descriptor of its own. */
static gpu_ptr last_block; /* the last block of the first thread */
static void *sequential_reader(void *number) {
    size_t begins = arg.from + (size_t)number * arg.total, area = 16 * MIB / arg.block * arg.block;
    gpu_ptr to;
    GPU(cuCtxSetCurrent(gpu.context));
    GPU(cuMemAlloc_v2(&to, area));
    int plain = !is("us"), mine = open(request.file, O_RDONLY | O_CLOEXEC | (is("direct") ? O_DIRECT : 0));
    if (mine < 0)
        fail(request.file);
    char *memory = is("direct") ? pinned(arg.block) : malloc(arg.block);
    memset(memory, 1, arg.block);
    if (!plain)
        warm_up(to, arg.block);
    else
        GPU(cuMemcpyHtoD_v2(to, memory, arg.block));
    pthread_barrier_wait(&gate);
    pthread_barrier_wait(&gate);
    for (size_t o = 0; o < arg.total; o += arg.block) {
        gpu_ptr there = to + o % area;
        read_all(mine, plain ? memory : (void *)there, arg.block, begins + o);
        if (plain)
            GPU(cuMemcpyHtoD_v2(there, memory, arg.block));
        if (number == 0)
            last_block = there;
    }
    pthread_barrier_wait(&gate);
    close(mine);
    return NULL;
}

static void row_trickle(void) {
    pthread_t t[64];
    arg.total = arg.total / arg.block * arg.block;
    size_t all = arg.threads * arg.total;
    if (arg.threads > COUNT(t) || arg.block > 16 * MIB || arg.from + all > file_size) {
        fprintf(stderr, "reads trickle: too many threads, too large blocks, or more bytes than the file has\n");
        exit(2);
    }
    posix_fadvise(fd, arg.from, all, POSIX_FADV_DONTNEED);
    double left = resident(arg.from, all);
    if (left > 1)
        fprintf(stderr, "reads trickle: %.1f %% of the file stayed in the page cache\n", left);
    pthread_barrier_init(&gate, NULL, arg.threads + 1);
    for (size_t i = 0; i < arg.threads; i++)
        pthread_create(&t[i], NULL, sequential_reader, (void *)i);
    pthread_barrier_wait(&gate);
    begin();
    pthread_barrier_wait(&gate);
    pthread_barrier_wait(&gate);
    end(all, 1, last_block, arg.block, arg.from + arg.total - arg.block);
    for (size_t i = 0; i < arg.threads; i++)
        pthread_join(t[i], NULL);
}

static size_t next_chunk;
static void *direct_reader(void *slot) {
    int direct = open(request.file, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (direct < 0)
        fail("open O_DIRECT");
    for (;;) {
        size_t o = __atomic_fetch_add(&next_chunk, 4 * MIB, __ATOMIC_RELAXED);
        if (o >= arg.size)
            break;
        read_all(direct, slot, arg.size - o < 4 * MIB ? arg.size - o : 4 * MIB, o);
    }
    close(direct);
    return NULL;
}

static void row_cold(void) {
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, arg.size));
    if (by_pread() && strcmp(request.row, "start") != 0)
        warm_up(to, arg.size);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    double left = resident(0, arg.size);
    if (left > 1)
        fprintf(stderr, "reads cold: %.1f %% of the file stayed in the page cache\n", left);
    if (is("limit")) {
        pthread_t t[8];
        char *memory = pinned(8 * 4 * MIB);
        begin();
        for (int i = 0; i < 8; i++)
            pthread_create(&t[i], NULL, direct_reader, memory + i * 4 * MIB);
        for (int i = 0; i < 8; i++)
            pthread_join(t[i], NULL);
        end(arg.size, 0, 0, 0, 0);
        return;
    }
    begin();
    one_read(to, arg.size);
    end(arg.size, 1, to, arg.size, 0);
}

/* ---- partly cached ---------------------------------------------------------------------------------------------- */

enum { LEVELS = 16, IN_A_ROW = 11 };
/* Percent cached, and the length of a cached run. */
static const struct { int percent, run; } level[LEVELS] = {
    { 0, 65536 },  { 10, 65536 }, { 20, 65536 }, { 30, 65536 }, { 40, 65536 },  { 50, 65536 },
    { 60, 65536 }, { 70, 65536 }, { 80, 65536 }, { 90, 65536 }, { 100, 65536 }, { 1, 4096 },
    { 5, 4096 },   { 20, 4096 },  { 50, 4096 },  { 90, 4096 } };

/* The level of read i. The first read of a level is not counted: what it costs depends on the level before (a disk that was
 * idle takes longer). */
static size_t level_of(size_t i) {
    return i / IN_A_ROW % LEVELS;
}

static void row_mix(void) {
    /* Every third MiB is a block, so that pages read in past the end of one block do not change another. */
    size_t blocks = file_size / MIB / 3, used = LEVELS * arg.count;
    if (used > blocks)
        used = blocks;
    size_t *order = malloc(blocks * sizeof *order);
    seed = 20251121;
    shuffle(order, blocks);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    int quiet = open(request.file, O_RDONLY | O_CLOEXEC);
    posix_fadvise(quiet, 0, 0, POSIX_FADV_RANDOM);
    static char sink[MIB];
    for (size_t i = 0; i < used; i++) { /* runs are drawn without replacement */
        size_t l = level_of(i), at = order[i] * 3 * MIB, run = level[l].run, runs = MIB / run;
        size_t want = (runs * level[l].percent + random_below(100)) / 100;
        for (size_t r = 0; r < runs && want; r++)
            if (random_below(runs - r) < want) {
                read_all(quiet, sink, run, at + r * run);
                want--;
            }
    }
    int direct = open(request.file, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (is("random"))
        posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, MIB));
    char *stage = pinned(2 * MIB);
    if (by_pread())
        warm_up(to, MIB);
    double spent[LEVELS] = { 0 }, was[LEVELS] = { 0 };
    static double each[LEVELS][4096];
    size_t done[LEVELS] = { 0 };
    int ok = 1;
    for (size_t i = 0; i < used; i++) {
        size_t at = order[i] * 3 * MIB, l = level_of(i);
        double cached = resident(at, MIB);
        GPU(cuCtxSynchronize());
        double t = now();
        if (is("us")) {
            read_all(fd, (void *)to, MIB, at);
        } else if (is("direct")) {
            read_all(direct, stage, MIB, at);
            GPU(cuMemcpyHtoD_v2(to, stage, MIB));
        } else { /* through the page cache; each copy overlaps the next chunk's read */
            for (size_t o = 0; o < MIB; o += MIB / 4) {
                read_all(fd, stage + o, MIB / 4, at + o);
                GPU(cuMemcpyHtoDAsync_v2(to + o, stage + o, MIB / 4, NULL));
            }
        }
        GPU(cuCtxSynchronize());
        t = now() - t;
        if (i % 101 == 0)
            ok = ok && right(to, MIB, at);
        if (i % IN_A_ROW == 0)
            continue;
        was[l] += cached;
        spent[l] += t;
        if (done[l] < 4096)
            each[l][done[l]] = t;
        done[l]++;
    }
    for (int l = 0; l < LEVELS; l++) {
        size_t n = done[l] < 4096 ? done[l] : 4096;
        printf("{\"row\":\"mix\",\"mode\":\"%s\",\"percent\":%d,\"run\":%d,\"resident\":%.1f,\"reads\":%zu,\"gbps\":%.4f,"
               "\"median_us\":%.1f,\"right\":%s}\n",
               request.mode, level[l].percent, level[l].run, was[l] / done[l], done[l], done[l] * MIB / spent[l] / 1e9,
               median(each[l], n) * 1e6, ok ? "true" : "false");
    }
}

/* ---- latencies -------------------------------------------------------------------------------------------------- */

static void row_first(void) {
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, arg.block));
    GPU(cuCtxSynchronize());
    double us[8];
    for (int i = 0; i < 8; i++) {
        double t = now();
        read_all(fd, (void *)to, arg.block, 0);
        GPU(cuCtxSynchronize());
        us[i] = (now() - t) * 1e6;
    }
    printf("{\"row\":\"first\",\"mode\":\"%s\",\"block\":%zu,\"first_us\":%.1f,\"second_us\":%.1f,\"eighth_us\":%.1f,\"right\":%s}\n",
           request.mode, arg.block, us[0], us[1], us[7], right(to, arg.block, 0) ? "true" : "false");
}

/* What another thread of the program experiences. */
enum { MOST_CALLS = 1 << 16, SMALL_COPY = 64 << 10, PAUSE_US = 100 };
static struct { double us[MOST_CALLS]; size_t count; } launches, copies;
static volatile int reading;

static void *call_beside(void *unused) {
    (void)unused;
    GPU(cuCtxSetCurrent(gpu.context));
    void *stream;
    gpu_ptr to;
    char *from = pinned(SMALL_COPY);
    GPU(cuMemAlloc_v2(&to, SMALL_COPY));
    GPU(cuStreamCreate(&stream, 1));
    while (reading) {
        double t = now();
        GPU(cuMemsetD8Async(to, 1, 4, stream));
        GPU(cuStreamSynchronize(stream));
        if (launches.count < MOST_CALLS)
            launches.us[launches.count++] = (now() - t) * 1e6;
        t = now();
        GPU(cuMemcpyHtoDAsync_v2(to, from, SMALL_COPY, stream));
        GPU(cuStreamSynchronize(stream));
        if (copies.count < MOST_CALLS)
            copies.us[copies.count++] = (now() - t) * 1e6;
        usleep(PAUSE_US);
    }
    return NULL;
}

static void row_beside(void) {
    gpu_ptr to;
    GPU(cuMemAlloc_v2(&to, arg.size));
    if (by_pread() && strcmp(request.row, "start") != 0)
        warm_up(to, arg.size);
    reading = 1;
    pthread_t thread;
    pthread_create(&thread, NULL, call_beside, NULL);
    usleep(100000); /* its first calls */
    launches.count = copies.count = 0;
    double began = now();
    for (size_t i = 0; i < arg.times; i++)
        if (is("none"))
            usleep(250000);
        else if (is("plain"))
            plain_read(to, arg.size, 0);
        else
            one_read(to, arg.size);
    GPU(cuCtxSynchronize());
    double took = now() - began;
    reading = 0;
    pthread_join(thread, NULL);
    /* median() sorts. */
    double launch = median(launches.us, launches.count), copy = median(copies.us, copies.count);
    printf("{\"row\":\"beside\",\"mode\":\"%s\",\"gbps\":%.2f,\"calls\":%zu,\"launch_us\":%.1f,\"launch_p99_us\":%.1f,\"launch_max_us\":%.1f,"
           "\"copy_us\":%.1f,\"copy_p99_us\":%.1f,\"copy_max_us\":%.1f,\"right\":%s}\n",
           request.mode, is("none") ? 0.0 : arg.size * arg.times / took / 1e9, launches.count, launch,
           launches.us[launches.count * 99 / 100], launches.us[launches.count - 1], copy, copies.us[copies.count * 99 / 100],
           copies.us[copies.count - 1], is("none") || right(to, arg.size, 0) ? "true" : "false");
}

static void row_host(void) {
    enum { ROUNDS = 60, CALLS = 2000, BUFFERS = 16 };
    static double per[ROUNDS];
    char *buffer[BUFFERS];
    for (int i = 0; i < BUFFERS; i++)
        memset(buffer[i] = malloc(MIB), 1, MIB);
    if (by_pread()) { /* so that the library certainly has seen the device */
        gpu_ptr to;
        GPU(cuMemAlloc_v2(&to, 4096));
        read_all(fd, (void *)to, 4096, 0);
        GPU(cuCtxSynchronize());
    }
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        for (int i = 0; i < CALLS; i++)
            if (pread(fd, buffer[i % BUFFERS], arg.block, (size_t)i % 64 * 4096) != (ssize_t)arg.block)
                fail("pread");
        per[r] = (now() - t) / CALLS * 1e9;
    }
    double middle = median(per, ROUNDS);
    printf("{\"row\":\"host\",\"mode\":\"%s\",\"block\":%zu,\"ns\":%.1f,\"best_ns\":%.1f}\n", request.mode, arg.block,
           middle, per[0]);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        { "size", &arg.size, NULL },   { "block", &arg.block, NULL },     { "total", &arg.total, NULL },
        { "times", &arg.times, NULL }, { "threads", &arg.threads, NULL }, { "count", &arg.count, NULL },
        { "from", &arg.from, NULL } };
    static const struct row rows[] = {
        { "start", row_big }, { "big", row_big }, { "again", row_big }, { "seq", row_seq },     { "trickle", row_trickle }, { "par", row_par },
        { "cold", row_cold }, { "mix", row_mix }, { "first", row_first }, { "beside", row_beside },
        { "host", row_host } };
    parse_args(argc, argv, options, COUNT(options));
    file_size = open_both(&fd);
    if (!arg.size || arg.size > file_size)
        arg.size = file_size;
    if (!arg.total || arg.total > file_size)
        arg.total = file_size;
    host = malloc(8 * MIB > arg.block ? 8 * MIB : arg.block);
    memset(host, 1, 8 * MIB > arg.block ? 8 * MIB : arg.block);
    return measure(rows, COUNT(rows));
}
