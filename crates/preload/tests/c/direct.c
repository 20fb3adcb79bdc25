/* The program's own O_DIRECT descriptor: each read that succeeds into aligned host memory succeeds into device memory
 * too, with RWF_* flags, in vectors and through a FILE. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { MIB = 1 << 20, SIZE = 3 * MIB };
static unsigned char *device, *host, *seen, *mixed;
static int served, refused;

/* Vectors of `length` bytes each: one call on the host, the same on the device, and with host parts in between. */
static void one(int fd, off_t offset, size_t length, int count, int flags)
{
    struct iovec first[8], second[8], third[8];
    for (int i = 0; i < count; i++) {
        first[i] = (struct iovec){host + i * length, length};
        second[i] = (struct iovec){device + i * length, length};
        third[i] = (struct iovec){(i % 2 ? device : mixed) + i * length, length};
    }
    memset(host, 0xA5, SIZE), memset(mixed, 0xA5, SIZE);
    device_put(device, host, SIZE);
    errno = 0;
    ssize_t expected = preadv2(fd, first, count, offset, flags);
    int expected_errno = errno;
    errno = 0;
    ssize_t got = preadv2(fd, second, count, offset, flags);
    if (got != expected || errno != expected_errno)
        fprintf(stderr, "%d times %zu bytes at %ld, flags %d: %zd (%d), on the host %zd (%d)\n", count, length, (long)offset,
                flags, got, errno, expected, expected_errno);
    CHECK(got == expected && errno == expected_errno);
    device_get(seen, device, SIZE);
    CHECK(memcmp(seen, host, SIZE) == 0);
    got = preadv2(fd, third, count, offset, flags);
    CHECK(got == expected);
    device_get(seen, device, SIZE);
    for (int i = 0; i < count; i++)
        CHECK(memcmp(i % 2 ? seen + i * length : mixed + i * length, host + i * length, length) == 0);
    served += expected > 0, refused += expected < 0;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/direct-%d", argv[1], (int)getpid());
    device = device_alloc(SIZE), seen = malloc(SIZE);
    CHECK(device && seen);
    CHECK(posix_memalign((void **)&host, 4096, SIZE) == 0 && posix_memalign((void **)&mixed, 4096, SIZE) == 0);
    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 11);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    CHECK(write(fd, host, SIZE) == SIZE && fsync(fd) == 0);
    close(fd);
    fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0) {
        unlink(path);
        printf("skipped: this file system has no O_DIRECT\n");
        return 0;
    }
    int flags[] = {0, RWF_HIPRI, RWF_DSYNC, RWF_SYNC, RWF_NOWAIT};
    size_t lengths[] = {512, 4096, 12288, 65536, 131072, 512 * 1024};
    for (size_t f = 0; f < sizeof flags / sizeof *flags; f++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (int count = 1; count <= 5; count += 2) {
                one(fd, 0, lengths[l], count, flags[f]);
                one(fd, 4096, lengths[l], count, flags[f]);
                one(fd, 512, lengths[l], count, flags[f]);
                one(fd, 100, lengths[l], count, flags[f]);
            }
    CHECK(served > 50 && refused > 10);
    close(fd);

    FILE *a = fdopen(open(path, O_RDONLY | O_DIRECT), "r"), *b = fdopen(open(path, O_RDONLY | O_DIRECT), "r");
    CHECK(a && b && setvbuf(a, NULL, _IONBF, 0) == 0 && setvbuf(b, NULL, _IONBF, 0) == 0);
    size_t expected = fread(host, 1, MIB, a), got = fread(device, 1, MIB, b);
    device_get(seen, device, MIB);
    CHECK(expected == MIB && got == expected && memcmp(seen, host, MIB) == 0);
    fclose(a), fclose(b);
    unlink(path);
    device_free(device);
    return 0;
}
