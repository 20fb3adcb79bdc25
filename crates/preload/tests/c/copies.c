/* Copies between descriptors without memory of the program: sendfile, copy_file_range, splice, tee. The library hooks
 * none of them, so their results and the files are the same without it, with it, and with it while the same files are
 * read and written from a device: each output line is a call, and the whole output is compared. Usage: copies FOLDER
 * [device] */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = (5 << 20) + 777 };
static unsigned char *host, *device;

/* The result of a call, and the offsets of the descriptors afterwards. */
static void print_call(const char *call, ssize_t said, int number, int in, int out)
{
    printf("%s: %zd errno %d, at %ld and %ld\n", call, said, said < 0 ? number : 0, (long)lseek(in, 0, SEEK_CUR),
           (long)lseek(out, 0, SEEK_CUR));
}

#define PRINT(in, out, ...)                                                                                   \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        ssize_t said_ = __VA_ARGS__;                                                                         \
        print_call(#__VA_ARGS__, said_, errno, in, out);                                                           \
    } while (0)

/* The length of a file, and a hash of its bytes that depends on their order. */
static void print_file(const char *name)
{
    unsigned char *bytes = malloc(3 * SIZE);
    int fd = open(name, O_RDONLY);
    CHECK(bytes && fd >= 0);
    ssize_t got = pread(fd, bytes, 3 * SIZE, 0);
    uint64_t sum = 14695981039346656037u;
    for (ssize_t i = 0; i < got; i++)
        sum = (sum ^ bytes[i]) * 1099511628211u;
    printf("%s: %zd bytes, %016llx\n", name, got, (unsigned long long)sum);
    close(fd);
    free(bytes);
}

/* A device read, if there is a device: afterwards the library has state, shadow descriptors and residency of the
 * file. */
static void device_read(int fd)
{
    off_t at = lseek(fd, 0, SEEK_CUR);
    CHECK(!device || pread(fd, device, SIZE, 0) == SIZE);
    CHECK(lseek(fd, 0, SEEK_CUR) == at);
}

/* Moves the same bytes to a later offset of the file: from the device if there is one. */
static void device_write(int fd)
{
    if (device)
        device_put(device, host + 1000, SIZE - 1000);
    CHECK(pwrite(fd, device ? device : host + 1000, SIZE - 1000, 1000) == SIZE - 1000);
}

/* Copies all bytes through a pipe. */
static void through_a_pipe(int from, off_t at, int to)
{
    int ends[2], teed[2];
    size_t all = 0;
    static char first[4096], second[4096];
    CHECK(pipe(ends) == 0 && pipe(teed) == 0);
    for (ssize_t got; (got = splice(from, &at, ends[1], NULL, 50000, 0)) > 0; all += (size_t)got) {
        /* tee duplicates the bytes in the pipe. */
        ssize_t seen = tee(ends[0], teed[1], 4096, 0);
        CHECK(seen > 0 && read(teed[0], first, 4096) == seen);
        CHECK(pread(from, second, (size_t)seen, at - got) == seen && memcmp(first, second, (size_t)seen) == 0);
        for (ssize_t left = got, sent; left > 0; left -= sent)
            CHECK((sent = splice(ends[0], NULL, to, NULL, (size_t)left, 0)) > 0);
    }
    printf("spliced %zu bytes up to %ld\n", all, (long)at);
    PRINT(from, to, splice(from, NULL, to, NULL, 100, 0)); /* neither is a pipe */
    PRINT(from, to, splice(ends[0], NULL, ends[0], NULL, 100, SPLICE_F_NONBLOCK));
    PRINT(from, to, splice(ends[0], &at, to, NULL, 100, 0)); /* a pipe has no offset */
    for (int i = 0; i < 2; i++)
        close(ends[i]), close(second[i]);
}

int main(int argc, char **argv)
{
    CHECK(argc > 1 && chdir(argv[1]) == 0 && (host = malloc(SIZE)));
    if (argc > 2)
        device = device_alloc(SIZE);
    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 11);
    int in = open("copies.in", O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(in >= 0 && write(in, host, SIZE) == SIZE && fsync(in) == 0);
    CHECK(posix_fadvise(in, 0, 0, POSIX_FADV_DONTNEED) == 0 && lseek(in, 5, SEEK_SET) == 5);
    int out = open("copies.out", O_CREAT | O_TRUNC | O_RDWR, 0600);
    int more = open("copies.out", O_WRONLY | O_APPEND);
    int sockets[2];
    CHECK(out >= 0 && more >= 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);

    device_read(in);
    off_t at = 100, to = 2 * SIZE;
    PRINT(in, out, sendfile(out, in, NULL, 1 << 20));
    PRINT(in, out, sendfile(out, in, &at, SIZE));
    PRINT(in, out, sendfile(out, in, &at, SIZE)); /* at end of file */
    PRINT(in, out, sendfile(sockets[0], in, NULL, 10000));
    CHECK(recv(sockets[1], host, 10000, MSG_WAITALL) == 10000);
    PRINT(in, more, sendfile(more, in, NULL, 100)); /* O_APPEND */
    PRINT(in, out, sendfile(in, 900, NULL, 100));
    PRINT(in, out, sendfile(900, in, NULL, 100));
    PRINT(in, out, sendfile(out, sockets[0], NULL, 100));
    print_file("copies.out");

    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 40503u >> 7);
    device_read(out);
    device_write(in);
    at = 0;
    PRINT(in, out, copy_file_range(in, &at, out, &to, SIZE, 0));
    PRINT(in, out, copy_file_range(in, NULL, out, NULL, 4097, 0));
    PRINT(in, out, copy_file_range(in, &at, out, NULL, 4097, 0)); /* at end of file */
    PRINT(in, more, copy_file_range(in, NULL, more, NULL, 100, 0));
    PRINT(in, in, copy_file_range(in, NULL, in, NULL, 100, 0)); /* onto itself */
    PRINT(in, out, copy_file_range(in, NULL, sockets[0], NULL, 100, 0));
    PRINT(in, out, copy_file_range(in, NULL, out, NULL, 100, 7));
    print_file("copies.out");

    device_write(in);
    device_read(in);
    CHECK(ftruncate(out, 0) == 0 && lseek(out, 3, SEEK_SET) == 3);
    through_a_pipe(in, 4095, out);
    print_file("copies.in");
    print_file("copies.out");
    /* The device reads the copied bytes. */
    unsigned char *copied = malloc(SIZE), *same = malloc(SIZE);
    CHECK(copied && same && pread(out, copied, SIZE - 4092, 0) == SIZE - 4092);
    if (device) {
        CHECK(pread(out, device, SIZE, 0) == SIZE - 4092);
        device_get(same, device, SIZE - 4092);
        CHECK(memcmp(copied, same, SIZE - 4092) == 0);
    }
    CHECK(memcmp(copied + 3, host + 4095, SIZE - 4095) == 0);
    return 0;
}
