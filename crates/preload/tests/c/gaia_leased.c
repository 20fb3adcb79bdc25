/* A program that maps a file that is not below a mount (argument 1), of 5 MiB + 100 bytes, byte n being n % 251; a
 * daemon of leased files serves. Argument 2: how many bytes of it this process reads; if 0, others have read them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spinio.h>
#include <spinio_gaia.h>

#include "check.h"

enum { PAGE = 4096, LEN = (5 << 20) + 100, R = SPINIO_GAIA_READ, W = SPINIO_GAIA_WRITE };

struct check {
    const unsigned char *at;
    size_t first, size, wrong;
    unsigned char add;
};

/* A kernel: compares its range with what the file has. */
static void compare(void *argument)
{
    struct check *c = argument;
    for (size_t i = 0; i < c->size; i++)
        c->wrong += c->at[i] != (unsigned char)((c->first + i) % 251 + c->add);
}

static size_t wrong_bytes(const unsigned char *at, size_t first, size_t size, unsigned char add)
{
    struct check c = {at, first, size, 0, add};
    CHECK(spinio_emulated_launch(compare, &c, NULL) == 0 && spinio_emulated_wait(NULL) == 0);
    return c.wrong;
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    size_t reads = strtoul(argv[2], NULL, 10);
    int fd = open(argv[1], O_RDONLY);
    CHECK(fd >= 0 && spinio_emulated_stream());
    NO_MAP(spinio_gaia_map(fd, 0, LEN, W), ENOTSUP, "reading only");
    NO_MAP(spinio_gaia_map(fd, 1, LEN, R), EINVAL, "4096");
    NO_MAP(spinio_gaia_map(fd, 0, 0, R), EINVAL, "empty");
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    NO_MAP(spinio_gaia_map(pipes[0], 0, PAGE, R), EINVAL, "regular");

    unsigned char *gpu = spinio_gaia_map(fd, 0, LEN, R);
    CHECK(gpu);
    close(fd);
    if (reads) { /* Not by the others: it would end the content that they share. */
        int writer = open(argv[1], O_RDWR);
        CHECK(writer >= 0);
        REFUSED(spinio_gaia_acquire(gpu, LEN, R), ETXTBSY, "open for writing");
        close(writer);
    }
    REFUSED(spinio_gaia_acquire_async(gpu, LEN, R, NULL), ENOTSUP, "stream order");
    REFUSED(spinio_gaia_release_async(gpu, LEN, 0, NULL, NULL), ENOTSUP, "stream order");
    CHECK(spinio_gaia_acquire(gpu, LEN, R) == LEN);
    CHECK(wrong_bytes(gpu, 0, LEN, 0) == 0);

    struct spinio_gaia_info info;
    CHECK(spinio_gaia_info(gpu, &info, sizeof info) == 0);
    CHECK(info.file_size == LEN && info.acquires == 1 && info.releases == 0);
    CHECK(info.bytes_from_file == reads && info.bytes_from_file + info.bytes_shared >= LEN);

    REFUSED(spinio_gaia_acquire(gpu, PAGE, W), EACCES, "read-only");
    REFUSED(spinio_gaia_acquire(gpu, LEN + 1, R), EINVAL, "not within one map");
    CHECK(spinio_gaia_release(gpu, PAGE, 0) == 0 && mrelease(gpu, PAGE, NULL) == 0);
    /* The CPU cannot load it, and no read can store there. */
    FAILS(pread(open(argv[1], O_RDONLY), gpu, 16, 0), EFAULT);

    pid_t child = fork();
    if (child == 0)
        _exit(spinio_gaia_acquire(gpu, PAGE, R) < 0 ? 0 : 1);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(spinio_gaia_acquire(gpu, LEN, R) == LEN && wrong_bytes(gpu, 0, LEN, 0) == 0);

    /* A part, at any page, twice: the same memory of the device is at two addresses. */
    fd = open(argv[1], O_RDONLY);
    unsigned char *part = spinio_gaia_map(fd, (2 << 20) - PAGE, 2 * PAGE, R);
    CHECK(part && spinio_gaia_acquire(part, 2 * PAGE, R) == 2 * PAGE);
    CHECK(wrong_bytes(part, (2 << 20) - PAGE, 2 * PAGE, 0) == 0);
    CHECK(spinio_gaia_unmap(part) == 0 && spinio_gaia_unmap(gpu) == 0);
    REFUSED(spinio_gaia_unmap(gpu), EINVAL, "No map");
    return 0;
}
