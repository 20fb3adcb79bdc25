/* Random calls, each made twice: into host memory, and into device memory through a second descriptor of the same file.
 * Return value, errno, bytes, bytes beyond the returned length and the file offset must be the same.
 *
 *   differential SEED FOLDER */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SPAN = 3 << 20, PARTS = 16, ROUNDS = 400 };

static uint64_t state;
static unsigned char *host, *seen, *device;

static uint64_t random_below(uint64_t bound)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % bound;
}

/* Lengths and offsets: mostly small, often at a boundary, sometimes large. */
static size_t length_below(size_t bound)
{
    static const size_t edges[] = {0, 1, 511, 512, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1};
    size_t length = 0;
    switch (random_below(3)) {
    case 0: length = edges[random_below(sizeof edges / sizeof *edges)]; break;
    case 1: length = random_below(20000); break;
    case 2: length = random_below(bound); break;
    }
    return length % bound;
}

static int make_file(const char *path, size_t size)
{
    int fd = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, size) == 0);
    for (size_t at = 0; at < size;) {
        size_t piece = length_below(200000) + 1;
        if (piece > size - at)
            piece = size - at;
        if (random_below(4)) { /* else a hole */
            for (size_t i = 0; i < piece; i++)
                seen[i] = (unsigned char)random_below(256);
            CHECK(pwrite(fd, seen, piece, at) == (ssize_t)piece);
        }
        at += piece;
    }
    close(fd);
    fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    if (random_below(2)) {
        fsync(fd);
        posix_fadvise(fd, 0, random_below(size + 1), POSIX_FADV_DONTNEED);
    }
    return fd;
}

/* Both buffers with the same bytes before the call. */
static void fill(void)
{
    memset(host, 0xA5, SPAN);
    device_put(device, host, SPAN);
}

static void compare(const char *what, ssize_t expected, int expected_errno, ssize_t got, int got_errno, int a, int b)
{
    device_get(seen, device, SPAN);
    off_t at_a = lseek(a, 0, SEEK_CUR), at_b = lseek(b, 0, SEEK_CUR);
    int differ = memcmp(host, seen, SPAN) != 0;
    if (expected == got && expected_errno == got_errno && at_a == at_b && !differ)
        return;
    size_t first = 0;
    while (differ && host[first] == seen[first])
        first++;
    fprintf(stderr, "%s: host %zd errno %d offset %ld, device %zd errno %d offset %ld, bytes %s at %zu\n", what, expected,
            expected_errno, (long)at_a, got, got_errno, (long)at_b, differ ? "differ" : "same", first);
    exit(1);
}

static void one_call(int a, int b, size_t size)
{
    size_t length = length_below(SPAN / 2), into = length_below(SPAN / 2);
    off_t offset = (off_t)length_below(size + 70000) - (random_below(50) == 0 ? 100 : 0);
    ssize_t expected, got;
    int expected_errno, got_errno;
    fill();
    errno = 77;
    switch (random_below(3)) {
    case 0:
        expected = pread(a, host + into, length, offset), expected_errno = errno;
        errno = 77;
        got = pread(b, device + into, length, offset), got_errno = errno;
        compare("pread", expected, expected_errno, got, got_errno, a, b);
        break;
    case 1:
        if (random_below(3) == 0) {
            off_t to = length_below(size + 5000);
            lseek(a, to, SEEK_SET), lseek(b, to, SEEK_SET);
        }
        expected = read(a, host + into, length), expected_errno = errno;
        errno = 77;
        got = read(b, device + into, length), got_errno = errno;
        compare("read", expected, expected_errno, got, got_errno, a, b);
        break;
    case 2: {
        /* The parts are disjoint; each is host memory in the first call, and host or device memory in the second. */
        struct iovec first[PARTS], second[PARTS];
        int count = 1 + random_below(PARTS), which = random_below(3), flags = random_below(4) ? 0 : RWF_HIPRI;
        int on_device[PARTS], every = random_below(3) == 0; /* many device parts in a row are a batch */
        for (int i = 0; i < count; i++) {
            size_t slot = SPAN / PARTS, at = i * slot;
            size_t part = length_below(slot);
            on_device[i] = every || random_below(3) != 0;
            first[i] = (struct iovec){host + at, part};
            second[i] = (struct iovec){on_device[i] ? device + at : seen + at, part};
        }
        memset(seen, 0xA5, SPAN);
        errno = 77;
        expected = which == 0 ? readv(a, first, count)
                   : which == 1 ? preadv(a, first, count, offset)
                                : preadv2(a, first, count, random_below(4) ? offset : (offset = -1), flags);
        expected_errno = errno;
        errno = 77;
        got = which == 0 ? readv(b, second, count)
              : which == 1 ? preadv(b, second, count, offset)
                           : preadv2(b, second, count, offset, flags);
        got_errno = errno;
        /* Host parts of the second call go to the device, so that one comparison covers all. */
        for (int i = 0; i < count; i++)
            if (!on_device[i] && second[i].iov_len)
                device_put(device + i * (SPAN / PARTS), second[i].iov_base, second[i].iov_len);
        compare(which == 0 ? "readv" : which == 1 ? "preadv" : "preadv2", expected, expected_errno, got, got_errno, a, b);
        break;
    }
    }
}

static void stdio_calls(const char *path)
{
    FILE *a = fopen(path, "r"), *b = fopen(path, "r");
    CHECK(a && b);
    for (int i = 0; i < 60; i++) {
        size_t size = 1 + random_below(random_below(2) ? 8 : 5000), items = random_below(SPAN / 2 / size);
        if (random_below(2))
            items %= 50;
        fill();
        if (random_below(4) == 0)
            CHECK(getc(a) == getc(b));
        if (random_below(8) == 0) {
            long to = random_below(100000);
            fseek(a, to, SEEK_SET), fseek(b, to, SEEK_SET);
        }
        errno = 77;
        size_t expected = fread(host, size, items, a);
        CHECK(errno == 77);
        size_t got = random_below(2) ? fread(device, size, items, b) : fread_unlocked(device, size, items, b);
        CHECK(errno == 77);
        CHECK(ftell(a) == ftell(b) && feof(a) == feof(b) && ferror(a) == ferror(b));
        device_get(seen, device, SPAN);
        CHECK(got == expected && memcmp(host, seen, SPAN) == 0);
    }
    fclose(a), fclose(b);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    state = strtoull(argv[1], NULL, 10) * 2654435761u + 1;
    char path[4096];
    snprintf(path, sizeof path, "%s/differential-%s-%d", argv[2], argv[1], (int)getpid());
    host = malloc(SPAN), seen = malloc(SPAN), device = device_alloc(SPAN);
    CHECK(host && seen);
    /* From here on the library knows that the driver is in use: before, a vector ends short at its first device
     * part. */
    int first = make_file(path, 4096);
    CHECK(pread(first, device, 1, 0) == 1 && close(first) == 0);
    for (int round = 0; round < ROUNDS;) {
        size_t size = length_below(SPAN);
        int a = make_file(path, size), b = open(path, O_RDONLY);
        CHECK(b >= 0);
        for (int i = 0; i < 50; i++, round++)
            one_call(a, b, size);
        close(a), close(b);
    }
    stdio_calls(path);
    unlink(path);
    device_free(device);
    return 0;
}
