/* A successful call on device memory leaves errno unchanged, for every hooked function, however the device was found:
 * the host's own call may have failed first. Memory that CUDA allocates is unknown to every hook before its first
 * use. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

ssize_t __read(int, void *, size_t);
ssize_t __write(int, const void *, size_t);
ssize_t __pread64(int, void *, size_t, off_t);
ssize_t __pwrite64(int, const void *, size_t, off_t);

enum { SPAN = 1 << 20 };

#define KEEPS(call)                                                                                                    \
    do {                                                                                                               \
        errno = 77;                                                                                                    \
        ssize_t done_ = (call);                                                                                        \
        if (done_ != (ssize_t)size || errno != 77)                                                                     \
            fprintf(stderr, "%s of %zu: %zd, errno %d\n", #call, size, done_, errno), exit(1);                         \
    } while (0)

static void every_name(int fd, size_t size)
{
    /* New memory for each call: state from one call must not affect the next. */
    char *d[22];
    for (int i = 0; i < 22; i++)
        CHECK((d[i] = device_alloc(SPAN)));
    struct iovec of[8];
    for (int i = 0; i < 8; i++)
        of[i] = (struct iovec){d[14 + i], size};
    KEEPS(pwrite(fd, d[0], size, 0));
    KEEPS(pwrite64(fd, d[1], size, 0));
    KEEPS(__pwrite64(fd, d[2], size, 0));
    KEEPS(pwritev(fd, &of[0], 1, 0));
    KEEPS(pwritev2(fd, &of[1], 1, 0, 0));
    lseek(fd, 0, SEEK_SET);
    KEEPS(write(fd, d[3], size));
    KEEPS(__write(fd, d[4], size));
    KEEPS(writev(fd, &of[2], 1));
    KEEPS(pread(fd, d[5], size, 0));
    KEEPS(pread64(fd, d[6], size, 0));
    KEEPS(__pread64(fd, d[7], size, 0));
    KEEPS(preadv(fd, &of[3], 1, 0));
    KEEPS(preadv2(fd, &of[4], 1, 0, 0));
    lseek(fd, 0, SEEK_SET);
    KEEPS(read(fd, d[8], size));
    KEEPS(__read(fd, d[9], size));
    KEEPS(readv(fd, &of[5], 1));
    for (int i = 0; i < 22; i++)
        device_free(d[i]);
    /* Host memory that was not looked up in the driver before: it is looked up now, and the host's call is made. */
    char *host = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(host != MAP_FAILED);
    KEEPS(pread(fd, host, size, 0));
    KEEPS(pwrite(fd, host + (4 << 20), size, 0));
    errno = 77;
    CHECK(munmap(host, 8 << 20) == 0 && errno == 77);
}

/* stdio calls get no EFAULT, but look memory up in the driver too. */
static void streams(const char *path)
{
    size_t size = 5000;
    char *device = device_alloc(SPAN);
    FILE *file = fopen(path, "w+");
    CHECK(device && file && fputs("x", file) >= 0);
    KEEPS(fwrite(device, 1, size, file));
    rewind(file);
    KEEPS(fread(device, 1, size, file));
    fclose(file), unlink(path);
    device_free(device);
}

int main(void)
{
    static const size_t sizes[] = {1, 100, 4096, 4097, 70000, SPAN};
    char path[] = "errno-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        every_name(fd, sizes[i]);
    close(fd);
    streams(path);
    return 0;
}
