/* Copies between descriptors that no memory of the program takes part in: sendfile, copy_file_range, splice, tee. The
 * library hooks none of them, so what they say and what they leave is the same without it, with it, and with it while
 * the same files are read and written from a device: each line is a call, and the whole output is compared.
 * Usage: copies FOLDER [device] */
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

/* What a call said, and where the descriptors stand afterwards. */
static void told(const char *call, ssize_t said, int number, int in, int out)
{
    printf("%s: %zd errno %d, at %ld and %ld\n", call, said, said < 0 ? number : 0, (long)lseek(in, 0, SEEK_CUR),
           (long)lseek(out, 0, SEEK_CUR));
}

#define TELL(in, out, ...)                                                                                   \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        ssize_t said_ = __VA_ARGS__;                                                                         \
        told(#__VA_ARGS__, said_, errno, in, out);                                                           \
    } while (0)

/* The length of a file, and a sum of its bytes that minds their places. */
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

/* So that the library knows the file, its twins and its residency: from a device if there is one. */
static void touch(int fd)
{
    off_t at = lseek(fd, 0, SEEK_CUR);
    CHECK(!device || pread(fd, device, SIZE, 0) == SIZE);
    CHECK(lseek(fd, 0, SEEK_CUR) == at);
}

/* The same bytes, later in the file than they were: by the device if there is one. */
static void change(int fd)
{
    if (device)
        device_put(device, host + 1000, SIZE - 1000);
    CHECK(pwrite(fd, device ? device : host + 1000, SIZE - 1000, 1000) == SIZE - 1000);
}

/* Through a pipe, as many bytes as there are. */
static void through_a_pipe(int from, off_t at, int to)
{
    int ends[2], twin[2];
    size_t all = 0;
    static char first[4096], second[4096];
    CHECK(pipe(ends) == 0 && pipe(twin) == 0);
    for (ssize_t got; (got = splice(from, &at, ends[1], NULL, 50000, 0)) > 0; all += (size_t)got) {
        /* What stands in the pipe may also be looked at twice. */
        ssize_t seen = tee(ends[0], twin[1], 4096, 0);
        CHECK(seen > 0 && read(twin[0], first, 4096) == seen);
        CHECK(pread(from, second, (size_t)seen, at - got) == seen && memcmp(first, second, (size_t)seen) == 0);
        for (ssize_t left = got, sent; left > 0; left -= sent)
            CHECK((sent = splice(ends[0], NULL, to, NULL, (size_t)left, 0)) > 0);
    }
    printf("spliced %zu bytes up to %ld\n", all, (long)at);
    TELL(from, to, splice(from, NULL, to, NULL, 100, 0)); /* none of them a pipe */
    TELL(from, to, splice(ends[0], NULL, ends[0], NULL, 100, SPLICE_F_NONBLOCK));
    TELL(from, to, splice(ends[0], &at, to, NULL, 100, 0)); /* a pipe has no offset */
    for (int i = 0; i < 2; i++)
        close(ends[i]), close(twin[i]);
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

    touch(in);
    off_t at = 100, to = 2 * SIZE;
    TELL(in, out, sendfile(out, in, NULL, 1 << 20));
    TELL(in, out, sendfile(out, in, &at, SIZE));
    TELL(in, out, sendfile(out, in, &at, SIZE)); /* nothing is left */
    TELL(in, out, sendfile(sockets[0], in, NULL, 10000));
    CHECK(recv(sockets[1], host, 10000, MSG_WAITALL) == 10000);
    TELL(in, more, sendfile(more, in, NULL, 100)); /* O_APPEND */
    TELL(in, out, sendfile(in, 900, NULL, 100));
    TELL(in, out, sendfile(900, in, NULL, 100));
    TELL(in, out, sendfile(out, sockets[0], NULL, 100));
    print_file("copies.out");

    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 40503u >> 7);
    touch(out);
    change(in);
    at = 0;
    TELL(in, out, copy_file_range(in, &at, out, &to, SIZE, 0));
    TELL(in, out, copy_file_range(in, NULL, out, NULL, 4097, 0));
    TELL(in, out, copy_file_range(in, &at, out, NULL, 4097, 0)); /* nothing is left */
    TELL(in, more, copy_file_range(in, NULL, more, NULL, 100, 0));
    TELL(in, in, copy_file_range(in, NULL, in, NULL, 100, 0)); /* onto itself */
    TELL(in, out, copy_file_range(in, NULL, sockets[0], NULL, 100, 0));
    TELL(in, out, copy_file_range(in, NULL, out, NULL, 100, 7));
    print_file("copies.out");

    change(in);
    touch(in);
    CHECK(ftruncate(out, 0) == 0 && lseek(out, 3, SEEK_SET) == 3);
    through_a_pipe(in, 4095, out);
    print_file("copies.in");
    print_file("copies.out");
    /* And the device reads what they brought. */
    unsigned char *brought = malloc(SIZE), *same = malloc(SIZE);
    CHECK(brought && same && pread(out, brought, SIZE - 4092, 0) == SIZE - 4092);
    if (device) {
        CHECK(pread(out, device, SIZE, 0) == SIZE - 4092);
        device_get(same, device, SIZE - 4092);
        CHECK(memcmp(brought, same, SIZE - 4092) == 0);
    }
    CHECK(memcmp(brought + 3, host + 4095, SIZE - 4095) == 0);
    return 0;
}
