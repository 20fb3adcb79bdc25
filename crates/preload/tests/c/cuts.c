/* One thread truncates a file while another writes it from device memory: the bytes of each write are present or
 * truncated, and where a later write has extended a truncated file there are zeros; nothing else ever appears.
 *
 *   before        oooooooooooo            old bytes
 *   a write            NNNNNNNNNN         new ones, the call returns their number
 *   a truncation  ........|               concurrent
 *   afterwards    oooooNNN                or with a tail: zeros where it was truncated, N where it was written later
 *
 * Usage: cuts SEED FOLDER */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SPAN = 6 << 20, ROUNDS = 150 };
static unsigned char *seen, *device[2];
static int fd;
static uint64_t state;
static pthread_barrier_t together;
static off_t cut;
static int last;

static uint64_t random_below(uint64_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % bound;
}

/* The byte at an offset of a version; never zero. */
static unsigned char byte_at(off_t at, int version)
{
    unsigned char mixed = (unsigned char)((uint64_t)at * 0x9E3779B97F4A7C15u >> 57);
    return (unsigned char)(1 + mixed + 127 * version);
}

static void *truncator(void *unused)
{
    for (;;) {
        pthread_barrier_wait(&together);
        if (last)
            return unused;
        CHECK(ftruncate(fd, cut) == 0);
        pthread_barrier_wait(&together);
    }
}

/* A concurrent host reader: every byte that it reads is old, new or zero. */
static void *reader(void *unused)
{
    unsigned char *bytes = malloc(1 << 20);
    CHECK(bytes);
    for (off_t at = 0; !__atomic_load_n(&last, __ATOMIC_SEQ_CST); at = (at + 777777) % SPAN) {
        ssize_t got = pread(fd, bytes, 1 << 20, at);
        CHECK(got >= 0);
        for (ssize_t i = 0; i < got; i++)
            CHECK(!bytes[i] || bytes[i] == byte_at(at + i, 0) || bytes[i] == byte_at(at + i, 1));
    }
    free(bytes);
    return unused;
}

static void one_round(int version)
{
    /* Up to a random length, every byte is of the other version. */
    off_t length = (off_t)random_below(SPAN), from = (off_t)random_below(SPAN), to;
    size_t size = 1 + random_below(random_below(3) ? SPAN - (size_t)from : 70000);
    if ((size_t)from + size > SPAN)
        size = SPAN - (size_t)from;
    to = from + (off_t)size;
    CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, device[!version], (size_t)length, 0) == length);
    /* Mostly truncates within the written range. */
    cut = random_below(4) ? from + (off_t)random_below(size + 1) : (off_t)random_below(SPAN);
    pthread_barrier_wait(&together);
    if (random_below(2))
        usleep((useconds_t)random_below(2000));
    ssize_t wrote = pwrite(fd, device[version] + from, size, from);
    pthread_barrier_wait(&together);
    CHECK(wrote == (ssize_t)size);

    struct stat now;
    CHECK(fstat(fd, &now) == 0);
    /* Truncated last; or truncated first, and then written past the end, all of it or from some offset on. */
    CHECK(now.st_size == cut || now.st_size == (to > cut ? to : cut));
    ssize_t got = pread(fd, seen, SPAN, 0);
    CHECK(got == now.st_size);
    int past_cut = 0; /* a new byte was seen past the truncation */
    for (off_t at = 0; at < got; at++) {
        int is_new = seen[at] == byte_at(at, version), is_old = seen[at] == byte_at(at, !version), is_zero = !seen[at];
        int written = at >= from && at < to, good;
        if (at < cut)
            good = written ? is_new : at < length ? is_old : is_zero;
        else
            /* Of the written bytes either none, or all from some offset on. */
            good = written ? is_new || (is_zero && !past_cut) : is_zero;
        past_cut |= at >= cut && written && is_new;
        if (!good) {
            fprintf(stderr, "%02x at %ld: %d bytes old, truncated to %ld, written %ld to %ld, now %zd\n", seen[at], (long)at,
                    (int)length, (long)cut, (long)from, (long)to, got);
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    pthread_t threads[2];
    CHECK(argc == 3 && chdir(argv[2]) == 0);
    state = strtoull(argv[1], NULL, 10);
    CHECK((seen = malloc(SPAN)));
    for (int version = 0; version < 2; version++) {
        for (off_t at = 0; at < SPAN; at++)
            seen[at] = byte_at(at, version);
        device[version] = device_alloc(SPAN);
        device_put(device[version], seen, SPAN);
    }
    char name[] = "cuts.XXXXXX";
    CHECK((fd = mkstemp(name)) >= 0 && unlink(name) == 0 && pthread_barrier_init(&together, NULL, 2) == 0);
    CHECK(pthread_create(&threads[0], NULL, truncator, NULL) == 0 && pthread_create(&threads[1], NULL, reader, NULL) == 0);
    for (int i = 0; i < ROUNDS; i++)
        one_round(i & 1);
    __atomic_store_n(&last, 1, __ATOMIC_SEQ_CST);
    pthread_barrier_wait(&together);
    CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    return 0;
}
