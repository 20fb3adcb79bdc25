/* Writes from device memory compared with the same writes from host memory: with every function, in vectors that mix
 * both, through stdio; the same calls are made on two files. Usage: writes SEED FOLDER */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

ssize_t __write(int, const void *, size_t);
ssize_t __pwrite64(int, const void *, size_t, off_t);

enum { SPAN = 1 << 20, ROUNDS = 400, PARTS = 5 };
static unsigned char *host, *device, *other, *seen_a, *seen_b;
static uint64_t state;

static uint64_t random_below(uint64_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % bound;
}

static size_t length_below(size_t bound)
{
    size_t shorter = 1 + random_below(bound);
    return random_below(random_below(2) ? shorter : 1 + shorter / 64);
}

static void compare(const char *what, ssize_t expected, ssize_t got, int expected_errno, int got_errno, int a, int b)
{
    off_t at_a = lseek(a, 0, SEEK_CUR), at_b = lseek(b, 0, SEEK_CUR);
    off_t size_a = lseek(a, 0, SEEK_END), size_b = lseek(b, 0, SEEK_END);
    lseek(a, at_a, SEEK_SET), lseek(b, at_b, SEEK_SET);
    CHECK(pread(a, seen_a, 4 * SPAN, 0) == pread(b, seen_b, 4 * SPAN, 0));
    size_t looked = size_a < 4 * SPAN ? (size_t)size_a : 4 * SPAN;
    if (expected == got && expected_errno == got_errno && at_a == at_b && size_a == size_b &&
        memcmp(seen_a, seen_b, looked) == 0)
        return;
    size_t first = 0;
    while (first < looked && seen_a[first] == seen_b[first])
        first++;
    fprintf(stderr, "%s: host %zd errno %d offset %ld size %ld, device %zd errno %d offset %ld size %ld, bytes same to %zu\n",
            what, expected, expected_errno, (long)at_a, (long)size_a, got, got_errno, (long)at_b, (long)size_b, first);
    exit(1);
}

/* New bytes in both buffers. */
static void refill(void)
{
    for (size_t i = 0; i < SPAN; i += 8) {
        uint64_t word = random_below(UINT64_MAX);
        memcpy(host + i, &word, 8);
    }
    device_put(device, host, SPAN);
}

static void one_call(int a, int b)
{
    size_t length = length_below(SPAN / 2), from = length_below(SPAN / 2);
    off_t offset = (off_t)length_below(2 * SPAN) - (random_below(50) == 0 ? 100 : 0);
    ssize_t expected, got;
    int expected_errno;
    if (random_below(4) == 0) {
        off_t to = length_below(SPAN);
        lseek(a, to, SEEK_SET), lseek(b, to, SEEK_SET);
    }
    if (random_below(20) == 0) {
        off_t to = length_below(SPAN);
        CHECK(ftruncate(a, to) == 0 && ftruncate(b, to) == 0);
    }
    errno = 77;
    switch (random_below(5)) {
    case 0:
        expected = pwrite(a, host + from, length, offset), expected_errno = errno;
        errno = 77;
        got = random_below(2) ? pwrite(b, device + from, length, offset) : __pwrite64(b, device + from, length, offset);
        compare("pwrite", expected, got, expected_errno, errno, a, b);
        break;
    case 1:
        expected = write(a, host + from, length), expected_errno = errno;
        errno = 77;
        got = random_below(2) ? write(b, device + from, length) : __write(b, device + from, length);
        compare("write", expected, got, expected_errno, errno, a, b);
        break;
    default: {
        struct iovec first[PARTS], second[PARTS];
        int count = 1 + random_below(PARTS), which = random_below(3);
        int flags = random_below(3) ? 0 : random_below(2) ? RWF_APPEND : RWF_DSYNC;
        for (int i = 0; i < count; i++) {
            size_t at = length_below(SPAN / 2), part = length_below(SPAN / PARTS);
            first[i] = (struct iovec){host + at, part};
            second[i] = (struct iovec){(random_below(3) ? device : host) + at, part};
        }
        if (which == 2 && random_below(3) == 0)
            offset = -1;
        expected = which == 0 ? writev(a, first, count)
                   : which == 1 ? pwritev(a, first, count, offset)
                                : pwritev2(a, first, count, offset, flags);
        expected_errno = errno;
        errno = 77;
        got = which == 0 ? writev(b, second, count)
              : which == 1 ? pwritev(b, second, count, offset)
                           : pwritev2(b, second, count, offset, flags);
        compare(which == 0 ? "writev" : which == 1 ? "pwritev" : "pwritev2", expected, got, expected_errno, errno, a, b);
        break;
    }
    }
}

