/* The same errors as with host memory. */
#pragma GCC diagnostic ignored "-Wstringop-overflow" /* overflows are what this program tests */
#pragma GCC diagnostic ignored "-Wstringop-overread"
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <spinio.h>

#include "check.h"
#include "memory.h"
#include "../../../../benches/common/preloaded.h"

enum { SIZE = 1 << 16, LARGE = 1 << 20 };

/* The library has files of its own; no number that the program names may reach them. */
static void numbers_of_no_table(unsigned char *device, const struct iovec *mixed)
{
    unsigned char *large = device_alloc(LARGE);
    int fd = open("numbers.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, LARGE) == 0 && fsync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0 && pread(fd, large, LARGE, 0) == LARGE);
    for (int i = 0; i < 64; i++) {
        int number = (1 << 28) + i;
        FAILS(pread(number, device, 10, 0), EBADF);
        FAILS(pread(number, large, LARGE, 0), EBADF);
        FAILS(read(number, device, 10), EBADF);
        FAILS(pwrite(number, device, 10, 0), EBADF);
        FAILS(write(number, device, 10), EBADF);
        FAILS(readv(number, mixed, 2), EBADF);
        FAILS(preadv2(number, mixed, 2, 0, 0), EBADF);
        FAILS(pwritev(number, mixed, 2, 0), EBADF);
        FAILS(FIND(spinio_pread)(number, large, LARGE, 0), EBADF);
        FAILS(FIND(spinio_pread_async)(number, large, LARGE, 0, NULL), EBADF);
        FAILS(FIND(spinio_pwrite)(number, device, 10, 0), EBADF);
        ssize_t written = 0;
        FAILS(FIND(spinio_pwrite_async)(number, device, 10, 0, NULL, &written), EBADF);
        FAILS(FIND(spinio_pin_file)(number), EBADF);
        uint64_t offset = 0;
        int64_t result = 0;
        FIND(spinio_batch_fixed)(number, &offset, LARGE, large, &result, 1);
        CHECK(result == -EBADF);
        struct spinio_read_op op = {.fd = number, .size = LARGE, .buffer = large};
        FIND(spinio_batch)(&op, 1);
        CHECK(op.result == -EBADF);
        FAILS(close(number), EBADF);
    }
    close(fd), unlink("numbers.tmp");
    device_free(large);
}

int main(void)
{
    unsigned char *device = device_alloc(SIZE);
    char host[64];
    int fd = open("errors.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, "0123456789", 10) == 10);

    FAILS(pwrite(fd, device, 10, -1), EINVAL);
    FAILS(pwrite(fd, device, (size_t)-1, 0), EFAULT);
    FAILS(pwrite(-1, device, 10, 0), EBADF);
    FAILS(write(-1, device, 10), EBADF);
    CHECK(pwrite(fd, device, 0, 0) == 0);
    FAILS(pwrite(-1, device, 0, 0), EBADF);
    CHECK(lseek(fd, 0, SEEK_END) == 10);

    FAILS(pread(fd, device, 10, -1), EINVAL);
    FAILS(pread(fd, device, (size_t)-1, 0), EFAULT);
    FAILS(pread(-1, device, 10, 0), EBADF);
    FAILS(read(-1, device, 10), EBADF);
    CHECK(pread(fd, device, 0, 0) == 0);
    FAILS(pread(-1, device, 0, 0), EBADF);

    struct iovec mixed[2] = {{host, 4}, {device, 4}};
    numbers_of_no_table(device, mixed);
    FAILS(preadv(fd, mixed, 2, -2), EINVAL);
    FAILS(preadv(-1, mixed, 2, 0), EBADF);
    FAILS(readv(-1, mixed, 2), EBADF);
    FAILS(readv(fd, mixed, -1), EINVAL);
    FAILS(readv(fd, mixed, 1025), EINVAL);
    CHECK(readv(fd, mixed, 0) == 0);
    FAILS(preadv2(fd, mixed, 2, 0, 0x40000000), EOPNOTSUPP);
    struct iovec huge[2] = {{device, 4}, {device, (size_t)-1}};
    FAILS(preadv(fd, huge, 2, 0), EINVAL);
    /* A bad vector is an error, not a crash; so is a bad buffer next to a good one. */
    FAILS(readv(fd, (struct iovec *)8, 2), EFAULT);
    FAILS(preadv(fd, (struct iovec *)(device + 64), 2, 0), EFAULT);
    FAILS(pread(fd, (void *)8, 4, 0), EFAULT);
    struct iovec bad[2] = {{(void *)8, 4}, {device, 4}};
    FAILS(preadv(fd, bad, 2, 0), EFAULT);
    struct iovec then_bad[3] = {{host, 2}, {device, 3}, {(void *)8, 4}};
    CHECK(preadv(fd, then_bad, 3, 0) == 5);
    FAILS(open((char *)8, O_RDONLY), EFAULT);

    int only_write = open("errors.tmp", O_WRONLY);
    CHECK(only_write >= 0 && lseek(only_write, 3, SEEK_SET) == 3);
    FAILS(read(only_write, device, 10), EBADF);
    FAILS(pread(only_write, device, 10, 0), EBADF);
    FAILS(readv(only_write, mixed, 2), EBADF);
    CHECK(lseek(only_write, 0, SEEK_CUR) == 3);
    close(only_write);
    FAILS(read(only_write, device, 10), EBADF);

    int directory = open(".", O_RDONLY);
    FAILS(read(directory, device, 10), EISDIR);
    FAILS(pread(directory, device, 10, 0), EISDIR);
    FAILS(readv(directory, mixed, 2), EISDIR);
    close(directory);
    int path = open("errors.tmp", O_PATH);
    FAILS(read(path, device, 10), EBADF);
    close(path);

    int ends[2];
    CHECK(pipe(ends) == 0);
    FAILS(pread(ends[0], device, 10, 0), ESPIPE);
    FAILS(preadv(ends[0], mixed, 2, 0), ESPIPE);
    FAILS(read(ends[1], device, 10), EBADF);
    CHECK(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
    FAILS(read(ends[0], device, 10), EAGAIN);
    FAILS(readv(ends[0], mixed, 2), EAGAIN);
    close(ends[1]);
    CHECK(read(ends[0], device, 10) == 0 && readv(ends[0], mixed, 2) == 0);
    close(ends[0]);

    /* Writes of vectors, and to descriptors that cannot be written. */
    int again = open("errors.tmp", O_RDWR);
    FAILS(pwritev(again, mixed, 2, -2), EINVAL);
    FAILS(pwritev(-1, mixed, 2, 0), EBADF);
    FAILS(writev(again, mixed, -1), EINVAL);
    FAILS(writev(again, mixed, 1025), EINVAL);
    CHECK(writev(again, mixed, 0) == 0);
    FAILS(pwritev2(again, mixed, 2, 0, 0x40000000), EOPNOTSUPP);
    FAILS(pwritev(again, huge, 2, 0), EINVAL);
    FAILS(writev(again, (struct iovec *)8, 2), EFAULT);
    FAILS(pwritev(again, (struct iovec *)(device + 64), 2, 0), EFAULT);
    FAILS(pwrite(again, (void *)8, 4, 0), EFAULT);
    FAILS(pwritev(again, bad, 2, 0), EFAULT);
    CHECK(pwritev(again, then_bad, 3, 0) == 5);
    close(again);
    int only_read = open("errors.tmp", O_RDONLY);
    FAILS(write(only_read, device, 10), EBADF);
    FAILS(pwrite(only_read, device, 10, 0), EBADF);
    FAILS(writev(only_read, mixed, 2), EBADF);
    CHECK(lseek(only_read, 0, SEEK_CUR) == 0);
    close(only_read);
    int full = open("/dev/full", O_WRONLY);
    FAILS(write(full, device, 10), ENOSPC);
    FAILS(writev(full, mixed, 2), ENOSPC);
    close(full);
    CHECK(pipe(ends) == 0);
    FAILS(pwrite(ends[1], device, 10, 0), ESPIPE);
    FAILS(write(ends[0], device, 10), EBADF);
    CHECK(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    CHECK(write(ends[1], device, SIZE) == SIZE);
    FAILS(write(ends[1], device, 10), EAGAIN);
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    close(ends[0]);
    FAILS(write(ends[1], device, 10), EPIPE);
    close(ends[1]);

    FILE *file = fopen("errors.tmp", "r");
    CHECK(file);
    errno = 0;
    CHECK(fwrite(device, 1, 10, file) == 0 && errno == EBADF && ferror(file));
    fclose(file);
    file = fopen("/dev/full", "w");
    CHECK(file && setvbuf(file, NULL, _IONBF, 0) == 0);
    errno = 0;
    CHECK(fwrite(device, 1, 10, file) == 0 && errno == ENOSPC && ferror(file));
    fclose(file);
    file = fopen("errors.tmp", "w");
    CHECK(file);
    errno = 0;
    CHECK(fread(device, 1, 10, file) == 0 && errno == EBADF && ferror(file));
    fclose(file);

    /* A read ends at the end of its allocation, as at the end of a host mapping. */
    CHECK(ftruncate(fd, 2 * SIZE) == 0);
    CHECK(pread(fd, device + SIZE - 100, 4096, 0) == 100);
    CHECK(pwrite(fd, device + SIZE - 100, 4096, 0) == 100);
    CHECK(pwritev(fd, (struct iovec[]){{host, 4}, {device + SIZE - 3, 10}, {host, 4}}, 3, 0) == 7);
    struct iovec over[2] = {{device + SIZE - 100, 200}, {host, 50}}, inside[10];
    memset(host, 7, sizeof host);
    CHECK(preadv(fd, over, 2, 0) == 100 && preadv2(fd, over, 2, 0, RWF_HIPRI) == 100);
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && preadv2(fd, over, 2, -1, RWF_HIPRI) == 100 && lseek(fd, 0, SEEK_CUR) == 100);
    CHECK(readv(fd, over, 2) == 100 && lseek(fd, 0, SEEK_CUR) == 200);
    for (int i = 0; i < 10; i++)
        inside[i] = (struct iovec){device + i * 100, 100};
    inside[8].iov_base = device + SIZE - 50;
    CHECK(preadv(fd, inside, 10, 0) == 850);
    /* What a pipe has given is not lost. */
    unsigned char sent[4096], got[4096];
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (unsigned char)(i * 31 >> 3);
    CHECK(pipe(ends) == 0 && write(ends[1], sent, sizeof sent) == sizeof sent);
    CHECK(readv(ends[0], over, 2) == 100);
    device_get(got, device + SIZE - 100, 100);
    CHECK(memcmp(got, sent, 100) == 0 && host[0] == 7);
    CHECK(read(ends[0], got, sizeof got) == sizeof got - 100 && memcmp(got, sent + 100, sizeof got - 100) == 0);
    close(ends[0]), close(ends[1]);
    device_free(device);
    FAILS(pread(fd, device, 10, 0), EFAULT);
    FAILS(pwrite(fd, device, 10, 0), EFAULT);
    unlink("errors.tmp");
    return 0;
}
