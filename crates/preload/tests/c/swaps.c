/* Another thread dup2s a second file over the descriptor and the first one back, during reads: no read has bytes of
 * both. swaps FOLDER [absent]: absent has the files read from storage. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { MIB = 1 << 20, SIZE = 8 * MIB, ROUNDS = 250 };
static unsigned char *device, *host, *seen;
static int files[2], number;
static volatile int over;

static void *swap_files(void *unused)
{
    for (unsigned i = 0; !over; i++) {
        CHECK(dup2(files[i % 2], number) == number);
        /* The second file stays there for varying times. */
        for (volatile unsigned wait = (i * 2654435761u >> 20); wait; wait--)
            ;
    }
    return unused;
}

static int make(const char *directory, int which)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/swaps-%d-%d", directory, which, (int)getpid());
    int fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0600);
    CHECK(fd >= 0);
    memset(host, 'A' + which, SIZE);
    CHECK(write(fd, host, SIZE) == SIZE && fsync(fd) == 0);
    close(fd);
    fd = open(path, O_RDONLY);
    unlink(path);
    return fd;
}

static int served, mixed;

static void check_one_file(const char *call, ssize_t got, const unsigned char *bytes)
{
    CHECK(got > 0 || (got == -1 && errno == EBADF));
    for (ssize_t i = 1; i < got; i++)
        if (bytes[i] != bytes[0]) {
            fprintf(stderr, "%s: %zd bytes, of '%c' and from %zd on of '%c'\n", call, got, bytes[0], i, bytes[i]);
            mixed++;
            break;
        }
    served += got > 0;
}

int main(int argc, char **argv)
{
    int absent = argc == 3 && strcmp(argv[2], "absent") == 0;
    CHECK(argc == 2 || absent);
    device = device_alloc(SIZE), host = malloc(SIZE), seen = malloc(SIZE);
    CHECK(device && host && seen);
    files[0] = make(argv[1], 0), files[1] = make(argv[1], 1);
    number = dup(files[0]);
    CHECK(number >= 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, swap_files, NULL) == 0);
    for (int i = 0; i < ROUNDS; i++) {
        for (int which = 0; absent && which < 2; which++)
            CHECK(posix_fadvise(files[which], 0, 0, POSIX_FADV_DONTNEED) == 0);
        size_t size = i % 4 == 3 ? 5 * MIB : (size_t)(i % 4 + 1) << 18;
        /* What is aligned may be one peer-to-peer transfer. */
        off_t at = i % 2 ? 4096 * (1 + i % 16) : 4096 + i;
        ssize_t got = pread(number, device, size, at);
        device_get(seen, device, size);
        check_one_file("pread", got, seen);

        /* Parts of one call. */
        struct iovec parts[] = {{device, size / 2}, {host, size / 4}, {device + size / 2, size / 4}};
        got = preadv(number, parts, 3, 4096 + i);
        device_get(seen, device, size);
        memmove(seen + size / 2 + size / 4, seen + size / 2, size / 4);
        memcpy(seen + size / 2, host, size / 4);
        check_one_file("preadv", got, seen);

        /* At the offset, of which a file that the number did not name at the call keeps its own. */
        enum { START = 2 * MIB };
        for (int which = 0; which < 2; which++)
            CHECK(lseek(files[which], START, SEEK_SET) == START);
        got = readv(number, parts, 3);
        CHECK(got > 0 || (got == -1 && errno == EBADF));
        for (int which = 0; which < 2; which++)
            CHECK(lseek(files[which], 0, SEEK_CUR) >= START);
    }
    over = 1;
    CHECK(pthread_join(thread, NULL) == 0 && mixed == 0 && served > ROUNDS / 4);
    device_free(device);
    return 0;
}