/* Several device parts, memory freed and allocated again, and vectors of the maximum length. */
static void vectors(int a, int b)
{
    struct iovec first[1024], second[1024];
    for (int i = 0; i < 1024; i++) {
        size_t at = random_below(SPAN / 2), part = random_below(3000);
        first[i] = (struct iovec){host + at, part};
        second[i] = (struct iovec){(i % 3 ? device : host) + at, part};
    }
    ssize_t expected = pwritev(a, first, 1024, 5), got = pwritev(b, second, 1024, 5);
    CHECK(expected > 0);
    compare("1024 parts", expected, got, 0, 0, a, b);
    first[0] = (struct iovec){host, 5000}, second[0] = (struct iovec){other, 5000};
    first[1] = (struct iovec){host, 7000}, second[1] = (struct iovec){device, 7000};
    device_put(other, host, 5000);
    compare("two allocations", writev(a, first, 2), writev(b, second, 2), 0, 0, a, b);
}

static void stdio_calls(const char *path_a, const char *path_b)
{
    FILE *a = fopen(path_a, "w+"), *b = fopen(path_b, "w+");
    CHECK(a && b);
    for (int i = 0; i < 120; i++) {
        size_t size = 1 + random_below(random_below(2) ? 8 : 5000), items = random_below(SPAN / 2 / size);
        if (random_below(2))
            items %= 50;
        if (random_below(3) == 0)
            fprintf(a, "between %d\n", i), fprintf(b, "between %d\n", i);
        if (random_below(8) == 0) {
            long to = random_below(100000);
            fseek(a, to, SEEK_SET), fseek(b, to, SEEK_SET);
        }
        errno = 77;
        size_t expected = fwrite(host, size, items, a);
        size_t got = random_below(2) ? fwrite(device, size, items, b) : fwrite_unlocked(device, size, items, b);
        CHECK(errno == 77);
        CHECK(got == expected && ftell(a) == ftell(b) && ferror(b) == 0);
    }
    CHECK(fflush(a) == 0 && fflush(b) == 0);
    compare("fwrite", 0, 0, 0, 0, fileno(a), fileno(b));
    fclose(a), fclose(b);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    state = strtoull(argv[1], NULL, 10) * 2654435761u + 1;
    char path_a[4096], path_b[4096];
    snprintf(path_a, sizeof path_a, "%s/writes-a-%s-%d", argv[2], argv[1], (int)getpid());
    snprintf(path_b, sizeof path_b, "%s/writes-b-%s-%d", argv[2], argv[1], (int)getpid());
    host = malloc(SPAN), seen_a = malloc(4 * SPAN), seen_b = malloc(4 * SPAN);
    device = device_alloc(SPAN), other = device_alloc(5000);
    CHECK(host && seen_a && seen_b && device && other);
    /* From here on the library knows that the driver is in use: before, a vector ends short at its first device
     * part. */
    int first = open(path_a, O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(first >= 0 && pwrite(first, device, 1, 0) == 1 && close(first) == 0);
    for (int round = 0; round < ROUNDS; round += 50) {
        int flags = O_CREAT | O_TRUNC | O_RDWR | (random_below(3) ? 0 : O_APPEND);
        int a = open(path_a, flags, 0600), b = open(path_b, flags, 0600);
        CHECK(a >= 0 && b >= 0);
        refill();
        for (int i = 0; i < 50; i++)
            one_call(a, b);
        vectors(a, b);
        close(a), close(b);
    }
    stdio_calls(path_a, path_b);
    unlink(path_a), unlink(path_b);
    device_free(device), device_free(other);
    return 0;
}
